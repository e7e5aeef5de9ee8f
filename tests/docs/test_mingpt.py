"""SkyPilot's PyTorch example: torchrun trains examples/mingpt on the nodes of a pool, launched in both of its ways."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.notebook import ROOT, Notebook, Shown
from tests.lab.places import pooled

torch = pytest.importorskip("torch")

SMALL = "data.truncate=0.4 trainer.log_every=1"
# the example's two ways as they stand there, but for the port: tests beside this one may use that
STATIC = """\
MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
torchrun \\
--nnodes=$SKYPILOT_NUM_NODES \\
--nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
--master_addr=$MASTER_ADDR \\
--master_port=$MASTER_PORT \\
--node_rank=${SKYPILOT_NODE_RANK} \\
main.py"""
C10D = """\
MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
if [ $SKYPILOT_NODE_RANK -eq 0 ]; then
    MASTER_ADDR=localhost
fi

echo "Starting distributed training, head node: $MASTER_ADDR"

torchrun \\
--nnodes=$SKYPILOT_NUM_NODES \\
--nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
--rdzv_backend=c10d \\
--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT \\
--rdzv_id $SKYPILOT_TASK_ID \\
main.py"""
"""Its head calls itself localhost; the notebook's does not."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, where it may write."""
    return Path(shutil.copytree(ROOT / "examples" / "mingpt", tmp_path / "mingpt"))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """On this machine alone: what does not differ elsewhere."""
    with pooled("local", tmp_path_factory.mktemp("here") / "pool") as one:
        yield one


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """On machines of their own."""
    with pooled("machines", tmp_path_factory.mktemp("machines") / "pool") as one:
        yield one


def sh(script: str, folder: Path, options: str = "") -> str:
    return f"%%sky_sh --workdir {folder} --env OMP_NUM_THREADS=1 {options}\n{script}"


def one_each(script: str) -> str:
    """One process a node: each has torch to import, in two seconds of CPU."""
    return script.replace("$SKYPILOT_NUM_GPUS_PER_NODE", "1")


def losses(shown: Shown, kind: str) -> list[float]:
    """What rank 0 told, in order."""
    lines = re.findall(rf"\[rank 0 on node 0\] epoch \d+ .*\| {kind} loss ([\d.]+)", shown.stdout)
    return [float(loss) for loss in lines]


@pytest.mark.needs("sshd", "namespaces")
def test_both_ways_train_and_resume_each_other(machines: Notebook, folder: Path) -> None:
    """On separate machines; test_notebooks.py runs notebooks/mingpt_torchrun.ipynb on this one."""
    first = machines.run(sh(f"{one_each(STATIC)} {SMALL} trainer.epochs=2", folder, "--only all"))
    for node in (0, 1):
        assert f"[{node}] [rank {node} on node {node}] of 2, on " in first.stdout
    told = losses(first, "train")
    assert told[-1] < 0.8 * told[0]
    assert "snapshot saved to snapshot.pt" in first.stdout, (
        "by the head alone; the others may have other disks"
    )
    second = machines.run(sh(f"{one_each(C10D)} {SMALL} trainer.epochs=3", folder, "--only all"))
    assert second.stdout.count("resumed from snapshot.pt after epoch 2") == 2
    assert "[0] Starting distributed training, head node: localhost" in second.stdout
    assert losses(second, "train")[0] < 0.9 * told[0], "it did not begin anew"
    assert losses(second, "test")[-1] < losses(first, "test")[-1]


@pytest.mark.parametrize("mark", ["mingpt", "mingpt-rendezvous"])
def test_the_pages_scripts_train(here: Notebook, folder: Path, mark: str) -> None:
    """Unchanged, except for the port, the folder and the amount of training."""
    page = (ROOT / "docs" / "how-to" / "shell.md").read_text()
    (cell,) = re.findall(rf"<!-- tested: {mark} -->\n```python\n(.*?)```", page, re.DOTALL)
    changes = {
        "--workdir examples/mingpt": f"--workdir {folder} --env OMP_NUM_THREADS=1",
        "port=8008" if mark == "mingpt" else ":29500": "port=$MASTER_PORT"
        if mark == "mingpt"
        else ":$MASTER_PORT",
        "\nmain.py": f"\nmain.py {SMALL} trainer.epochs=1",
    }
    for old, new in changes.items():
        assert old in cell
        cell = cell.replace(old, new)
    shown = here.run(one_each(cell)).stdout
    # the head's output; in a rendezvous, torchrun's first node need not be the pool's
    assert re.search(r"\[rank \d on node \d\] of 2, on ", shown)
    assert re.search(r"\[rank \d on node \d\] epoch 1 .*test loss [\d.]+", shown)


def workers() -> list[psutil.Process]:
    """The processes that torchrun has started on this machine for these tests."""
    found = []
    for process in psutil.process_iter():
        try:
            if "main.py" in process.cmdline() and "LOCAL_RANK" in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_worker_that_is_killed_ends_the_run_on_all_nodes(here: Notebook, folder: Path) -> None:
    script = f"echo $SKYPILOT_TASK_ID > {folder}/task\n{STATIC} {SMALL} trainer.epochs=1000 trainer.save_every=1000"
    shown = here.start(sh(script, folder))
    here.watch(shown, lambda shown: len(losses(shown, "train")) > 3)
    task = (folder / "task").read_text().strip()
    ours = {
        int(process.environ()["RANK"]): process
        for process in workers()
        if process.environ()["SKYPILOT_TASK_ID"] == task
    }
    assert sorted(ours) == [0, 1, 2, 3]
    ours[3].kill()
    here.finish(shown)
    assert shown.failure.ename == "ScriptError"
    assert here.fields()["node"] == 1
    assert re.search(
        rf"rank 3 \(local rank 1\), process {ours[3].pid}, .*SIGKILL", shown.failure.text
    )
    _, alive = psutil.wait_procs(ours.values(), timeout=10)
    assert alive == []


def test_a_worker_that_raises_shows_its_own_traceback(here: Notebook, folder: Path) -> None:
    failed = here.fail(sh(f"{one_each(STATIC)} {SMALL} model.heads=5", folder))
    assert re.search(r"ValueError: model\.width=64 .*\bmodel\.heads=5\b", failed.text)
    assert re.search(r"model\.py\", line \d+, in __init__", failed.text)
    assert "launch_agent" not in failed.text


# ------------------------------------------------------------------------------------------ its configuration


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's modules can be imported; they know each other by plain names, which nobody else has afterwards."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "mingpt")
    yield
    for path in (ROOT / "examples" / "mingpt").glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.skipif(
    torch.cuda.device_count() >= 2, reason="this machine has the GPUs that are asked for"
)
def test_too_few_devices_raise_an_error(example: None, monkeypatch: pytest.MonkeyPatch) -> None:
    main = importlib.import_module("main")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2 processes .* GPUs"):
        main.device_of("cuda")
    assert main.device_of("cpu").type == "cpu"


def test_words_change_the_configuration(example: None) -> None:
    config = importlib.import_module("config")
    path = ROOT / "examples" / "mingpt" / "config.toml"
    read = config.read(
        path, ["trainer.epochs=7", "optimizer.learning_rate=1e-4", "trainer.device=cpu"]
    )
    assert (read.trainer.epochs, read.optimizer.learning_rate, read.trainer.device) == (
        7,
        1e-4,
        "cpu",
    )
    assert config.read(path).folder == path.parent
    for wrong in ("epochs=3", "trainer.epochs", "trainer.epoch=3", "trainer.epochs=many"):
        with pytest.raises(SystemExit, match=wrong.partition("=")[0]):
            config.read(path, [wrong])
