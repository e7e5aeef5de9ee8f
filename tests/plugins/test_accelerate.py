"""Accelerate: the environment of ``accelerate launch``, word for word, and a training that uses it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import ProvisionError, RequestError
from skymagic.plan.requests import PluginSpec
from skymagic.plugins import Cluster, load, order, resolve
from skymagic.plugins._accelerate import environment
from tests.lab.golden import Golden

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="not installed: pip install accelerate"
)

FSDP = {
    "sharding_strategy": "FULL_SHARD", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "backward_prefetch": "BACKWARD_PRE",
    "transformer_layer_cls_to_wrap": "GPT2Block", "state_dict_type": "SHARDED_STATE_DICT", "forward_prefetch": False,
    "sync_module_states": True, "use_orig_params": True, "cpu_ram_efficient_loading": True, "offload_params": False,
    "version": 1, "min_num_params": 100, "reshard_after_forward": "true", "activation_checkpointing": False,
    "activation_checkpointing_offload": False, "ignored_modules": "head",
}  # fmt: skip


def test_the_environment_is_that_of_its_own_launcher() -> None:
    """What `accelerate launch` sets for the same configuration."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    flags = {
        name: str(value) for name, value in FSDP.items() if name != "ignored_modules"
    }  # it has no flag
    options = [
        f"--fsdp_{name}={text.lower() if text in ('True', 'False') else text}"
        for name, text in flags.items()
    ]
    args = launch_command_parser().parse_args(
        ["--use_fsdp", "--mixed_precision=bf16", "--num_processes=2", "--num_machines=1", "--main_process_port=0", *options, "x.py"]
    )  # fmt: skip
    args.fsdp_ignored_modules = "head"
    args.dynamo_backend, args.num_cpu_threads_per_process = "no", 1
    theirs = prepare_multi_gpu_env(args)
    ours = environment({"mixed_precision": "bf16", "fsdp": FSDP})
    assert {name: theirs.get(name) for name in ours} == ours
    assert {name for name in theirs if name.startswith("FSDP_")} == {
        name for name in ours if name.startswith("FSDP_")
    }
    prefixed = {f"fsdp_{name}": value for name, value in FSDP.items()}
    assert environment({"mixed_precision": "bf16", "fsdp": prefixed}) == ours


def test_the_names_of_deepspeed_are_those_that_accelerate_reads() -> None:
    import inspect

    from accelerate.utils import dataclasses

    from skymagic.plugins._accelerate import DEEPSPEED

    source = inspect.getsource(dataclasses)
    assert [name for name in DEEPSPEED.values() if f'"{name}"' not in source] == []
    made = environment(
        {
            "deepspeed": {
                "zero_stage": 3,
                "deepspeed_config_file": "ds.json",
                "gradient_clipping": 1.0,
            }
        }
    )
    assert made == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fsdp": {"sharding_stategy": "FULL_SHARD"}}, "did you mean 'sharding_strategy'"),
        ({"deepspeed": {"stage": 3}}, "deepspeed has no 'stage'"),
        ({"fsdp": {}, "deepspeed": {}}, "keep one of them"),
        ({"mixed_precision": "half"}, "one of no, fp16, bf16, fp8"),
        ({"fdsp": {}}, "did you mean 'fsdp'"),
        ("config.yaml", "config is a dict"),
        ({"fsdp": True}, "fsdp is a dict"),
    ],
)
def test_unknown_accelerate_settings_are_refused(config: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        sky.plugins.accelerate(config=config)


def test_torch_plugin_is_added_before_it() -> None:
    names = [
        plugin.name
        for plugin in resolve([load(PluginSpec("accelerate", {"mixed_precision": "bf16"}))])
    ]
    assert names == ["torch", "accelerate"]
    both = [load(PluginSpec("accelerate")), load(PluginSpec("torch", {"backend": "gloo"}))]
    assert [plugin.name for plugin in resolve(both)] == ["torch", "accelerate"]
    assert [plugin.name for plugin in order(both)] == ["torch", "accelerate"]
    image = load(PluginSpec("accelerate")).transform(sky.Image(), Cluster())
    assert image.pip == ("accelerate",)


@sky.function
def train() -> dict[str, Any]:
    """Linear regression on data of which each rank has another half."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator()
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = 0
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        batches += 1
    return {
        "ranks": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "batches": batches,
        "weight": accelerator.unwrap_model(model).weight.detach().tolist(),
    }


def test_a_training_uses_it() -> None:
    with sky.Compute(
        nodes=2, plugins=[sky.plugins.accelerate(config={"mixed_precision": "bf16"})]
    ) as pool:
        one, other = train() @ pool
        assert (one["ranks"], one["precision"], one["batches"]) == (2, "bf16", 4)
        assert one["weight"] == other["weight"]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_sharding_without_a_gpu_is_refused_when_the_pool_starts(golden: Golden) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    with (
        golden.raises(ProvisionError),
        sky.Compute(nodes=1, plugins=[sky.plugins.accelerate(config={"fsdp": FSDP})]),
    ):
        pass
