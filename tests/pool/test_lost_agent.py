"""A pool whose agent has ended: why is known, the state is true, and `%sky_restart` starts another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

AGENT = "pool.pool.resources.agents._links[0]._transport._child.pid"

notebook = borrowed("--ranks 2", "pool = %sky_pool --ranks 2", "big = list(range(400_000))")


@pytest.fixture(autouse=True)
def every_rank_goes_on(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run(
        "%%sky_broadcast -o seen\nimport skymagic\n(skymagic.instance_info().rank, len(big))"
    )
    assert notebook.value("seen") == [(0, 400_000), (1, 400_000)]


def test_an_agent_that_was_killed_between_cells(notebook: Notebook) -> None:
    os.kill(notebook.value(AGENT), signal.SIGKILL)
    failed = notebook.fail("%%sky_broadcast\n1")
    assert "%sky_restart" in failed.text
    assert "SIGKILL" in failed.text
    assert "lost" in notebook.run("%sky_status").said
    notebook.run("%sky_restart")
    assert "lost" not in notebook.run("%sky_status").said


def test_an_agent_that_is_killed_while_a_cell_runs(notebook: Notebook) -> None:
    notebook.run(f"agent = {AGENT}")
    before = [psutil.Process(notebook.value("agent"))]
    before += before[0].children(recursive=True)
    body = "%%sky_broadcast\nimport os, signal, skymagic, time\nmine = 1\nif skymagic.instance_info().rank == 0:\n"
    failed = notebook.fail(f"{body}    os.kill(agent, signal.SIGKILL)\ntime.sleep(60)")
    assert failed.ename == "RankDied"
    assert "SIGKILL" in failed.text
    assert "%sky_restart" in failed.text
    assert "%sky_down" in notebook.fail("%%sky_broadcast\n1").text
    assert psutil.wait_procs(before, timeout=15)[1] == []
    notebook.run("%sky_restart")


def test_a_rank_that_is_ended_a_moment_before_its_agent(notebook: Notebook) -> None:
    """As where Slurm takes the machines of a job back: who gives them is asked, and the rank is not said to be restarted."""
    notebook.run(
        "from dataclasses import replace\nagents = pool.pool.agents\nplain = agents.nodes\n"
        "agents.nodes = tuple(replace(one, fate=lambda: 'job 7 was put back') for one in plain)"
    )
    body = "%%sky_broadcast\nimport os, signal, skymagic\nif skymagic.instance_info().rank == 0:\n"
    failed = notebook.fail(f"{body}    os.kill(os.getpid(), signal.SIGTERM)")
    assert failed.ename == "RankDied"
    assert "(job 7 was put back)" in failed.text
    assert "%sky_restart" in failed.text
    assert "restarted without" not in failed.text
    notebook.run("agents.nodes = plain")
    notebook.run("%sky_restart")
