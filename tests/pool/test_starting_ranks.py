"""Ranks that do not start: why that must not happen, and what is said where it does."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.lab.notebook import Notebook, opened

RANKS = "%%sky_broadcast -o ranks\nint(__import__('os').environ['RANK'])"


@contextmanager
def pool_in(folder: Path) -> Iterator[Notebook]:
    """A pool of three ranks whose folders are in a folder of its own."""
    (folder / "tmp").mkdir(parents=True)
    with opened(folder, env={"TMPDIR": str(folder / "tmp")}) as made:
        made.run("%sky_pool --ranks 3")
        yield made


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    with pool_in(tmp_path) as made:
        yield made


def works(notebook: Notebook) -> bool:
    """Whether all ranks run a cell."""
    notebook.run(RANKS)
    return notebook.value("ranks") == [0, 1, 2]


def delete_folders(tmp_path: Path) -> None:
    """Delete the pool's folder, as cleaners of temporary folders do."""
    folders = list((tmp_path / "tmp").glob("skymagic-*"))
    assert folders
    for folder in folders:
        shutil.rmtree(folder)


def test_all_ranks_restart_after_the_folder_is_deleted(notebook: Notebook, tmp_path: Path) -> None:
    for _ in range(2):
        delete_folders(tmp_path)
        notebook.run("%sky_restart")
        assert works(notebook)


def test_dead_ranks_return_after_the_folder_is_deleted(notebook: Notebook, tmp_path: Path) -> None:
    delete_folders(tmp_path)
    notebook.fail("%%sky_broadcast -t 0,1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert works(notebook)


@pytest.mark.parametrize("helper", ["forkserver", "agent"])
def test_a_helper_process_that_is_killed(notebook: Notebook, helper: str) -> None:
    helpers(notebook)[helper].kill()
    assert "%sky_restart" in notebook.fail(RANKS).text
    assert "ready" not in notebook.run("%sky_status").said.partition(">")[0]
    notebook.run("%sky_restart")
    assert works(notebook)


def helpers(notebook: Notebook) -> dict[str, psutil.Process]:
    """The processes that rank 0 needs to start, and itself."""
    notebook.run("%%sky_broadcast -o pids -t 0\nimport os; os.getpid(), os.getppid()")
    ((rank, pid),) = notebook.value("pids")
    forkserver = psutil.Process(pid)
    agent = forkserver.parent()
    assert agent is not None
    return {"rank": psutil.Process(rank), "forkserver": forkserver, "agent": agent}


HELD_UP = {
    "agent": "the agent on .* does not answer",
    "forkserver": "the process that forks ranks on .* does not answer",
}


def test_a_helper_process_that_was_stopped(tmp_path: Path) -> None:
    """What is waited for is told; a second restart does not wait for it. Each in a pool of its own, at the same time."""
    with ExitStack() as stack:
        pools = {name: stack.enter_context(pool_in(tmp_path / name)) for name in HELD_UP}
        cells = {}
        for name, notebook in pools.items():
            helpers(notebook)[name].suspend()
            cells[name] = notebook.start("%sky_restart")
        for name, notebook in pools.items():
            cell = notebook.watch(cells[name], lambda seen: "does not answer" in seen.text)
            assert re.search(
                rf"ranks 0–2 have not started for 7 s: .*{HELD_UP[name]}.*%sky_restart", cell.text
            )
            notebook.interrupt()
            notebook.finish(cell)
            assert "ready" not in notebook.run("%sky_status").said.partition(">")[0]
            notebook.run("%sky_restart")
            assert works(notebook)


KILLS = "%%sky_broadcast -t 0\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


def test_a_process_that_stood_still_for_a_while(tmp_path: Path) -> None:
    """A rank dies meanwhile, if it can. Each in a pool of its own, at the same time."""
    with ExitStack() as stack:
        names = ("agent", "forkserver", "rank")
        pools = {name: stack.enter_context(pool_in(tmp_path / name)) for name in names}
        stopped = [helpers(notebook)[name] for name, notebook in pools.items()]
        for process in stopped:
            process.suspend()
        cells = [
            notebook.start(RANKS if name == "rank" else KILLS) for name, notebook in pools.items()
        ]

        def resume() -> None:
            for process in stopped:
                process.resume()

        resumed = threading.Timer(14.0, resume)
        resumed.start()
        for (name, notebook), cell in zip(pools.items(), cells, strict=True):
            notebook.finish(cell)
            assert (cell.error and cell.error.ename) == (None if name == "rank" else "RankDied")
        resumed.join()
        for notebook in pools.values():
            assert works(notebook)
            notebook.run("%sky_restart")
            assert works(notebook)
