"""Requests for ranks, recipients of their output, and readers of a node.

Readers are terminals that read logs and stacks of its ranks while another notebook has the pool,
and change nothing. They connect to a socket in the daemon's run directory, which only the user can
enter, and speak `wire.agent`: they get the state of the node and its ranks, and may ask for logs
and stacks. Their other messages are ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from skymagic.kernels import stacks
from skymagic.kernels.agent.children import Sink
from skymagic.kernels.agent.ranks import Ranks
from skymagic.kernels.fork import EventLoop
from skymagic.wire import agent as wire
from skymagic.wire import queries
from skymagic.wire.authentication import accept_ready

logger = logging.getLogger(__name__)

# bytes that may wait for a slow reader before its connection is closed
MAX_QUEUED = 16 << 20
MAX_ASKED = 1000
"""Maximum number of open requests of all readers."""
READABLE = {queries.STACK.method, queries.NATIVE_STACK.method, queries.USAGE.method}
"""Questions to ranks that readers may ask: none of them changes a rank."""
STACK_DUMP_TIMEOUT = 0.1
"""Seconds that a rank has to write its stack."""


class RankRequests:
    """Requests of the notebook and of readers for the ranks of a node."""

    def __init__(self, loop: EventLoop, ranks: Ranks, send: Sink) -> None:
        self._loop, self._ranks, self._send = loop, ranks, send

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a rank; SIGKILL also ends the processes that it started."""
        rank = self._ranks.running.get(number)
        if rank is None or rank.pid is None:
            logger.debug("signal ignored, the rank is gone: rank=%s signal=%s", number, signum)
            return
        logger.info("rank is signalled: rank=%s pid=%s signal=%s", number, rank.pid, signum)
        if signum == signal.SIGKILL:
            rank.expected = True
            rank.kill()
        else:
            rank.signal(signum)

    def hooks(self) -> dict[int, int]:
        """Return, for each rank with a hook, how many times the hook has finished."""
        return {
            number: rank.hook
            for number, rank in list(self._ranks.running.items())
            if rank.hook is not None
        }

    def note(self, number: int, text: str) -> None:
        """Show a line with a rank's output, also to a notebook that takes over its run."""
        if (rank := self._ranks.running.get(number)) is not None:
            rank.output.screen.note(text)

    def call(self, message: wire.RankRequest) -> None:
        """Pass a request on to ranks' control threads; answer ``native`` and ``usage`` here."""
        logger.debug("request for ranks: method=%s ranks=%s", message.method, message.ranks)
        for number in message.ranks:
            if message.method == "native":
                self._dump_stack(number, message.number)
            elif message.method == "usage":
                rank = self._ranks.running.get(number)
                self._send(
                    wire.RankReply(
                        number, message.number, rank.usage() if rank is not None else None
                    )
                )
            elif number in self._ranks.running:
                self._ranks.running[number].send(message)

    def _dump_stack(self, number: int, call: int) -> None:
        """Make a busy rank write its stack from a signal handler, and answer the request on its
        behalf.
        """
        rank = self._ranks.running.get(number)
        if rank is None or rank.pid is None:
            return
        path = Path(f"{self._ranks.logs.path(number)}.stack")
        # the file has the rank's earlier stacks too: only what is appended now is the answer
        before = path.stat().st_size if path.exists() else 0
        # without its handler the signal would kill the rank
        if stacks.catches_signal(rank.pid):
            rank.signal(stacks.SIGNAL)

        def answer() -> None:
            text = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
            self._send(wire.RankReply(number, call, stacks.parse(text)))

        self._loop.call_later(STACK_DUMP_TIMEOUT, answer)


class RankAudience:
    """Recipient of the ranks' output and states: the notebook, which may be away or replaced by
    another.
    """

    def __init__(self, ranks: Ranks, send: Sink) -> None:
        self._ranks, self._send = ranks, send

    def states(self) -> Iterator[wire.AgentMessage]:
        """Yield the messages that describe the ranks' states."""
        for rank in self._ranks.running.values():
            if rank.pid is not None:
                yield wire.RankForked(rank.number, rank.pid, rank.ident, rank.started)
                if rank.ready:
                    yield wire.RankReady(rank.number)
        for exited, _ in self._ranks.dead.values():
            yield wire.RankForked(exited.rank, exited.pid, "")
            yield exited

    def detach(self) -> None:
        """Buffer output while the notebook is away."""
        self._ranks.away = True
        for rank in self._ranks.running.values():
            rank.output.screen.detach()

    def attach(self) -> None:
        """Resume sending to the notebook, which is back."""
        self._ranks.away = False
        for rank in self._ranks.running.values():
            rank.output.screen.attach()

    def brief_new_notebook(self) -> None:
        """Send another notebook the ranks' states."""
        self._ranks.away = False
        # the earlier notebook's requests (asker 0) to follow logs
        self._ranks.logs.forget(0)
        for rank in self._ranks.running.values():
            rank.output.screen.replaced()
        # before the states: the notebook asks for the rest once it knows these
        for message in (*self._ranks.delivered(), *self.states()):
            self._send(message)


class NodeReader:
    """Connection of one reader.

    A thread sends its messages, so that a slow reader blocks nothing else.
    """

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.decoder = wire.decoder()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._write, name=f"skymagic-reader-{number}", daemon=True).start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message, unless the reader is gone or too slow."""
        data = wire.encode(message)
        # `+=` is not atomic, and the writing thread subtracts
        with self._lock:
            self._queued += len(data)
            slow = self._queued > MAX_QUEUED
        if slow:
            logger.warning("reader is too slow and is disconnected: reader=%s", self.number)
            self.close()
        else:
            self._queue.put(data)

    def close(self) -> None:
        """End the connection; the loop then forgets it. Twice is safe."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        # ends the writing thread
        self._queue.put(b"")

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._queue.get():
                self.sock.sendall(data)
                with self._lock:
                    self._queued -= len(data)


class NodeReaders:
    """Connected readers of a node, and the socket that they connect to.

    Args:
        path: of the socket; a socket that an earlier agent has left there is replaced.
        greeting: returns the messages that each reader gets first.
        call: passes a question on to ranks.
    """

    def __init__(
        self,
        loop: EventLoop,
        path: str,
        ranks: Ranks,
        audience: RankAudience,
        greeting: Callable[[], Iterable[wire.AgentMessage]],
        call: Callable[[wire.RankRequest], None],
    ) -> None:
        self._loop, self._ranks, self._audience = loop, ranks, audience
        self._greeting, self._call = greeting, call
        self._numbers = itertools.count(1)
        self._readers: dict[int, NodeReader] = {}
        # own (negative) number of a request → (reader, the reader's number)
        self._asked: dict[int, tuple[int, int]] = {}
        self._questions = itertools.count(-1, -1)
        self._listener: socket.socket | None = None
        with contextlib.suppress(OSError):  # then there are no readers, and everything else works
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # an agent that was killed has left its socket, and `bind` fails if the path exists
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
        reader = self._readers[number] = NodeReader(number, sock)
        logger.debug("reader connected: reader=%s", number)
        self._loop.watch(sock, lambda: self._on_data(reader))
        for message in [*self._greeting(), *self._audience.states()]:
            reader.send(message)

    def _on_data(self, reader: NodeReader) -> None:
        try:
            data = reader.sock.recv(1 << 16)
            messages = list(reader.decoder.feed(data))
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            self._serve(reader, message)
        if not data:
            self._forget(reader)

    def _forget(self, reader: NodeReader) -> None:
        logger.debug("reader disconnected: reader=%s", reader.number)
        self._loop.unwatch(reader.sock)
        self._readers.pop(reader.number, None)
        self._ranks.logs.forget(reader.number)
        reader.close()
        reader.sock.close()

    def _serve(self, reader: NodeReader, message: wire.AgentMessage) -> None:
        if isinstance(message, wire.ReadLog):
            # own, negative numbers keep the requests of several readers apart
            question = replace(message, number=self._question(reader, message.number))
            self._ranks.logs.read(question, reader.number)
        elif isinstance(message, wire.RankRequest) and message.method in READABLE:
            # a stack of a busy rank is written by a signal handler, which changes nothing there
            self._call(replace(message, number=self._question(reader, message.number)))

    def _question(self, reader: NodeReader, number: int) -> int:
        own = next(self._questions)
        self._asked[own] = reader.number, number
        for old in list(self._asked)[:-MAX_ASKED]:
            del self._asked[old]
        return own

    def send(self, message: wire.AgentMessage) -> bool:
        """Pass a message on to the readers that it concerns; return True if it was for a reader
        only.

        Readers get replies to their requests, and the states of ranks.
        """
        # `call` answers some requests here, and passes others on: both replies come this way
        replies = wire.LogReply | wire.LoggedRuns | wire.RankReply
        if isinstance(message, replies) and message.number < 0:
            reader_number, number = self._asked.get(message.number, (0, 0))
            if (reader := self._readers.get(reader_number)) is not None:
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
