"""What is left when an agent, or the notebook above it, ends in a way that nobody planned: nothing, then or at the next start."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skymagic.kernels.agent.directories import LOCK, Directories, sweep
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, Pools


@pytest.fixture
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    """With a pool that each test ends in a way of its own."""
    with shared_pools.lent(
        KERNEL, "%sky_pool --nodes 2", "%%sky_broadcast -o pids\nimport os\nos.getpid();"
    ) as one:
        yield one


def family(notebook: Notebook) -> tuple[psutil.Process, list[psutil.Process]]:
    """(the agent, all that it has started)."""
    rank = psutil.Process(notebook.value("pids[0]"))
    agent = next(one for one in rank.parents() if one.ppid() == notebook.pid)
    return agent, agent.children(recursive=True)


def folders(agent: psutil.Process) -> list[Path]:
    """The agent's folders: those whose locks it holds."""
    return [Path(each.path).parent for each in agent.open_files() if each.path.endswith(f"/{LOCK}")]


def all_end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)  # also of one that nobody has waited for
            try:
                assert select.select([descriptor], [], [], 10.0)[0], f"{process} did not end"
            finally:
                os.close(descriptor)


def test_ended_agent_leaves_nothing(notebook: Notebook) -> None:
    agent, others = family(notebook)
    places = folders(agent)
    assert {place.parent for place in places} == {Path("/dev/shm"), Path(tempfile.gettempdir())}
    agent.terminate()
    all_end([agent, *others])
    assert not [place for place in places if place.exists()]


def test_files_are_kept_young_and_folders_made_again() -> None:
    """Protects them from programs that clean temporary folders."""
    made = Directories("young-1")
    try:
        log = made.work / "ipython" / "rank-0.log"
        log.parent.mkdir()
        log.write_text("kept")
        for path in (log, log.parent, made.work, made.store):
            os.utime(path, (0, 0))
        made.touch()
        assert all(path.stat().st_mtime > 1e9 for path in (log, log.parent, made.work, made.store))
        assert made.restore() == []
        shutil.rmtree(made.work)
        assert made.restore() == [made.work]
        assert made.work.stat().st_mode & 0o777 == 0o700
        assert log.parent.parent.is_dir()
    finally:
        made.remove()


def test_folders_are_not_swept_while_they_are_made() -> None:
    ended = threading.Event()

    def sweep_on() -> None:
        while not ended.is_set():
            sweep()

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        for _ in range(100):
            made = Directories("test")
            assert made.work.is_dir()
            assert made.store.is_dir()
            made.remove()
            for lock in made.locks:
                os.close(lock)
    finally:
        ended.set()
        sweeper.join()


def test_rank_stuck_in_native_code_ends_with_its_agent(
    notebook: Notebook,
) -> None:
    agent, others = family(notebook)
    places = folders(agent)
    held = notebook.start(
        "%%sky_broadcast\nimport ctypes\nprint('begun')\nctypes.PyDLL(None).sleep(100)"
    )
    notebook.watch(held, lambda shown: "begun" in shown.text)
    sweep()
    assert [place for place in places if place.exists()] == places, "they are in use"
    agent.kill()
    all_end([agent, *others])
    assert [place for place in places if place.exists()] == places
    notebook.finish(held)
    notebook.run("%sky_pool another --ranks 1")
    assert not [place for place in places if place.exists()]
