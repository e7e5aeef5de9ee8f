"""The HuggingFace plugin: Trainer finds the ranks' group, and the token is seen by nobody else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import skymagic as sky
from skymagic.plan.requests import PluginSpec, PoolRequest
from skymagic.plugins import Cluster

NEEDED = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
missing = [name for name in NEEDED if find_spec(name) is None]
needs_all = pytest.mark.skipif(
    bool(missing), reason=f"not installed: pip install {' '.join(missing)}"
)
TOKEN = "hf_tellnobodyaboutthis"


def test_packages() -> None:
    made = sky.plugins.huggingface().transform(sky.Image(pip=["einops"]), Cluster())
    assert made.pip == ("einops", "transformers", "datasets", "tokenizers", "accelerate")


def test_token_is_not_shown() -> None:
    plugin = sky.plugins.huggingface(token=TOKEN)
    spec = PluginSpec("huggingface", {"token": TOKEN})
    request = PoolRequest(plugins=(spec,))
    for shown in (plugin, plugin.spec, spec, request, sky.Compute(plugins=[plugin])._request):
        assert TOKEN not in repr(shown)
        assert TOKEN not in str(shown)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [sky.plugins.torch(), sky.plugins.huggingface(token=TOKEN)]
    with sky.Compute(nodes=2, plugins=plugins) as made:
        yield made


@needs_all
def test_the_token_is_with_the_ranks_alone(pool: Any, capfd: pytest.CaptureFixture[str]) -> None:
    read = sky.function(lambda: os.environ["HF_TOKEN"])
    assert read() @ pool == [TOKEN] * 2
    commands = subprocess.run(
        ["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert TOKEN not in commands
    folder = Path(pool.agents.started[0].directory)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in repr(pool) + repr(pool.plan) + pool.plan.text()
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err


@sky.function
@sky.silent
def finetune(folder: str) -> dict[str, Any]:
    """A tiny GPT-2 with random weights; nothing is downloaded."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Counting(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.arange(index, index + 16) % 64
            return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(
        sky.instance_info().rank
    )  # other weights on each rank: the group makes them equal
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
    arguments = TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=4, **options
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    return {
        "world": arguments.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": [parameter.double().sum().item() for parameter in model.parameters()],
    }


@needs_all
def test_trainer_trains_one_model_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    first, second = finetune(str(tmp_path)) @ pool
    assert (first["world"], first["wrapped"]) == (2, "DistributedDataParallel")
    assert first["weights"] == second["weights"]
    reported = pool.metrics.loss.unstack()
    assert reported.index.tolist() == [1, 2, 3, 4], "Trainer's callback reports each step"
    assert reported.notna().all(axis=1).tolist() == [False, True, False, True], (
        "and what is logged, each second one"
    )


@needs_all
def test_trainer_on_one_rank_names_the_participants(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="only rank . takes part"):
        finetune(str(tmp_path)) >> pool


@needs_all
def test_bars_of_the_libraries_end_at_100_percent(
    pool: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    @sky.function
    def count() -> None:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]  # as the hub and transformers have it

        for _ in tqdm(range(5), desc="count"):
            pass

    count() @ pool
    shown = capfd.readouterr()
    assert "count: 100%" in shown.out + shown.err
    assert "count:   0%" not in shown.out
