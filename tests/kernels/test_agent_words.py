"""An agent that ends says why, though its log is deleted with its folder; no process of a node sleeps through a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.kernels.agent import forkserver
from skymagic.providers.local import ChildTransport, run
from skymagic.wire import agent as wire
from skymagic.wire import processes, store
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed
from tests.lab.waiting import until

notebook = borrowed("--ranks 2")


@pytest.fixture
def agent() -> Iterator[ChildTransport]:
    one = run(processes.AGENT)
    yield one
    one.close()


def messages(agent: ChildTransport) -> Iterator[wire.AgentMessage]:
    """What it says until its end."""
    decoder = wire.decoder()
    while data := agent.read():
        yield from decoder.feed(data)


def test_an_agent_that_cannot_start(agent: ChildTransport) -> None:
    agent.write(wire.encode(wire.AgentSpec("main", "main-1", 0, True, env={"no=name": "x"})))
    (failed,) = messages(agent)
    assert isinstance(failed, wire.AgentFailed)
    first, *rest = failed.reason.splitlines()
    assert first == "the agent failed: ValueError: illegal environment variable name"
    assert "os.environ.update" in "".join(rest)
    assert "illegal environment variable name" in agent.complaint()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_ended_from_outside(agent: ChildTransport, number: signal.Signals) -> None:
    agent.write(wire.encode(wire.AgentSpec("main", "main-1", 1, False)))
    said = messages(agent)
    assert isinstance(next(said), wire.AgentStarted)
    os.kill(agent._child.pid, number)
    assert wire.AgentFailed(f"the agent was killed from outside ({number.name})") in list(said)


SLEEPS_THROUGH = """
import os, signal, sys, threading
numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]
def unblocked():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    threading.Event().wait()
threading.Thread(target=unblocked, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers))
print("begun", flush=True)
"""
"""What begins a process whose signals come to another thread: like one just before a wait, they do not interrupt what the main thread
waits for."""
VALUES = "from skymagic.kernels.store import server; server.main(sys.argv[1])"
DAEMON = """
from skymagic.kernels.daemon.daemon import Daemon
from skymagic.kernels.daemon.rundir import RunDirectory
place = RunDirectory(sys.argv[1] + "/skymagic-daemon-0-1")
os.mkdir(place.path, 0o700)
Daemon(place.listen(), place, ["cat"], "").run()
"""


def waits(pid: int) -> bool:
    """Whether the main thread of a process has a handler of SIGTERM, and sleeps for a while."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    states = set()
    for _ in range(10):
        states.add(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)  # the system tells nobody that a thread has begun to wait
    assert "Z" not in states
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1) and states == {"S"}


AGENT_SPEC = wire.encode(wire.AgentSpec("main", "main-1", 1, False))


@pytest.mark.parametrize(
    ("process", "sent", "lines", "status"),
    [
        ("from skymagic.kernels.agent import agent; agent.main()", b"", 0, 128 + signal.SIGTERM),
        (
            "from skymagic.kernels.agent import agent; agent.main()",
            AGENT_SPEC,
            1,
            128 + signal.SIGTERM,
        ),
        (VALUES, b"", 1, 0),
        (VALUES, store.encode(store.Settings()), 1, 0),
        (DAEMON, b"", 0, 0),
    ],
    ids=[
        "agent",
        "agent that has begun",
        "value server",
        "value server that has begun",
        "daemon",
    ],
)
def test_signal_just_before_a_wait_is_handled(
    process: str, sent: bytes, lines: int, status: int
) -> None:
    with tempfile.TemporaryDirectory(
        prefix="test-waits-"
    ) as folder:  # sockets lie there: their paths may not be long
        command = [sys.executable, "-c", SLEEPS_THROUGH + process, folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            assert started.stdout.readline() == b"begun\n"
            started.stdin.write(sent)
            started.stdin.flush()
            for _ in range(lines):
                assert started.stdout.readline()
            while not waits(started.pid):
                pass
            started.send_signal(signal.SIGTERM)
            assert started.wait(20) == status


FORKSERVER = "import socket, sys; from skymagic.kernels.agent import forkserver; forkserver.serve(socket.socket(fileno=int(sys.argv[1])), (), sys.argv[2])"


def test_forkserver_notices_an_exit_just_before_it_waits(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    command = [
        sys.executable,
        "-c",
        SLEEPS_THROUGH + FORKSERVER,
        str(theirs.fileno()),
        str(tmp_path),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL), ours:
        theirs.close()
        null = os.open(os.devnull, os.O_WRONLY)
        spec = wire.RankSpec(0, {}, env={"SKYMAGIC_IDENT": "r0"}, log=str(tmp_path / "log"))
        forkserver.send_spec(
            ours, spec, [null, null, null]
        )  # it has no controller to talk to, and ends
        os.close(null)
        decoder = wire.decoder()
        said: list[wire.AgentMessage] = []
        while not any(isinstance(message, wire.ChildExited) for message in said):
            said += decoder.feed(ours.recv(1 << 16))


RANKS = 40


def test_reports_do_not_stand_against_requests(tmp_path: Path) -> None:
    """An agent requests all ranks before it reads reports. With 280 ranks the buffers of both directions were full."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system's least: a few messages
    ours.settimeout(30)
    null = os.open(os.devnull, os.O_WRONLY)
    with (
        subprocess.Popen(
            [sys.executable, "-c", FORKSERVER, str(theirs.fileno()), str(tmp_path)],
            pass_fds=[theirs.fileno()],
        ),
        ours,
    ):
        theirs.close()
        for rank in range(RANKS):
            spec = wire.RankSpec(
                rank, {}, env={"SKYMAGIC_IDENT": f"r{rank}"}, log=str(tmp_path / "log")
            )
            forkserver.send_spec(
                ours, spec, [null, null, null]
            )  # TimeoutError where both wait for each other
        os.close(null)
        decoder, forked, ended = wire.decoder(), set[int](), 0
        while ended < RANKS:
            for message in decoder.feed(ours.recv(1 << 16)):
                match message:
                    case wire.RankForked():
                        forked.add(message.rank)
                    case wire.ChildExited():
                        ended += 1  # these have no control socket
        assert forked == set(range(RANKS))


IDLE = """%%sky_broadcast -t 1 -o pids
import os, pathlib, signal, threading
over = threading.Event()
def unblocked():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    over.wait()
threading.Thread(target=unblocked).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("{path}").touch())
os.getpid()"""
ORDINARY = """%%sky_broadcast -t 1
over.set()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]);"""


def test_idle_rank_handles_a_signal_just_before_it_waits(
    notebook: Notebook, tmp_path: Path
) -> None:
    """For signal handlers that cells set, such as those of `sky.on_interruption`."""
    notebook.run(IDLE.format(path=tmp_path / "heard"))
    (pid,) = notebook.value("pids")
    while not waits(pid):
        pass
    os.kill(pid, signal.SIGTERM)
    until((tmp_path / "heard").exists)
    notebook.run(ORDINARY)
