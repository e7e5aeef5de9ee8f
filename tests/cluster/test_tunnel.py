"""The tunnel to a node: an agent and TCP streams outlive the connection that carries them."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skymagic.cluster.tunnel import AgentTunnel, Tunnel
from skymagic.kernels.daemon import rundir
from skymagic.providers.local import ChildTransport
from tests.lab.golden import Golden

ECHO = """
import sys
for line in sys.stdin:
    if not line.startswith('["Notebook'):
        sys.stdout.write(line)
        sys.stdout.flush()
"""


def daemon_of(name: str) -> psutil.Process:
    """The process that serves a name: the one that writes the log in its folder. Its agent, once it runs, writes another file."""
    found = rundir.find(name)
    assert found is not None, f"no daemon of the name {name}"
    return next(one for one in psutil.process_iter() if writes_errors_to(one) == found.log)


def writes_errors_to(process: psutil.Process) -> str:
    """Where its standard error leads; nowhere when it has gone."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{process.pid}/fd/2").readlink())
    return ""


def folder_of(name: str) -> Path:
    """A daemon's folder."""
    return Path(f"/tmp/skymagic-daemon-{os.getuid()}-{name}")


class Node:
    """A tunnel to a daemon on this machine.

    Args:
        code: the agent, a Python program.
        name: the daemon's.
        python: what runs it.
        around: a Python program that runs the gate, its arguments.
    """

    def __init__(
        self, code: str = ECHO, *, name: str = "", python: str = sys.executable, around: str = ""
    ) -> None:
        self.name = name or f"test-{uuid.uuid4().hex[:12]}"
        self.command = [
            sys.executable,
            "-m",
            "skymagic.kernels.daemon.attach",
            self.name,
            python,
            "-c",
            code,
        ]
        if around:
            self.command = [sys.executable, "-c", around, *self.command]
        self.gates: list[ChildTransport] = []
        self.states: queue.Queue[str] = queue.Queue()
        self.down = threading.Event()
        self.tunnel = Tunnel(self.connect, state=self.states.put)
        self.agent = self.tunnel.agent

    def connect(self) -> ChildTransport:
        """A connection to the node."""
        if self.down.is_set():
            raise OSError("the host is down")
        self.gates.append(ChildTransport(self.command))
        return self.gates[-1]

    def cut(self) -> None:
        """Lose the connection."""
        self.signal(signal.SIGKILL)

    def signal(self, signum: int) -> None:
        """Send a signal to the gate."""
        self.gates[-1]._child.send_signal(signum)

    def wait(self, state: str) -> None:
        """Until the tunnel says so."""
        while self.states.get(timeout=30) != state:
            pass

    def daemon(self) -> psutil.Process:
        """The daemon's process."""
        return daemon_of(self.name)

    def folder(self) -> Path:
        """The daemon's folder, which is there."""
        return folder_of(self.name)

    def lines(self, count: int) -> list[bytes]:
        """The next lines of the agent."""
        data = b""
        while data.count(b"\n") < count:
            piece = self.agent.read()
            assert piece, self.agent.complaint()
            data += piece
        assert data.endswith(b"\n")
        return data.splitlines()


@contextlib.contextmanager
def node(code: str = ECHO, **options) -> Iterator[Node]:
    """A node that is gone afterwards."""
    one = Node(code, **options)
    try:
        yield one
    finally:
        one.tunnel.close()


@contextlib.contextmanager
def joined() -> Iterator[tuple[Node, socket.socket, socket.socket]]:
    """A node, and both ends of a stream through its tunnel."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        node() as one,
        socket.create_connection(("127.0.0.1", one.tunnel.forward(*server.getsockname()))) as here,
        server.accept()[0] as there,
    ):
        yield one, here, there


def test_tunnel_moves_silently_to_another_connection() -> None:
    sent = 0
    with node() as one:
        one.wait("connected")
        for moves in range(5):
            for _ in range(1000):
                one.agent.write(b"%d\n" % sent)
                sent += 1
            one.tunnel.move()
            assert one.lines(1000) == [b"%d" % number for number in range(sent - 1000, sent)]
            while len(one.gates) < moves + 2:  # it has all been answered before the move
                one.agent.write(b"more\n")
                one.lines(1)
        one.agent.write(b"end\n")
        assert one.lines(1) == [b"end"]
        assert one.tunnel.state == "connected"
        assert one.states.empty()


def test_failed_move_is_a_lost_connection() -> None:
    with node() as one:
        one.wait("connected")
        one.down.set()
        one.tunnel.move()
        one.wait("reconnecting")
        one.down.clear()
        one.agent.write(b"1\n")
        assert one.lines(1) == [b"1"]


def test_shutdown_leaves_nothing() -> None:
    with node() as one:
        one.agent.write(b"x\n")
        one.lines(1)
        folder = one.folder()
        one.agent.close()
        assert one.agent.read() == b""
        assert one.agent.complaint() == ""
        assert not folder.exists()
        with pytest.raises(BrokenPipeError):
            one.agent.write(b"y\n")
        one.agent.close()


def test_a_silent_connection_is_given_up() -> None:
    with node() as one:
        one.wait("connected")
        one.signal(signal.SIGSTOP)
        one.agent.write(b"still there?\n")
        assert one.lines(1) == [b"still there?"]
        assert len(one.gates) == 2


@pytest.mark.parametrize(
    ("options", "so_far", "complaint", "gates"),
    [
        ({"code": "import os; print('so far', flush=True); os.kill(os.getpid(), 9)"}, b"so far\n", "signal SIGKILL", 1),
        ({"code": "raise SystemExit('no disk left')"}, b"", r"no disk left\n\(exit status 1\)", 1),
        ({"python": "/nowhere/python"}, b"", "(?s).*No such file.*/nowhere/python.*", 1),
        ({"around": "raise SystemExit('No module named skymagic')"}, b"", "No module named skymagic", 3),
    ],
    ids=["killed", "last words", "no such command", "the gate"],
)  # fmt: skip
def test_an_end_is_reported(
    options: dict[str, str], so_far: bytes, complaint: str, gates: int
) -> None:
    with node(**options) as one:
        assert b"".join(iter(one.agent.read, b"")) == so_far
        assert re.fullmatch(complaint, one.agent.complaint()), one.agent.complaint()
        one.wait("lost")
        assert len(one.gates) == gates


def test_host_that_was_never_reachable_is_lost(golden: Golden) -> None:
    def connect() -> ChildTransport:
        raise OSError("the host is down")

    tunnel = Tunnel(connect)
    agent = tunnel.agent
    assert agent.read() == b""
    golden(agent.complaint())
    assert tunnel.state == "lost"
    tunnel.close()


def test_a_daemon_that_was_killed_is_lost_for_certain() -> None:
    with node() as one:
        one.agent.write(b"x\n")
        one.lines(1)
        one.daemon().kill()
        assert one.agent.read() == b""
        assert "loginctl enable-linger" in one.agent.complaint()
        one.wait("lost")
        assert not one.folder().exists()


def test_output_of_login_shells_is_skipped() -> None:
    noise = "import os, sys; os.write(1, b'Welcome!\\x01 no newline'); os.execv(sys.argv[1], sys.argv[1:])"
    with node(around=noise) as one:
        one.agent.write(b"hello\n")
        assert one.lines(1) == [b"hello"]


def test_closing_while_the_host_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymagic.cluster.tunnel.ABSENT_TIMEOUT", 0.5)
    with node() as one:
        one.agent.write(b"x\n")
        one.lines(1)
        daemon = one.daemon()
        one.down.set()
        one.cut()
        one.wait("reconnecting")
        one.tunnel.close()
        assert one.tunnel.state == "closed"
        assert one.agent.read() == b""
        assert (
            daemon.is_running()
        )  # the limits of its agent end it; here a word from the machine does
        daemon.terminate()
        daemon.wait(20)
        assert not one.folder().exists()


def test_an_agent_out_of_reach_ends_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it any more, but it must still learn of its end."""
    monkeypatch.setattr("skymagic.cluster.tunnel.ABSENT_TIMEOUT", 0.5)
    monkeypatch.setattr("skymagic.cluster.tunnel.LINGER_DELAY", 0.2)
    with node() as one:
        one.agent.write(b"x\n")
        one.lines(1)
        daemon = one.daemon()
        one.down.set()
        one.cut()
        one.wait("reconnecting")
        one.agent.close()
        one.tunnel.close(linger=True)
        assert (one.tunnel.lingering, daemon.is_running()) == (True, True)
        one.down.clear()
        daemon.wait(30)
        assert one.tunnel.wait_ended(10)
        assert not one.folder().exists()


def test_a_new_agent_waits_for_the_end_of_one_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have the same name on the node, so the old agent's end could be taken for the new one's."""
    with node() as one:  # it gives the name and the connections; its own tunnel comes first
        one.agent.write(b"x\n")
        one.lines(1)
        one.tunnel.close()
        monkeypatch.setattr("skymagic.cluster.tunnel.ABSENT_TIMEOUT", 0.5)
        tunnel, states = AgentTunnel(), queue.Queue[str]()
        for down in (True, True, False):
            agent = tunnel.open(one.connect, states.put)
            agent.write(b"x\n")
            assert agent.read() == b"x\n", agent.complaint()
            if down:
                one.down.set()
                one.cut()
                while states.get(timeout=30) != "reconnecting":
                    pass
                agent.close()
                one.down.clear()
        agent.close()
        tunnel.close()
        assert not one.folder().exists()


def test_agent_learns_of_connections_and_losses() -> None:
    with node("import sys\nfor line in sys.stdin: print(line, end='', flush=True)") as one:
        one.agent.write(b"whole line\nhalf ")
        assert one.lines(1) == [b"whole line"]
        one.down.set()
        one.cut()
        one.wait("reconnecting")
        one.down.clear()
        assert one.lines(2) == [b'["NotebookDetached",{}]', b'["NotebookAttached",{}]']
        one.agent.write(b"line\n")
        assert one.lines(1) == [b"half line"]


def test_forwarding_to_a_closed_port_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with node() as one:
        here = socket.create_connection(("127.0.0.1", one.tunnel.forward(*address)))
        with here, pytest.raises(ConnectionResetError):
            here.recv(1)


def test_a_reset_is_passed_on() -> None:
    with joined() as (_, here, there):
        here.sendall(b"hello")
        assert there.recv(5) == b"hello"
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        there.close()
        with pytest.raises(ConnectionResetError):
            here.recv(1)


def test_a_notebook_that_is_killed_leaves_the_agent(tmp_path) -> None:
    """The daemon stays, tells the agent, and ends after the agent's end was reported."""
    seen = tmp_path / "seen"
    os.mkfifo(seen)
    agent = f"import sys\nsee = open({str(seen)!r}, 'w')\nfor line in sys.stdin: print(line, end='', file=see, flush=True)"
    name = f"test-{uuid.uuid4().hex[:12]}"
    notebook = f"""
import sys, signal
from skymagic.providers.local import ChildTransport
from skymagic.cluster.tunnel import Tunnel
command = [sys.executable, "-m", "skymagic.kernels.daemon.attach", {name!r}, sys.executable, "-c", {agent!r}]
Tunnel(lambda: ChildTransport(command)).agent.write(b"hello\\n")
signal.pause()
"""
    child = subprocess.Popen([sys.executable, "-c", notebook])
    try:
        with seen.open() as told:
            assert told.readline() == "hello\n"
            child.kill()
            assert told.readline() == '["NotebookDetached",{}]\n'
            daemon = daemon_of(name)
            daemon.terminate()
            assert told.readline() == ""
        daemon.wait(20)
        assert not folder_of(name).exists()
    finally:
        child.kill()
        child.wait()
