"""The tunnel to a node: an agent and TCP streams outlive the connection that carries them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest

from skymagic.providers.local import ChildTransport
from skymagic.tunnel import Tunnel

ECHO = """
import sys
for line in sys.stdin:
    if not line.startswith(('["Away', '["Back')):
        sys.stdout.write(line)
        sys.stdout.flush()
"""
COUNT = """
import sys
sys.stdin.readline()
for number in range(200_000):
    print(number, flush=number % 100 == 0)
sys.stdout.flush()
sys.stdin.read()
"""


class Node:
    """A tunnel to a daemon on this machine.

    Args:
        code: the agent, a Python program.
    """

    def __init__(self, code: str = ECHO, *, name: str = "") -> None:
        self.name = name or f"test-{uuid.uuid4().hex[:12]}"
        self.command = [sys.executable, "-m", "skymagic.kernels.gate", self.name, sys.executable, "-c", code]
        self.gates: list[ChildTransport] = []
        self.states: queue.Queue[str] = queue.Queue()
        self.down = threading.Event()
        self.tunnel = Tunnel(self.connect, state=self.states.put)
        self.agent = self.tunnel.agent()

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


def test_an_agent_hears_and_answers() -> None:
    with node() as one:
        one.agent.write(b"hello\n")
        assert one.lines(1) == [b"hello"]
        one.wait("connected")


def test_the_agent_outlives_the_connection() -> None:
    with node() as one:
        one.agent.write(b"1\n")
        assert one.lines(1) == [b"1"]
        one.cut()
        one.wait("reconnecting")
        one.agent.write(b"2\n")
        assert one.lines(1) == [b"2"]
        one.wait("connected")


def test_nothing_is_lost_and_nothing_repeated() -> None:
    with node(COUNT) as one:
        one.agent.write(b"go\n")
        data = b""
        cuts = 0
        while data.count(b"\n") < 200_000:
            data += one.agent.read()
            if len(data) > (cuts + 1) * 50_000:
                cuts += 1
                one.cut()
        assert data == b"".join(b"%d\n" % number for number in range(200_000))
        assert cuts >= 20


def test_what_is_written_while_the_host_is_down_arrives() -> None:
    with node() as one:
        one.wait("connected")
        one.down.set()
        one.cut()
        one.wait("reconnecting")
        for number in range(1000):
            one.agent.write(b"%d\n" % number)
        one.down.clear()
        assert one.lines(1000) == [b"%d" % number for number in range(1000)]


def test_a_port_leads_to_the_node_and_survives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, node() as one:
        port = one.tunnel.forward(*server.getsockname())
        assert one.tunnel.forward(*server.getsockname()) == port
        with socket.create_connection(("127.0.0.1", port)) as here:
            there, _ = server.accept()
            with there:
                sent = os.urandom(20_000_000)

                def fill() -> None:
                    here.sendall(sent)
                    here.shutdown(socket.SHUT_WR)

                threading.Thread(target=fill).start()
                came = bytearray()
                cuts = 0
                while data := there.recv(1 << 16):
                    came += data
                    if len(came) > (cuts + 1) * 3_000_000:
                        cuts += 1
                        one.cut()
                assert bytes(came) == sent
                assert cuts >= 5
                there.sendall(b"thanks")
                assert here.recv(100) == b"thanks"


def test_shutdown_leaves_nothing(tmp_path) -> None:
    with node() as one:
        one.agent.write(b"x\n")
        one.lines(1)
        one.agent.close()
        assert one.agent.read() == b""
        assert one.agent.complaint() == ""
        with pytest.raises(BrokenPipeError):
            one.agent.write(b"y\n")
