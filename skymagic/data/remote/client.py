"""The notebook's connection to one node's value server: messages and raw bytes out, answers and files in."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
import zlib
from collections.abc import Callable

from skymagic.cluster import Node
from skymagic.wire import store
from skymagic.wire.codec import Transport
from skymagic.wire.store import Heartbeat, Read, ReadChunk, ReadReply, Ready, Settings, StoreMessage

START_TIMEOUT = 60.0
"""Seconds that a value server may take to say that it is ready."""


class ConnectionLost(ConnectionError):
    """A value server cannot be reached at present."""


class IncomingFile:
    """A file on its way here; after a lost connection it resumes where it was.

    Args:
        unwanted: set when nobody wants it any more.
    """

    def __init__(self, unwanted: threading.Event) -> None:
        self.unwanted = unwanted
        self.memory: memoryview | None = None
        self.received = 0
        self.problem: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self.memory is not None and self.received == len(self.memory)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.complete or self.problem is not None

    def begin(self, rest: int) -> None:
        """The server says how many bytes will come."""
        if rest < 0:
            self.problem = FileNotFoundError("the file no longer exists on the node")
        elif self.memory is None:
            try:
                # Anonymous pages: nothing is copied or zeroed beforehand, and arrays in it are aligned.
                self.memory = memoryview(mmap.mmap(-1, rest) if rest else bytearray())
            except (OSError, ValueError, MemoryError) as problem:
                self.problem = problem

    def add(self, piece: ReadChunk, data: bytes | memoryview) -> None:
        """A piece has come."""
        import xxhash

        rest = len(self.memory) - self.received if self.memory is not None else 0
        # one byte more shows that it is too long; 0 would be no limit
        plain = zlib.decompressobj().decompress(data, rest + 1) if piece.deflated else data
        if (
            self.memory is None
            or len(plain) > rest
            or xxhash.xxh3_64_hexdigest(plain) != piece.checksum
        ):
            self.problem = OSError("a file was damaged in transit from the node")
            return
        self.memory[self.received : self.received + len(plain)] = plain
        self.received += len(plain)


class StoreClient:
    """A client of one value server: connects at the first need, and again after the connection was lost.

    Args:
        node: where it runs.
        start: starts ``skymagic.kernels.store.server`` there; may be called again after a lost connection. May raise OSError
            or a SkyError.
        settings: what the server gets first.
        on_message: called on the client's thread, under no lock, with the number and what a server says of its values, `Ready` before
            anything can be sent to it; with None when the connection is lost.
        silence_timeout: seconds without a message from a server, which sends a heartbeat every two, after which the
            connection counts as lost.
    """

    def __init__(
        self,
        node: Node,
        start: Callable[[Node], Transport],
        settings: Settings,
        on_message: Callable[[int, StoreMessage | None], None],
        silence_timeout: float,
    ) -> None:
        self.node = node
        self.number = node.index
        self._start = start
        self.port = 0
        self.room = 0
        self.closed = False
        self._settings = settings
        self._on_message = on_message
        self._silence_timeout = silence_timeout
        self._transport: Transport | None = None
        self._writing = threading.RLock()
        self._changed = threading.Condition()
        self._ready = False
        self._closing: threading.Thread | None = None
        self._last_received = 0.0
        self._complaint = ""
        self._numbers = itertools.count(1)
        self._downloads: dict[int, IncomingFile] = {}

    @property
    def connected(self) -> bool:
        """Whether messages can be sent."""
        return self._ready

    def move(self, node: Node, settings: Settings) -> None:
        """Connect to another machine from now on, in the place of one that is gone."""
        with self._writing:
            self.node, self._settings = node, settings

    def connect(self) -> None:
        """Connect, unless there is a connection.

        Raises:
            ConnectionLost: it does not answer; it may be tried again.
            Exception: what `start` raises.
        """
        with self._writing:
            if self._ready:
                return
            if self.closed:
                raise self._lost()
            transport = self._start(self.node)
            try:
                self._handshake(transport)
            except BaseException:
                self._disconnect(transport)
                raise

    def _handshake(self, transport: Transport) -> None:
        self._complaint = ""
        self._transport, self._last_received = transport, time.monotonic()
        if self.closed:
            raise self._lost()
        threading.Thread(
            target=self._receive,
            args=(transport,),
            name=f"skymagic-values-{self.number}",
            daemon=True,
        ).start()
        with contextlib.suppress(OSError):  # the receiving thread finds out, and why
            transport.write(store.encode(self._settings))
        if not self._wait_for(lambda: self._ready, transport, START_TIMEOUT):
            raise ConnectionLost(
                f"the value server on {self.node.name} does not start{self._why()}"
            )

    def send(self, message: StoreMessage, data: memoryview | None = None) -> None:
        """Send a message, and the raw bytes behind it.

        Raises:
            ConnectionLost: the server cannot be reached at present.
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
                self._disconnect(transport)
                raise self._lost() from None
            except BaseException:  # an interrupt: nobody knows how much was sent
                self._disconnect(transport)
                raise

    def fetch(self, name: str, download: IncomingFile) -> None:
        """Go on with a download until it is complete, unwanted, or the connection is lost.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: there is no memory for it, or it was damaged.
        """
        number = next(self._numbers)
        transport = self._transport
        self._downloads[number] = download
        try:
            self.send(Read(number, name, download.received))
            self._wait_for(lambda: download.ended or download.unwanted.is_set(), transport)
        except ConnectionLost:
            pass
        finally:
            self._downloads.pop(number, None)
            if not download.ended:
                with contextlib.suppress(ConnectionLost):
                    self.send(store.CancelRead(number))
        if download.problem is not None:
            raise download.problem

    def wake(self) -> None:
        """Let the threads that wait for a file check whether it is still wanted."""
        with self._changed:
            self._changed.notify_all()

    def disconnect(self) -> None:
        """End the connection and its server; others are started at the next need."""
        self._disconnect(self._transport)

    def close(self) -> None:
        """End the connection and its server for good; twice is safe."""
        self.closed = True
        self._disconnect(self._transport)
        if self._closing is not None:
            self._closing.join(timeout=10.0)

    def drop_if_silent(self) -> bool:
        """Heartbeat failure detector: whether nothing was received for so long that the connection counts as lost, and is."""
        transport = self._transport
        if transport is not None and time.monotonic() - self._last_received > self._silence_timeout:
            self._disconnect(transport)
            return True
        return False

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _wait_for(
        self, done: Callable[[], bool], transport: Transport | None, timeout: float = float("inf")
    ) -> bool:
        """Wait for what comes on this transport; False when it is lost or the time is over."""
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                if done():
                    return True
                if self._transport is not transport or transport is None or time.monotonic() > end:
                    return False
                self._changed.wait(1.0)
            if self._ready:
                self.drop_if_silent()

    def _receive(self, transport: Transport) -> None:
        def read() -> bytes:
            if self._transport is not transport:
                return b""
            data = transport.read()
            self._last_received = time.monotonic()
            return data

        try:
            for message, payload in store.CODEC.messages(read, noise=True):
                if isinstance(message, ReadChunk):
                    self._receive_piece(message, payload)
                elif isinstance(message, ReadReply | Heartbeat):
                    self._answer(message)
                else:
                    self._on_message(self.number, message)
                    if isinstance(message, Ready):
                        self._answer(message)
        except Exception:  # whatever it was, nothing more can be understood of this connection
            pass
        with contextlib.suppress(OSError, ValueError):  # it is being closed
            self._complaint = transport.complaint()
        self._disconnect(transport)

    def _answer(self, message: Ready | ReadReply | Heartbeat) -> None:
        with self._changed:
            if isinstance(message, Ready):
                self.port, self.room, self._ready = message.port, message.room, True
            elif isinstance(message, ReadReply) and message.number in self._downloads:
                self._downloads[message.number].begin(message.nbytes)
            self._changed.notify_all()

    def _receive_piece(self, piece: ReadChunk, data: bytes | memoryview) -> None:
        download = self._downloads.get(piece.number)
        if download is not None:
            download.add(piece, data)
            if download.ended:
                with self._changed:
                    self._changed.notify_all()

    def _disconnect(self, transport: Transport | None) -> None:
        """Forget this transport, if it is still the present one: several threads may find out that it is lost."""
        with self._changed:
            if transport is None or self._transport is not transport:
                return
            self._transport, self._ready = None, False
            self._changed.notify_all()
            # Closing may take a while, and nobody needs to wait for it.
            self._closing = threading.Thread(
                target=transport.close, name="skymagic-values-close", daemon=True
            )
            self._closing.start()
        self._on_message(self.number, None)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.node.name} is lost{self._why()}")

    def _why(self) -> str:
        return f": {self._complaint.splitlines()[-1]}" if self._complaint.strip() else ""
