"""Signals as Slurm sends them, to some processes of a job or to all: hooks run first, once on each rank, and nothing stays."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.lab.notebook import Notebook, Shown
from tests.lab.pools import KERNEL, Pools

HOOK = """%%sky_broadcast
import os, signal, time, skymagic as sky
rank, told = sky.instance_info().rank, []

def save(notice):
    told.append(notice.reason)
    time.sleep(0.3)
    with open(os.path.join(folder, f"saved-{rank}"), "a") as file:
        file.write(f"{notice.reason}\\n")

sky.on_interruption(save, signals=[getattr(signal, name) for name in signals])
"""
WORK = """%%sky_broadcast
if rank == 0:
    print("at work")
while len(told) < 1:
    time.sleep(0.01)
while hangs:
    time.sleep(0.01)
"""


@pytest.fixture
def notebook(shared_pools: Pools, tmp_path: Path):
    with shared_pools.lent(KERNEL) as one:
        one.run(f"folder, signals, hangs = {str(tmp_path)!r}, ['SIGUSR1', 'SIGTERM'], True")
        yield one


def job(notebook: Notebook) -> list[psutil.Process]:
    """All processes of a pool: agent, controller, forkserver, ranks."""
    return psutil.Process(notebook.pid).children(recursive=True)


def agent(notebook: Notebook) -> psutil.Process:
    return next(one for one in job(notebook) if "skymagic.kernels.agent.agent" in one.cmdline())


def at_work(notebook: Notebook) -> Shown:
    notebook.run(HOOK)
    run = notebook.start(WORK)
    return notebook.watch(run, lambda shown: "at work" in shown.text)


def saved(folder: Path) -> list[str]:
    return [(folder / f"saved-{rank}").read_text() for rank in range(2)]


def test_one_that_all_processes_get_and_live_on(notebook: Notebook, tmp_path: Path) -> None:
    """``sbatch --signal=USR1@120``"""
    notebook.run("%sky_pool lab --ranks 2")
    notebook.run("hangs = False")
    run = at_work(notebook)
    for one in job(notebook):
        one.send_signal(signal.SIGUSR1)
    assert notebook.finish(run).error is None
    assert saved(tmp_path) == ["SIGUSR1 received\n"] * 2
    notebook.run("%%sky_broadcast -o found\ntold")
    assert notebook.value("found") == [["SIGUSR1 received"]] * 2


@pytest.mark.parametrize("signals", [[], ["SIGTERM"]], ids=["a hook", "a hook of that signal"])
def test_an_agent_that_is_ended_has_hooks_called_first(
    notebook: Notebook, tmp_path: Path, signals: list[str]
) -> None:
    notebook.run(f"signals = {signals}")
    notebook.run("%sky_pool lab --ranks 2")
    run = at_work(notebook)
    agent(notebook).terminate()
    shown = notebook.finish(run)
    assert "(SIGTERM)" in shown.failure.text
    assert saved(tmp_path) == ["SIGTERM received\n"] * 2


def test_the_end_of_a_whole_job(notebook: Notebook, tmp_path: Path) -> None:
    """By ``scancel`` or at the time limit: the notebook is gone too, and each hook still runs once."""
    notebook.run("%sky_pool lab --ranks 2")
    at_work(notebook)
    # an agent that hears it much later than its notebook has ended by then
    first = agent(notebook)
    processes = [
        first,
        psutil.Process(notebook.pid),
        *(one for one in job(notebook) if one != first),
    ]
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    assert saved(tmp_path) == ["SIGTERM received\n"] * 2


def test_without_hooks_an_agent_ends_at_once(notebook: Notebook) -> None:
    notebook.run("%sky_pool lab --ranks 2")
    run = notebook.start(
        "%%sky_broadcast\nimport time\nprint('at work')\nwhile True:\n    time.sleep(0.01)"
    )
    notebook.watch(run, lambda shown: "at work" in shown.text)
    agent(notebook).terminate()
    shown = notebook.finish(run)
    assert "(SIGTERM)" in shown.failure.text
