"""Lightning on a pool: Trainer and Fabric train over all ranks as they are written, or say what to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from skymagic.jobs.failures import hints
from skymagic.plugins._torch.launched import lightning_arguments
from skymagic.run.results import RankFailure
from skymagic.runtime.info import InstanceInfo
from tests.lab.notebook import Notebook, opened, seen
from tests.programs.test_programs import ran

needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("torch") is None,
    reason="lightning is not installed: pip install lightning",
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("lightning"), "%sky_pool --nodes 2 --plugin torch") as one:
        yield one


@needs_lightning
def test_trainer_fits_twice_on_all_ranks_with_checkpoint(notebook: Notebook) -> None:
    first, second = ran(notebook, "lightning_trainer")
    assert first["world"] == [(2, 0, 1, 2)] * 2
    assert second["world"] == [(2, 1, 1, 2)] * 2
    assert first["strategy"] == "DDPStrategy"
    assert first["steps"] == [8, 16], (
        "64 examples, 8 a batch on 2 ranks: 4 steps an epoch; the second fit goes on with the third"
    )
    assert first["weights"] == second["weights"]
    assert first["kept"] == second["kept"]
    assert (notebook.folder / first["kept"]).is_file()
    assert first["loss"] < 0.5
    steps = "__import__('skymagic').find().metrics.reset_index()"
    assert (
        notebook.value(
            f"{steps}.groupby('rank').step.agg(lambda found: sorted(set(map(int, found)))).tolist()"
        )
        == [[*range(1, 17)]] * 2
    )
    assert notebook.value(f"{steps}[{steps}.step == 16].loss.notna().tolist()") == [True, True]


@needs_lightning
def test_its_progress_bar_ends_at_100_percent(notebook: Notebook) -> None:
    cell = "L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False).fit(model, data)"
    shown = notebook.run(f"%%sky_broadcast\n{cell}")
    assert "Epoch 0: 100%" in shown.text
    assert "\x1b[1A" not in shown.text, "nothing moves a terminal's cursor"


@needs_lightning
def test_ranks_survive_blocking_native_code_after_a_fit(
    notebook: Notebook,
) -> None:
    """Lightning gives all signals the handlers that Python knows of: that of skymagic's looks at stacks is set in C."""
    ran(notebook, "lightning_trainer")
    holds = "ctypes.PyDLL(None).poll(None, 0, 3_000)"
    fit = "L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False).fit(model, data)"
    for cell in (f"import ctypes, os\nkept = os.getpid()\n{holds}", f"{fit}\n{holds}"):
        notebook.run(f"%%sky_broadcast\n{cell}")
        assert seen(notebook, "kept == os.getpid()") == [True] * 2


@needs_lightning
def test_fabric_trains_over_all_ranks(notebook: Notebook) -> None:
    first, second = ran(notebook, "lightning_fabric")
    assert (first["world"], first["batches"]) == (2, 4)
    assert first == second


@needs_lightning
def test_a_trainer_takes_every_argument_by_keyword(notebook: Notebook) -> None:
    first, second = ran(notebook, "lightning_every_argument")
    assert first == second
    assert first[:3] == [2, 2, True]


@needs_lightning
def test_a_model_sharded_with_torchs_fully_shard(notebook: Notebook) -> None:
    first, second = ran(notebook, "lightning_sharded")
    assert first == second
    assert (first["world"], first["part"]) == (2, [4, 4])


@needs_lightning
def test_fsdp_without_gpus_is_explained(notebook: Notebook) -> None:
    failed = notebook.fail(
        "%%sky_broadcast\nL.Trainer(strategy='fsdp', accelerator='cpu', logger=False)"
    )
    assert "ModelParallelStrategy" in failed.text


@needs_lightning
def test_a_rank_that_runs_alone_trains_alone(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -t 1 -o alone\nlone = L.Trainer(logger=False)\n[lone.world_size, type(lone.strategy).__name__]"
    )
    assert notebook.value("alone") == [[1, "SingleDeviceStrategy"]]


@needs_lightning
def test_one_device_on_each_rank_is_pointed_out(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\nL.Trainer(devices=1, logger=False)")
    assert "devices=1, num_nodes=1" in shown.stderr


NODES = InstanceInfo(total_nodes=2, world_size=8, local_world_size=4)
NODE = InstanceInfo(world_size=4, local_world_size=4)
ALONE = InstanceInfo()


@pytest.mark.parametrize(
    ("asked", "info", "together", "gpu", "expected"),
    [
        (("auto", 1, "auto"), NODES, True, 0, (4, 2)),
        (("auto", 1, "auto"), NODE, True, None, (4, 1)),
        (("auto", 2, "fsdp"), NODES, True, 0, (4, 2)),
        ((4, 1, "ddp"), NODES, True, 0, (4, 2)),
        ((4, 2, "ddp"), NODES, True, 0, (4, 2)),
        ((1, 1, "auto"), NODES, True, 0, (1, 1)),
        (("auto", 1, "auto"), NODES, False, 3, ([3], 1)),
        (("auto", 1, "ddp"), NODES, False, None, (1, 1)),
        ((2, 1, "ddp"), NODES, False, None, (2, 1)),
        (("auto", 1, "auto"), ALONE, True, 0, ([0], 1)),
    ],
)
def test_defaults_are_filled_in(
    asked: tuple[Any, int, str],
    info: InstanceInfo,
    together: bool,
    gpu: int | None,
    expected: tuple[Any, int],
) -> None:
    assert lightning_arguments(*asked, info, together, gpu) == expected


def test_a_pool_without_a_process_group_hints_at_the_plugin() -> None:
    words = "`Trainer(strategy='ddp')` is not compatible with an interactive environment. Run your code as a script"
    failure = RankFailure(0, "host", ename="MisconfigurationException", evalue=words)
    assert "--plugin torch" in hints([failure], [])[0]
    assert hints([failure], ["torch"]) == []


LAUNCHING = {
    "ddp_notebook": "lightning.Trainer(strategy='ddp_notebook', **options)",
    "ddp_spawn": "lightning.Trainer(strategy='ddp_spawn', **options)",
    "ddp_fork": "lightning.Trainer(strategy='ddp_fork_find_unused_parameters_true', **options)",
    "object": "lightning.Trainer(strategy=DDPStrategy(start_method='fork'), **options)",
}


@needs_lightning
@pytest.mark.parametrize("name", LAUNCHING)
def test_strategy_that_launches_processes_trains_on_the_ranks(
    notebook: Notebook, name: str
) -> None:
    shown = notebook.run(
        "%%sky_broadcast -o r --timeout 120s\nimport lightning, os, torch\n"
        "from lightning.pytorch.strategies import DDPStrategy\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "options = dict(max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,\n"
        "               enable_model_summary=False, accelerator='cpu')\n"
        f"trainer = {LAUNCHING[name]}\ntrainer.fit(BoringModel())\n"
        "trainer.world_size, trainer.global_step, type(trainer.strategy.launcher).__name__"
    )
    assert [row[:2] for row in notebook.value("r")] == [(2, 2)] * 2
    assert "MultiProcessing" not in str(notebook.value("r"))
    assert re.search(r"\bprocesses\b.*\brank\b", shown.text)
