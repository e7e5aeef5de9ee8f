"""Ranks that do not register with the controller: why that must not happen, and what is said where it does."""

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
    """The controller's files are among those that are gone; ranks have registered twice before one was missing."""
    for _ in range(2):
        delete_folders(tmp_path)
        notebook.run("%sky_restart")
        assert works(notebook)


def test_ranks_that_died_come_back_after_the_folder_is_deleted(
    notebook: Notebook, tmp_path: Path
) -> None:
    delete_folders(tmp_path)
    notebook.fail("%%sky_broadcast -t 0,1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert works(notebook)


@pytest.mark.parametrize("helper", ["forkserver", "controller", "heartbeat"])
def test_a_helper_process_that_is_killed(notebook: Notebook, helper: str) -> None:
    helpers(notebook)[helper].kill()
    assert "%sky_restart" in notebook.fail(RANKS).text
    assert "ready" not in notebook.run("%sky_status").said.partition(">")[0]
    notebook.run("%sky_restart")
    assert works(notebook)


def helpers(notebook: Notebook) -> dict[str, psutil.Process]:
    """The processes that rank 0 needs to start and to register, and itself."""
    notebook.run("%%sky_broadcast -o pids -t 0\nimport os; os.getpid(), os.getppid()")
    ((rank, pid),) = notebook.value("pids")
    forkserver = psutil.Process(pid)
    agent = forkserver.parent()
    assert agent is not None
    controllers = [one for one in agent.children() if "controller" in " ".join(one.cmdline())]
    return {
        "rank": psutil.Process(rank),
        "forkserver": forkserver,
        "agent": agent,
        "controller": controllers[0],
        "heartbeat": controllers[0].children()[0],
    }


HELD_UP = {
    "agent": "the agent on .* does not answer",
    "forkserver": "the process that forks ranks on .* does not answer",
    "controller": "the controller on .* does not answer",
}


@pytest.mark.parametrize("helper", HELD_UP)
def test_a_helper_process_that_was_stopped(notebook: Notebook, helper: str) -> None:
    """What is waited for is told; a second restart does not wait for it."""
    helpers(notebook)[helper].suspend()
    cell = notebook.start("%sky_restart")
    notebook.watch(cell, lambda seen: "does not answer" in seen.text)
    assert re.search(
        rf"ranks 0–2 have not registered for 7 s: .*{HELD_UP[helper]}.*%sky_restart", cell.text
    )
    notebook.interrupt()
    notebook.finish(cell)
    assert "ready" not in notebook.run("%sky_status").said.partition(">")[0]
    notebook.run("%sky_restart")
    assert works(notebook)


@pytest.mark.parametrize("helper", ["agent", "forkserver", "controller", "rank"])
def test_a_process_that_stood_still_for_a_while(notebook: Notebook, helper: str) -> None:
    """For longer than the controller waits for a sign of life; a rank dies meanwhile, if it can."""
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


def test_a_rank_that_does_not_register_is_told_and_restarted(notebook: Notebook) -> None:
    """The controller's answer is lost, here by hand: the pool must not pass for ready."""
    notebook.run(
        "import ipyparallel, skymagic.run.engine as engine, skymagic.pool.resources as resources\n"
        "resources.REGISTRATION_TIMEOUT = 2.0\n"
        "news, query = ipyparallel.Client._register_engine, engine._Client.query_registrations\n"
        "ipyparallel.Client._register_engine = lambda self, message: None\n"
        "engine._Client.query_registrations = lambda self: None"
    )
    failure = notebook.fail("%sky_restart")
    assert "ranks 0–2 did not register with the controller within 2 s" in failure.text
    assert "degraded" in notebook.run("%sky_status").said
    failure = notebook.fail(RANKS)
    assert (failure.ename, "%sky_restart" in failure.text) == ("PoolStateError", True)
    second = notebook.fail(RANKS)
    assert (second.ename, "%sky_restart" in second.text) == ("PoolStateError", True), second.text
    notebook.run(
        "ipyparallel.Client._register_engine, engine._Client.query_registrations = news, query"
    )
    notebook.run("%sky_restart")
    assert works(notebook)
