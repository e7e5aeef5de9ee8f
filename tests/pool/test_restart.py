"""Ranks that are replaced while something else goes on: another recovery, or somebody who tidies up the temporary folder."""

from __future__ import annotations

import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

MEET = "%%sky_broadcast -o met\nimport os, torch, torch.distributed as dist\ndist.all_reduce(one := torch.ones(1))\none.item()"
ENDS = {
    "one is killed": "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ndist.barrier()",
    "all are killed": "os.kill(os.getpid(), 9)",
    "all exit": "os._exit(3)",
    "the cell fails": "1 / 0",
    "one fails": "if os.environ['RANK'] == '1': 1 / 0\ndist.barrier()",
}
REPETITIONS = int(os.environ.get("SKYMAGIC_REPETITIONS", "1"))
"""`make soak` has more of them."""
PROMPTLY = 20.0
"""Seconds on a busy machine; what goes wrong takes 45 or 120."""


notebook = borrowed("--ranks 2 --plugin torch", "pool = %sky_pool --ranks 2 --plugin torch", MEET)


def stopped(notebook: Notebook) -> None:
    """A cell in which one rank waits for the other, and the stop button."""
    cell = notebook.start(
        "%%sky_broadcast\nprint('begun', flush=True)\nif os.environ['RANK'] == '0': dist.barrier()\nelse: time.sleep(300)"
    )
    notebook.watch(cell, lambda shown: "begun" in shown.text)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error.ename == "RunInterrupted"


@pytest.mark.parametrize("end", [*ENDS, "it is stopped"])
def test_restart_during_a_recovery_is_the_only_one(notebook: Notebook, end: str) -> None:
    times: list[float] = []
    for number in range(REPETITIONS):
        notebook.run("%%sky_broadcast\nimport os, time, torch.distributed as dist")
        if end in ENDS:
            notebook.fail(f"%%sky_broadcast\n{ENDS[end]}")
        else:
            stopped(notebook)
        begun = time.monotonic()
        assert notebook.run("%sky_restart").said.startswith("ranks 0, 1 of pool 'main' ")
        shown = notebook.run(MEET)
        times.append(time.monotonic() - begun)
        print(f"{number + 1}: {times[-1]:.2f} s")
        assert times[-1] < PROMPTLY
        assert notebook.value("met") == [2.0, 2.0]
        assert "group" not in shown.text, "a restart's own kill is no fault"
    print(
        f"{end}, {len(times)} restarts: median {median(times):.2f} s, slowest {max(times):.2f} s, {sum(each > 3 for each in times)} over 3 s"
    )


HELD = """import threading
agents, recovery = pool.pool.resources.agents, pool.pool.recovery
started, holding, asked = [], threading.Event(), threading.Event()
respawn, replace = agents.respawn, recovery._replace
def held(ranks, *args):
    holding.set()
    asked.wait(60)
    started.extend(ranks)
    respawn(ranks, *args)
def asks(ranks):
    replace(ranks)
    asked.set()
agents.respawn, recovery._replace = held, asks"""
"""A recovery that starts ranks only once somebody has asked for a restart."""


def test_restart_during_a_recovery_starts_each_rank_once(
    notebook: Notebook,
) -> None:
    notebook.run(HELD)
    notebook.fail(f"%%sky_broadcast\n{ENDS['all are killed']}")
    assert notebook.value("holding.wait(60)")
    shown = notebook.run("%sky_restart")
    assert shown.said.startswith("ranks 0, 1 of pool 'main' ")
    assert notebook.value("asked.is_set(), started") == (True, [0, 1])
    again = notebook.run(MEET)
    assert notebook.value("met") == [2.0, 2.0]
    assert "group" not in shown.text + again.text, "a restart's own kill is no fault"
    notebook.run("del agents.respawn, recovery._replace")


def test_a_pools_folder_that_somebody_deletes_is_made_again(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport os\nkept = 7")
    (folder,) = notebook.value("[pool.pool.resources.agents.started[0].directory]")
    shutil.rmtree(folder)
    failed = notebook.start("%%sky_broadcast\nif os.environ['RANK'] == '1': os._exit(3)")
    notebook.finish(failed)
    begun = time.monotonic()
    shown = notebook.run(MEET)
    assert time.monotonic() - begun < PROMPTLY
    assert notebook.value("met") == [2.0, 2.0]
    assert (
        f"{folder} was deleted" in failed.text + shown.text
    )  # the rank may be started again before the failed cell is over
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    notebook.run("%%sky_broadcast -t 0 -o alive\nkept")
    assert notebook.value("alive") == [7]
