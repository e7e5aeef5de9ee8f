"""Ranks that do not start: why that must not happen, and what is said where it does."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.notebook import Notebook, opened

RANKS = "%%sky_broadcast -o ranks\nint(__import__('os').environ['RANK'])"


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A pool of three ranks whose folders are in the test's own temporary folder."""
    (tmp_path / "tmp").mkdir()
    with opened(tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}) as made:
        made.run("%sky_pool --ranks 3")
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


@pytest.mark.parametrize("helper", HELD_UP)
def test_a_helper_process_that_was_stopped(notebook: Notebook, helper: str) -> None:
    """What is waited for is told; a second restart does not wait for it."""
    helpers(notebook)[helper].suspend()
    cell = notebook.start("%sky_restart")
    notebook.watch(cell, lambda seen: "does not answer" in seen.text)
    assert re.search(
        rf"ranks 0–2 have not started for 7 s: .*{HELD_UP[helper]}.*%sky_restart", cell.text
    )
    notebook.interrupt()
    notebook.finish(cell)
    assert "ready" not in notebook.run("%sky_status").said.partition(">")[0]
    notebook.run("%sky_restart")
    assert works(notebook)


@pytest.mark.parametrize("helper", ["agent", "forkserver", "rank"])
def test_a_process_that_stood_still_for_a_while(notebook: Notebook, helper: str) -> None:
    """A rank dies meanwhile, if it can."""
    process = helpers(notebook)[helper]
    process.suspend()
    resumed = threading.Timer(14.0, process.resume)
    resumed.start()
    if helper == "rank":
        assert works(notebook)
    else:
        kills = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
        assert notebook.fail(f"%%sky_broadcast -t 0\n{kills}").ename == "RankDied"
    resumed.join()
    assert works(notebook)
    notebook.run("%sky_restart")
    assert works(notebook)
