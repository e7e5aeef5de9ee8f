"""A pool that somebody ends from a shell, or from another notebook, while its own notebook runs something on it: whoever waits gets a
PoolError at once that says who has ended it, and where."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skymagic.wire.record import folders
from tests.lab.desk import Desk, local_desk, ssh_desk
from tests.lab.hosts import still_there
from tests.lab.notebook import Notebook, Shown

ENDLESS = "print('at work', flush=True)\nwhile True: __import__('time').sleep(0.05)"
HOOK = "import skymagic as sky\n@sky.on_interruption\ndef save(event): print('saved', flush=True)\n"
RUNS = {
    "cell": f"%%sky_broadcast\n{ENDLESS}",
    "one-rank": f"%%sky_broadcast -t 1\n{ENDLESS}",
    "swallows": "%%sky_broadcast\nimport time\nprint('at work', flush=True)\nwhile True:\n    try: time.sleep(100)\n    except BaseException: pass",
    "hook": f"%%sky_broadcast\n{HOOK}{ENDLESS}",
    "script": "%%sky_sh\necho at work; sleep 1000",
    "calls": f"import skymagic as sky\n@sky.function\ndef forever():\n    {ENDLESS.replace(chr(10), chr(10) + '    ')}\nforever() @ sky.find()",
}


@contextmanager
def at_work(desk: Desk, source: str) -> Iterator[tuple[Notebook, Shown]]:
    """A notebook with the desk's pool, on which a cell is at work."""
    with desk.notebook(desk.made) as notebook:
        yield notebook, notebook.watch(notebook.start(source), lambda seen: "at work" in seen.text)


def ended_by(command: str) -> str:
    return f"was ended by `{command}` on {socket.gethostname()}"


def ends_in_shell(desk: Desk, *hosts: str) -> None:
    code, out, err = desk.ran("down", desk.pool, *hosts)
    assert (code, "is down on" in out) == (0, True), err


def test_a_run_ends_with_its_pool(tmp_path: Path) -> None:
    with local_desk(tmp_path) as desk, desk.notebook(desk.made) as notebook:
        for source in RUNS.values():
            cell = notebook.watch(notebook.start(source), lambda seen: "at work" in seen.text)
            ends_in_shell(desk)
            failure = notebook.finish(cell).failure
            said = ended_by("skymagic down") in failure.evalue
            assert (failure.ename, said) == ("PoolError", True), source
            assert f"pool {desk.pool!r}" in failure.evalue
            assert "%sky_pool" in failure.evalue
            again = notebook.fail("%%sky_broadcast\n1")
            assert ended_by("skymagic down") in again.evalue
            notebook.run(desk.made)  # and it can be made anew at once
            notebook.run("%%sky_broadcast -o fine\n1 + 1")
            assert notebook.value("fine") == [2, 2]
        notebook.run("%sky_down")


@pytest.mark.parametrize("kind", ["%%sky_broadcast -a", "%%sky_sh -a"])
def test_a_handle_ends_with_its_pool(tmp_path: Path, kind: str) -> None:
    body = "echo at work; sleep 1000" if "sh" in kind else ENDLESS
    with local_desk(tmp_path) as desk, at_work(desk, f"{kind}\n{body}") as (notebook, _):
        notebook.run("run = _")
        ends_in_shell(desk)
        notebook.run("run.wait(30)")
        assert notebook.value("run.done(), run.cancel(), run.status") == (True, False, "stopped")
        failure = notebook.fail("run.result()")
        assert (failure.ename, ended_by("skymagic down") in failure.evalue) == ("PoolError", True)


def test_another_notebook_ends_it(tmp_path: Path) -> None:
    with local_desk(tmp_path) as desk, at_work(desk, RUNS["cell"]) as (notebook, cell):
        with desk.notebook() as other:
            assert "is down on" in other.run(f"%sky_down {desk.pool}").stdout
        failure = notebook.finish(cell).failure
        assert (failure.ename, ended_by("%sky_down") in failure.evalue) == ("PoolError", True)


@pytest.mark.parametrize("stopped", ["agent", "daemon"])
def test_one_that_does_not_hear_it(tmp_path: Path, stopped: str) -> None:
    """An agent that does not end within ten seconds is killed, and its daemon says by whom."""
    with local_desk(tmp_path) as desk, at_work(desk, RUNS["cell"]) as (notebook, cell):
        (pool,) = json.loads(desk.ran("status", desk.pool, "--json")[1])["pools"]
        job = pool["job_id"]
        (record,) = (Path(one, "record") for one in folders(f"{job}-0") if Path(one).exists())
        agent = psutil.Process(int(record.read_text().split()[0]))
        one = agent if stopped == "agent" else agent.parent()
        assert one is not None
        one.suspend()
        ends_in_shell(desk)
        failure = notebook.finish(cell).failure
        assert (failure.ename, ended_by("skymagic down") in failure.evalue) == ("PoolError", True)


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("hosts", ["h1,h2", "h2"])
def test_a_pool_on_hosts(tmp_path: Path, hosts: str) -> None:
    """Also where one of its hosts is not named: its notebook ends what is left."""
    with ssh_desk(tmp_path) as desk:
        # hosts of a test are this machine, where other tests have theirs
        desk.made = desk.made.replace(" lab ", f" lab{os.urandom(4).hex()} ")
        ends_a_pool_on_hosts(desk, hosts)


def ends_a_pool_on_hosts(desk: Desk, hosts: str) -> None:
    with at_work(desk, RUNS["cell"]) as (notebook, cell):
        processes = [one for host in desk.hosts for one in host.processes()]
        ends_in_shell(desk, "--hosts", hosts)
        failure = notebook.finish(cell).failure
        assert (failure.ename, ended_by("skymagic down") in failure.evalue) == ("PoolError", True)
        assert still_there(processes, 30.0) == []
        notebook.run(desk.made)
        notebook.watch(
            notebook.start(f"%%sky_broadcast -a\n{ENDLESS}"), lambda seen: "at work" in seen.text
        )
        notebook.run("run = _")
        with desk.notebook() as other:
            assert "is down on" in other.run(f"%sky_down {desk.pool} --hosts h1,h2").stdout
        notebook.run("run.wait(30)")
        failure = notebook.fail("run.result()")
        assert (failure.ename, ended_by("%sky_down") in failure.evalue) == ("PoolError", True)
