"""Links between a notebook and what runs on a node, an implementation each, with an agent that repeats each line."""

from __future__ import annotations

import contextlib
import queue
import secrets
import shlex
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from skymagic.cluster.tunnel import Tunnel
from skymagic.providers.local import ChildTransport
from skymagic.wire.codec import Transport
from skymagic.wire.session import frames
from skymagic.wire.session.frames import Frame, Session
from skymagic.wire.session.loop import SessionLoop
from tests.contracts import carriers
from tests.lab.ending import cmdline

ECHO = """
import sys
for line in sys.stdin:
    if not line.startswith('["Notebook'):
        sys.stdout.write(line)
        sys.stdout.flush()
"""


class Link(ABC):
    """The notebook's end of a link.

    Attributes:
        cuts: how often to cut it; fewer where each costs much.
    """

    cuts = 8

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send to the agent, now or once connected. Raises BrokenPipeError at the link's end."""

    @abstractmethod
    def read(self) -> bytes:
        """Wait for bytes of the agent; b"" at the link's end."""

    @abstractmethod
    def cut(self) -> None:
        """Lose the connection; the link makes another one by itself."""

    @abstractmethod
    def stream(self) -> contextlib.AbstractContextManager[tuple[socket.socket, socket.socket]]:
        """A byte stream through the link: its end here, and its end on the node."""

    @abstractmethod
    def close(self) -> None:
        """End the agent. Safe to call twice."""

    def lines(self, count: int) -> list[bytes]:
        """Wait for that many lines of the agent, and no more."""
        data = b""
        while data.count(b"\n") < count:
            piece = self.read()
            assert piece, "the link has ended"
            data += piece
        assert data.endswith(b"\n")
        return data.splitlines()


class Loops(Link):
    """Both ends on one thread of this process, over a pair of sockets."""

    cuts = 60

    def __init__(self) -> None:
        self._received, self._channel, self._over = bytearray(), 0, False
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._ends = (
            SessionLoop(Session(), self._keep, lambda _: None),
            SessionLoop(Session(), self._repeat, lambda _: None),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _keep(self, frame: Frame) -> None:
        with self._changed:
            self._received += frame.data
            self._changed.notify_all()

    def _repeat(self, frame: Frame) -> None:
        self._ends[1].session.put(frames.DATA, 0, frame.data)

    def _run(self) -> None:
        while not self._over:
            while self._calls:
                self._calls.popleft()()
            if not all(end.attached for end in self._ends):
                self._connect()
            for end in self._ends:
                end.step(time.monotonic() + 0.001)
        for end in self._ends:
            end.close()

    def _connect(self) -> None:
        for end in self._ends:
            end.detach_silently()
        received = [end.session.received for end in self._ends]
        for end, sock, count in zip(
            self._ends, socket.socketpair(), reversed(received), strict=True
        ):
            end.attach(sock, count)

    def write(self, data: bytes) -> None:
        if self._over:
            raise BrokenPipeError
        self._calls.append(lambda: self._ends[0].session.put(frames.DATA, 0, data))

    def read(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._over)
            data = bytes(self._received)
            self._received.clear()
            return data

    def cut(self) -> None:
        self._calls.append(self._ends[0].detach_silently)

    @contextmanager
    def stream(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        self._channel += 1
        programs, inner = zip(socket.socketpair(), socket.socketpair(), strict=True)
        for end, sock in zip(self._ends, inner, strict=True):
            self._calls.append(partial(end.channels.add, self._channel, sock))
        with programs[0], programs[1]:
            yield programs[0], programs[1]

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()


class Daemon(Link):
    """A session with a node's daemon, whose agent it is.

    Args:
        way: how the node is reached, and how that is cut.
        name: of a daemon that runs already; a new one by default.
        secret: of that daemon.
        program: what runs in the place of the agent; empty for the agent itself.
    """

    def __init__(
        self,
        way: Way,
        name: str = "",
        secret: str = "",
        program: Sequence[str] = (sys.executable, "-c", ECHO),
    ) -> None:
        self.way, self.name = way, name or f"test-{secrets.token_hex(6)}"
        self.program = program
        self.secret = secret or secrets.token_hex(16)
        self.states: queue.Queue[str] = queue.Queue()
        command = [sys.executable, "-m", "skymagic.kernels.daemon.attach", self.name, *program]
        self._tunnel = Tunnel(
            lambda: way.start(command),
            state=self.states.put,
            secret=self.secret,
            takes_over=bool(name),
        )

    def write(self, data: bytes) -> None:
        self._tunnel.agent.write(data)

    def read(self) -> bytes:
        return self._tunnel.agent.read()

    def complaint(self) -> str:
        """The reason why the link has ended."""
        return self._tunnel.agent.complaint()

    def cut(self) -> None:
        while self._tunnel.state != "connected":
            assert self.states.get(timeout=30) != "lost", self._tunnel.reason
        self.way.cut()

    @contextmanager
    def stream(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(
                ("127.0.0.1", self._tunnel.forward(*server.getsockname()))
            ) as here,
            server.accept()[0] as there,
        ):
            yield here, there

    def close(self) -> None:
        self._tunnel.close()

    def leave(self) -> None:
        """Close it without a word, as a notebook that is killed does."""
        self._tunnel.leave()

    def another(self, secret: str) -> Daemon:
        """The link of another notebook to the same daemon."""
        return Daemon(self.way, self.name, secret, self.program)


@dataclass(frozen=True)
class Way:
    """How the node of a daemon is reached.

    Attributes:
        start: starts a program there and returns its streams.
        cut: breaks what carries the streams.
    """

    start: Callable[[list[str]], Transport]
    cut: Callable[[], object]


@contextmanager
def in_process(folder: Path) -> Iterator[Callable[[], Link]]:
    """Links between two ends in this process."""
    yield Loops


def cut_child() -> None:
    """Kill what attaches this process to daemons of this machine."""
    for child in psutil.Process().children():
        if "skymagic.kernels.daemon.attach" in cmdline(child):
            child.kill()


@contextmanager
def to_child(folder: Path) -> Iterator[Callable[[], Daemon]]:
    """Links to daemons of this machine, over pipes."""
    yield lambda: Daemon(Way(ChildTransport, cut_child))


@contextmanager
def to_agent(folder: Path) -> Iterator[Callable[[], Daemon]]:
    """As `to_child`, to daemons that keep an agent."""
    yield lambda: Daemon(Way(ChildTransport, cut_child), program=())


@contextmanager
def over_channel(folder: Path) -> Iterator[Callable[[], Daemon]]:
    """Links to daemons of a host, over a channel of SSH."""
    with carriers.ssh(folder, "paramiko") as carrier, contextlib.ExitStack() as opened:
        connections = [carrier.connect()]

        def start(command: list[str]) -> Transport:
            if not connections[-1].alive:
                opened.callback(connections[-1].close)
                connections.append(carrier.connect())
            return connections[-1].open(f"exec {shlex.join(command)}")

        assert carrier.cut is not None
        way = Way(start, carrier.cut)
        yield lambda: Daemon(way)
        connections[-1].close()
