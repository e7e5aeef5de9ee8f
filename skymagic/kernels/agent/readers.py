"""Readers of a node: notebooks and terminals that see what its ranks do, beside the notebook that has the pool, and change nothing.

They connect to a socket in the daemon's run directory, which the user alone can enter, and speak `wire.agent`: they are told of the
node and its ranks, may ask for logs, stacks and names, and follow what ranks show. All else that they say is left unanswered.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from skymagic.kernels.agent.loop import Loop
from skymagic.kernels.agent.ranks import Ranks
from skymagic.wire import agent as wire
from skymagic.wire.authentication import accept_ready

METHODS = {"recall", "stacks", "native", "variables", "usage"}
"""What readers may ask ranks' control threads: what leaves them as they are."""
MAX_QUEUED = 16 << 20
"""Bytes that may wait for a reader which does not read; then its connection is closed."""
MAX_ASKED = 1000
"""Questions of all readers that may be open."""


class Reader:
    """One reader's connection. What is sent to it leaves on a thread of its own, so that a slow one holds up nobody."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.decoder = wire.decoder()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._write, name=f"skymagic-reader-{number}", daemon=True).start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message; to one that is gone, or too slow, nothing is sent."""
        data = wire.encode(message)
        with self._lock:
            self._queued += len(data)
            slow = self._queued > MAX_QUEUED
        if slow:
            self.shut()
        else:
            self._queue.put(data)

    def shut(self) -> None:
        """End the connection; the loop sees its end, and forgets it. Twice is safe."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._queue.put(b"")

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._queue.get():
                self.sock.sendall(data)
                with self._lock:
                    self._queued -= len(data)


class Readers:
    """Owns the socket and the connections.

    Args:
        path: of the socket, made anew.
        told: what each reader must know of the node first.
    """

    def __init__(self, loop: Loop, path: str, ranks: Ranks, told: Callable[[], Iterable[wire.AgentMessage]]) -> None:
        self._loop, self._ranks, self._told = loop, ranks, told
        self._numbers = itertools.count(1)
        self._readers: dict[int, Reader] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        """Number of a question here, below 0 → (reader, its own number)."""
        self._questions = itertools.count(-1, -1)
        self._listener: socket.socket | None = None
        with contextlib.suppress(OSError):  # then nobody reads, and all else works
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            listener.listen(8)
            self._listener = listener
            loop.watch(listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        if (sock := accept_ready(self._listener)) is None:
            return
        number = next(self._numbers)
        reader = self._readers[number] = Reader(number, sock)
        self._loop.watch(sock, lambda: self._on_data(reader))
        for message in [*self._told(), *self._ranks.states()]:
            reader.send(message)

    def _on_data(self, reader: Reader) -> None:
        try:
            data = reader.sock.recv(1 << 16)
            messages = list(reader.decoder.feed(data))
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            self._serve(reader, message)
        if not data:
            self._forget(reader)

    def _forget(self, reader: Reader) -> None:
        self._loop.unwatch(reader.sock)
        self._readers.pop(reader.number, None)
        self._ranks.leave(reader.number)
        reader.shut()
        reader.sock.close()

    def _serve(self, reader: Reader, message: wire.AgentMessage) -> None:
        match message:
            case wire.ReadLog():
                self._ranks.read_log(replace(message, number=self._question(reader, message.number)), reader.number)
            case wire.RankRequest() if message.method in METHODS:
                self._ranks.call(replace(message, number=self._question(reader, message.number)))
            case wire.Follow():
                self._ranks.watch(message, reader.number, reader.send)

    def _question(self, reader: Reader, number: int) -> int:
        own = next(self._questions)
        self._asked[own] = reader.number, number
        for old in list(self._asked)[:-MAX_ASKED]:
            del self._asked[old]
        return own

    def send(self, message: wire.AgentMessage) -> bool:
        """Pass on what concerns readers: answers to them, and what ranks' states are; whether it was for a reader alone."""
        if isinstance(message, wire.RankReply) and message.number < 0:
            who, number = self._asked.get(message.number, (0, 0))
            if (reader := self._readers.get(who)) is not None:
                reader.send(replace(message, number=number))
            return True
        if isinstance(message, wire.RankForked | wire.RankReady | wire.RankExited):
            for reader in self._readers.values():
                reader.send(message)
        return False

    def close(self) -> None:
        """End all connections; twice is safe."""
        for reader in list(self._readers.values()):
            self._forget(reader)
        if self._listener is not None:
            self._loop.unwatch(self._listener)
            self._listener.close()
            self._listener = None
