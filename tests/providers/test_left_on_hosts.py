"""What an agent that was killed on a host leaves there: nothing, once another one has taken its place, or the pool has ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skymagic.kernels.agent.directories import LOCK
from tests.lab.hosts import Host, Hosts, still_there
from tests.lab.notebook import Notebook, seen
from tests.providers.test_ssh_pools import lab

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool --provider ssh --hosts h1 --python {sys.executable}"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[tuple[Hosts, Notebook]]:
    """A host with a pool of one rank, and a value in its store."""
    with lab(tmp_path, 1) as (hosts, notebook):
        notebook.run(POOL)
        notebook.run("big = bytes(3_000_000)")
        notebook.run("%%sky_broadcast\nlen(big)")
        yield hosts, notebook


def agent_of(host: Host) -> tuple[psutil.Process, list[Path]]:
    """(A host's agent, its folders): it holds the locks that are in them."""
    for process in host.processes():
        if found := [
            Path(each.path).parent
            for each in process.open_files()
            if each.path.endswith(f"/{LOCK}")
        ]:
            return process, found
    raise AssertionError(f"no agent runs on {host.name}")


def kill_agent(host: Host, notebook: Notebook) -> list[Path]:
    agent, folders = agent_of(host)
    assert any(
        each.stat().st_size >= 3_000_000
        for folder in folders
        for each in folder.iterdir()
        if each.is_file()
    )
    agent.send_signal(signal.SIGKILL)
    assert "%sky_restart" in notebook.fail("%%sky_broadcast\nlen(big)").text
    return folders


def test_restart_and_end_remove_leftovers_of_killed_agents(one: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = one
    lost = kill_agent(hosts[0], notebook)
    notebook.run("%sky_restart")
    assert seen(notebook, "len(big)") == [3_000_000]
    assert not [folder for folder in lost if folder.exists()]
    assert all(folder.exists() for folder in agent_of(hosts[0])[1])
    lost = kill_agent(hosts[0], notebook)
    notebook.run("%sky_down")
    assert not still_there(hosts[0].processes())
    assert not [folder for folder in lost if folder.exists()]
