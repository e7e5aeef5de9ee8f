"""Accelerate: on every rank, set the environment that ``accelerate launch`` would set."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skymagic.errors import RequestError
from skymagic.plan.suggest import did_you_mean
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime.info import InstanceInfo

if TYPE_CHECKING:
    from skymagic.plan.image import Image

PRECISIONS = ("no", "fp16", "bf16", "fp8")
FSDP = frozenset(
    {
        "version",
        "sharding_strategy",
        "reshard_after_forward",
        "offload_params",
        "min_num_params",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "backward_prefetch",
        "state_dict_type",
        "forward_prefetch",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "ignored_modules",
    }
)
"""Settings that `FullyShardedDataParallelPlugin` reads from the environment, prefixed by FSDP_."""
_DEEPSPEED_PREFIX = "ACCELERATE_DEEPSPEED_"
DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": f"{_DEEPSPEED_PREFIX}ZERO_STAGE",
    "offload_optimizer_device": f"{_DEEPSPEED_PREFIX}OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": f"{_DEEPSPEED_PREFIX}OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": f"{_DEEPSPEED_PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": f"{_DEEPSPEED_PREFIX}OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": f"{_DEEPSPEED_PREFIX}ZERO3_INIT",
    "zero3_save_16bit_model": f"{_DEEPSPEED_PREFIX}ZERO3_SAVE_16BIT_MODEL",
    "config_file": f"{_DEEPSPEED_PREFIX}CONFIG_FILE",
    "moe_layer_cls_names": f"{_DEEPSPEED_PREFIX}MOE_LAYER_CLS_NAMES",
}
"""Environment variables that `DeepSpeedPlugin` reads, by setting."""


def accelerate(
    config: Mapping[str, object] | None = None, mixed_precision: str | None = None
) -> Plugin:
    """Install accelerate and set its environment as ``accelerate launch`` does.

    The torch plugin is added automatically. ``Accelerator()`` and transformers' ``Trainer`` find
    the process group and these settings without a flag.

    Args:
        config: answers to ``accelerate config`` as a dict: ``{"mixed_precision": "bf16", "fsdp":
            {"sharding_strategy": "FULL_SHARD", …}}`` or ``{"deepspeed": {"zero_stage": 3, …}}``.
            The prefix ``fsdp_`` of keys is optional.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``, unless `config` sets it.

    Raises:
        RequestError: accelerate does not have these keys or values. Lists all of them.
    """
    variables = environment(config, mixed_precision)

    def transform(image: Image, cluster: Cluster) -> Image:
        packages = (
            "accelerate",
            *(("deepspeed",) if "ACCELERATE_USE_DEEPSPEED" in variables else ()),
        )
        return image.replace(pip=(*image.pip, *packages))

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        sharding = "ACCELERATE_USE_FSDP" in variables or "ACCELERATE_USE_DEEPSPEED" in variables
        if sharding and not _has_accelerator():
            raise RuntimeError(
                "accelerate shards on GPUs only, and this rank has none: leave fsdp and deepspeed "
                "out (then it trains with DDP), or shard with torch's own fully_shard"
            )
        os.environ.update(variables)
        yield

    return Plugin(
        name="accelerate",
        transform=transform,
        around_app=around_app,
        preload=("accelerate",),
        needs=("torch",),
    )


def environment(
    config: Mapping[str, object] | None, mixed_precision: str | None = None
) -> dict[str, str]:
    """Return the environment variables for a configuration.

    Raises:
        RequestError: lists all mistakes.
    """
    if config is not None and not isinstance(config, Mapping):
        raise RequestError(
            f"config is a dict, sky.plugins.accelerate(config={{…}}), not {config!r}"
        )
    settings = {"mixed_precision": mixed_precision, **(config or {})}
    mistakes = _unknown("config", settings, ("mixed_precision", "fsdp", "deepspeed"))
    variables: dict[str, str] = {}
    if (precision := settings["mixed_precision"]) is not None:
        if precision not in PRECISIONS:
            mistakes.append(f"mixed_precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        variables["ACCELERATE_MIXED_PRECISION"] = str(precision)
    fsdp, deepspeed = (_section(settings, name, mistakes) for name in ("fsdp", "deepspeed"))
    if fsdp is not None and deepspeed is not None:
        mistakes.append("fsdp and deepspeed are two ways of sharding: keep one of them")
    if fsdp is not None:
        mistakes += _unknown("fsdp", fsdp, FSDP)
        exceptions = {"transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}
        section_variables = {
            f"FSDP_{exceptions.get(name, name.upper())}": _text(value)
            for name, value in fsdp.items()
        }
        variables |= {"ACCELERATE_USE_FSDP": "true", **section_variables}
    if deepspeed is not None:
        mistakes += _unknown("deepspeed", deepspeed, DEEPSPEED)
        section_variables = {
            DEEPSPEED[name]: _text(value) for name, value in deepspeed.items() if name in DEEPSPEED
        }
        variables |= {"ACCELERATE_USE_DEEPSPEED": "true", **section_variables}
    if mistakes:
        raise RequestError(mistakes)
    return variables


def _section(
    settings: Mapping[str, object], name: str, mistakes: list[str]
) -> dict[str, object] | None:
    """Return one section of a configuration, without the section's prefix in its keys."""
    section = settings.get(name)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        mistakes.append(f"{name} is a dict, not {section!r}")
        return {}
    return {
        str(key).removeprefix(f"{name}_"): value
        for key, value in section.items()
        if value is not None
    }


def _unknown(section: str, keys: Iterable[str], allowed: Iterable[str]) -> list[str]:
    return [
        f"{section} has no {key!r}"
        f"{did_you_mean(key, allowed) or '; it has ' + ', '.join(sorted(allowed))}"
        for key in keys
        if key not in allowed
    ]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())
