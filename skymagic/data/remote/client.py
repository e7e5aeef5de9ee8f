"""The notebook's line to one node's depot: messages and raw bytes out, answers and files in; opened again when it is lost."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from skymagic.wire import store
from skymagic.wire.store import Beat, Looked, Message, Open, Opened, Piece, Read, Size
from skymagic.wire.transport import Transport

START = 60.0
"""Seconds that a depot may take to say that it is ready."""


@dataclass(frozen=True)
class Node:
    """Where a depot runs."""

    name: str
    """What users call the machine."""
    open: Callable[[], Transport]
    """Starts ``python -m skymagic.kernels.store.server STORE`` there, STORE being the folder that the node's ranks have as
    their store; may be called again after a lost line. May raise OSError or a SkyError."""
    address: str = ""
    """Where the other nodes reach this one; empty when it is alone."""


class LineLost(ConnectionError):
    """A depot cannot be reached at present."""


class Fetch:
    """A file on its way here.

    Args:
        unwanted: set when nobody wants it any more.
    """

    def __init__(self, unwanted: threading.Event) -> None:
        self.unwanted = unwanted
        self.memory: memoryview | None = None
        self.come = 0
        self.problem: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self.memory is not None and self.come == len(self.memory)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.complete or self.problem is not None

    def size(self, rest: int) -> None:
        """The depot says how much will come."""
        if rest < 0:
            self.problem = FileNotFoundError("there is no such file on the node (any more)")
        elif self.memory is None:
            try:
                # Anonymous pages: nothing is copied or zeroed beforehand, and arrays in it are aligned.
                self.memory = memoryview(mmap.mmap(-1, rest) if rest else bytearray())
            except (OSError, ValueError, MemoryError) as problem:
                self.problem = problem

    def piece(self, piece: Piece, data: bytes | memoryview) -> None:
        """A piece has come."""
        import xxhash

        plain = zlib.decompress(data) if piece.packed else data
        if self.memory is None or xxhash.xxh3_64_hexdigest(plain) != piece.check:
            self.problem = OSError("a file was damaged on its way from the node")
            return
        self.memory[self.come : self.come + len(plain)] = plain
        self.come += len(plain)


class DepotLine:
    """One depot, as the notebook speaks to it; opened at the first need, and again after it was lost.

    Args:
        node: where it runs.
        number: the node's number.
        terms: what the depot is told first.
        heard: called on the line's thread, under no lock, with the number and what a depot says of its values; with
            None when the line is lost.
        silence: seconds without a word from a depot, which speaks every two, after which its line is taken for lost.
    """

    def __init__(
        self,
        node: Node,
        number: int,
        terms: Open,
        heard: Callable[[int, Message | None], None],
        silence: float,
    ) -> None:
        self.node = node
        self.number = number
        self.port = 0
        self.room = 0
        self.closed = False
        self._terms = terms
        self._heard = heard
        self._silence = silence
        self._transport: Transport | None = None
        self._writing = threading.RLock()
        self._news = threading.Condition()
        self._ready = False
        self._closing: threading.Thread | None = None
        self._last = 0.0
        self._complaint = ""
        self._numbers = itertools.count(1)
        self._fetches: dict[int, Fetch] = {}
        self._looking: dict[int, Callable[[Looked], None]] = {}

    @property
    def up(self) -> bool:
        """Whether the depot can be spoken to."""
        return self._ready

    def open(self) -> None:
        """Reach the depot, unless it is reached.

        Raises:
            LineLost: it does not answer; it may be tried again.
            Exception: what the node's ``open`` raises.
        """
        with self._writing:
            if self._ready:
                return
            if self.closed:
                raise self._lost()
            transport = self.node.open()
            try:
                self._begin(transport)
            except BaseException:
                self._drop(transport)
                raise

    def _begin(self, transport: Transport) -> None:
        self._complaint = ""
        self._transport, self._last = transport, time.monotonic()
        if self.closed:
            raise self._lost()
        threading.Thread(
            target=self._listen, args=(transport,), name=f"skymagic-depot-{self.number}", daemon=True
        ).start()
        with contextlib.suppress(OSError):  # the reader finds out, and why
            transport.write(store.encode(self._terms))
        if not self._wait(lambda: self._ready, transport, START):
            raise LineLost(f"the depot on {self.node.name} does not start{self._why()}")

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """A message, and the raw bytes behind it.

        Raises:
            LineLost: the depot cannot be reached at present.
        """
        with self._writing:
            transport = self._transport
            if transport is None or not self._ready:
                raise self._lost()
            try:
                transport.write(store.encode(message))
                if data is not None:
                    transport.write(data)
            except OSError:
                self._drop(transport)
                raise self._lost() from None
            except BaseException:  # an interrupt: nobody knows how much was sent
                self._drop(transport)
                raise

    def look(self, values: list[tuple[str, str, int]], found: Callable[[Looked], None]) -> Callable[[], None]:
        """Ask what is there (key, name, length); the answer is waited for by calling what is returned.

        Args:
            found: called on the line's thread, before whatever the depot says after its answer.

        Raises:
            LineLost: the depot cannot be reached at present; so does the wait.
        """
        number = next(self._numbers)
        transport = self._transport
        self._looking[number] = found
        self.send(store.Look(number, values))

        def wait() -> None:
            if not self._wait(lambda: number not in self._looking, transport):
                self._looking.pop(number, None)
                raise self._lost()

        return wait

    def fetch(self, name: str, fetch: Fetch) -> None:
        """Go on with a file until it is complete, unwanted, or the line is lost.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: there is no memory for it, or it was damaged.
        """
        number = next(self._numbers)
        transport = self._transport
        self._fetches[number] = fetch
        try:
            self.send(Read(number, name, fetch.come))
            self._wait(lambda: fetch.over or fetch.unwanted.is_set(), transport)
        except LineLost:
            pass
        finally:
            self._fetches.pop(number, None)
            if not fetch.over:
                with contextlib.suppress(LineLost):
                    self.send(store.Stop(number))
        if fetch.problem is not None:
            raise fetch.problem

    def heed(self) -> None:
        """Whoever waits here for a file looks whether it is still wanted."""
        with self._news:
            self._news.notify_all()

    def hang_up(self) -> None:
        """End the depot; another one is started at the next need."""
        self._drop(self._transport)

    def close(self) -> None:
        """End the depot; it is not opened again. Twice is safe."""
        self.closed = True
        self._drop(self._transport)
        if self._closing is not None:
            self._closing.join(timeout=10.0)

    def silent(self) -> bool:
        """Whether nothing was heard for so long that the line must be taken for lost; it is dropped then."""
        transport = self._transport
        if transport is not None and time.monotonic() - self._last > self._silence:
            self._drop(transport)
            return True
        return False

    # -- what comes --------------------------------------------------------------------------------------------------

    def _wait(
        self, done: Callable[[], bool], transport: Transport | None, patience: float = float("inf")
    ) -> bool:
        """Wait on this transport; False when it is lost or the time is over."""
        end = time.monotonic() + patience
        while True:
            with self._news:
                if done():
                    return True
                if self._transport is not transport or transport is None or time.monotonic() > end:
                    return False
                self._news.wait(1.0)
            if self._ready:
                self.silent()

    def _listen(self, transport: Transport) -> None:
        def read() -> bytes:
            if self._transport is not transport:
                return b""
            data = transport.read()
            self._last = time.monotonic()
            return data

        try:
            for message, payload in store.CODEC.messages(read, noise=True):
                if isinstance(message, Piece):
                    self._take_in(message, payload)
                elif isinstance(message, Opened | Looked | Size | Beat):
                    self._answer(message)
                else:
                    self._heard(self.number, message)
        except Exception:  # whatever it was, nothing more can be understood of this line
            pass
        with contextlib.suppress(OSError, ValueError):  # it is being closed
            self._complaint = transport.complaint()
        self._drop(transport)

    def _answer(self, message: Opened | Looked | Size | Beat) -> None:
        if isinstance(message, Looked) and message.number in self._looking:
            self._looking[message.number](message)
        with self._news:
            if isinstance(message, Opened):
                self.port, self.room, self._ready = message.port, message.room, True
            elif isinstance(message, Looked):
                self.room = message.room
                self._looking.pop(message.number, None)
            elif isinstance(message, Size) and message.number in self._fetches:
                self._fetches[message.number].size(message.nbytes)
            self._news.notify_all()

    def _take_in(self, piece: Piece, data: bytes | memoryview) -> None:
        fetch = self._fetches.get(piece.number)
        if fetch is not None:
            fetch.piece(piece, data)
            if fetch.over:
                with self._news:
                    self._news.notify_all()

    def _drop(self, transport: Transport | None) -> None:
        """This transport is of no use any more."""
        with self._news:
            if transport is None or self._transport is not transport:
                return
            self._transport, self._ready = None, False
            self._news.notify_all()
            # It may take a while, and nobody needs to wait for it.
            self._closing = threading.Thread(target=transport.close, name="skymagic-depot-close", daemon=True)
            self._closing.start()
        self._heard(self.number, None)

    def _lost(self) -> LineLost:
        return LineLost(f"the line to {self.node.name} is lost{self._why()}")

    def _why(self) -> str:
        return f": {self._complaint.splitlines()[-1]}" if self._complaint.strip() else ""
