"""A pool behind a tunnel: ranks, cells and output do not notice that connections come and go."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.lab.notebook import Notebook, Shown, opened

POOL = "%sky_pool lab --provider local --procs-per-node 2 --plugin torch"
COUNTING = """%%sky_broadcast --only all
import time
for number in range(ROUNDS):
    print(number, flush=True)
    time.sleep(0.01)"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("tunnel"), "import tests.lab.tunnelled", POOL) as one:
        yield one


def gates(notebook: Notebook) -> list[psutil.Process]:
    """The processes that carry connections now."""
    found = []
    for child in psutil.Process(notebook.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if "skymagic.kernels.daemon.attach" in child.cmdline() else []
    return found


def cut(notebook: Notebook) -> set[int]:
    """Lose the connections; the processes that died of it."""
    killed = set()
    for gate in gates(notebook):
        with contextlib.suppress(psutil.NoSuchProcess):
            gate.kill()
            killed.add(gate.pid)
    return killed


def watch(notebook: Notebook, running: Shown, count: int) -> None:
    """Until a cell shows so many lines, or ends."""
    notebook.watch(running, lambda shown: shown.done or shown.text.count("\n") >= count)


def test_twenty_connections_die_in_one_run(notebook: Notebook) -> None:
    notebook.run("ROUNDS = 500")
    moments = random.Random(0)
    running = notebook.start(COUNTING)
    killed: set[int] = set()
    while len(killed) < 20:
        watch(notebook, running, running.text.count("\n") + moments.randint(1, 40))
        assert not running.done, f"{len(killed)} connections were lost"
        killed |= cut(notebook)
    shown = notebook.finish(running)
    assert shown.error is None, shown.error
    for rank in range(2):
        numbers = [line.split()[1] for line in shown.lines if line.startswith(f"[{rank}] ")]
        assert numbers == [str(number) for number in range(500)]


def test_cells_go_on_after_connections_died(notebook: Notebook) -> None:
    for number in range(5):
        cut(notebook)
        notebook.run(f"%%sky_broadcast -o found\nimport torch.distributed as dist\ndist.get_rank() + {number}")
        assert notebook.value("found") == [number, number + 1]


def test_a_silent_connection(notebook: Notebook) -> None:
    notebook.run("ROUNDS = 20")
    (gate,) = gates(notebook)
    gate.send_signal(signal.SIGSTOP)
    shown = notebook.run(COUNTING)
    assert len(shown.lines) == 40
    gate.wait(30)
