"""Connection to one node's value server: send messages and bytes, receive replies and files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import threading
import time
import zlib
from collections.abc import Callable

from skymagic.cluster import Node
from skymagic.wire import store
from skymagic.wire.codec import Transport
from skymagic.wire.store import Heartbeat, Read, ReadChunk, ReadReply, Ready, Settings, StoreMessage

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds within which a value server must report that it is ready."""


class ConnectionLost(ConnectionError):
    """Raised if a value server cannot be reached at the moment."""


class Download:
    """Download of a file. After a lost connection, it resumes at the same position.

    Args:
        unwanted: set when the file is no longer needed.
    """

    def __init__(self, unwanted: threading.Event) -> None:
        self.unwanted = unwanted
        self.memory: memoryview | None = None
        self.received = 0
        self.problem: Exception | None = None

    @property
    def complete(self) -> bool:
        """True if all bytes have arrived."""
        return self.memory is not None and self.received == len(self.memory)

    @property
    def ended(self) -> bool:
        """True if nothing more will arrive."""
        return self.complete or self.problem is not None

    def begin(self, remaining: int) -> None:
        """Handle the server's reply with the number of bytes to come."""
        if remaining < 0:
            self.problem = FileNotFoundError("the file no longer exists on the node")
        # After a reconnect the memory exists already, and receives the rest.
        elif self.memory is None:
            try:
                # Anonymous pages: nothing is copied or zeroed in advance, and arrays are aligned.
                self.memory = memoryview(mmap.mmap(-1, remaining) if remaining else bytearray())
            except (OSError, ValueError, MemoryError) as problem:
                self.problem = problem

    def add(self, piece: ReadChunk, data: bytes | memoryview) -> None:
        """Handle a piece of the file."""
        import xxhash

        remaining = len(self.memory) - self.received if self.memory is not None else 0
        # The extra byte reveals an oversized piece, and avoids a limit of 0, which means no limit.
        plain = zlib.decompressobj().decompress(data, remaining + 1) if piece.deflated else data
        if (
            self.memory is None
            or len(plain) > remaining
            or xxhash.xxh3_64_hexdigest(plain) != piece.checksum
        ):
            self.problem = OSError("a file was damaged in transit from the node")
            return
        self.memory[self.received : self.received + len(plain)] = plain
        self.received += len(plain)


class StoreClient:
    """Client of one value server: connects on first use, and again after a lost connection.

    Args:
        node: node of the server.
        start: starts `skymagic.kernels.store.server` there; may be called again after a lost
            connection. May raise OSError or a SkyError.
        settings: first message to the server.
        on_message: called on the client's thread, without a lock, with the node's index and each
            message of the server about values. `Ready` is the first of them, before anything can be
            sent to the server. Called with None when the connection is lost.
        silence_timeout: seconds without a message after which the connection counts as lost; a
            server sends a heartbeat every two seconds.
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
        self.node_index = node.index
        self._start = start
        self.listening: list[store.Listener] = []
        """Listeners of the server for other nodes; empty before it is connected."""
        self.free_bytes = 0
        """Number of bytes that the node's store can still hold."""
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
        self._server_error = ""
        self._numbers = itertools.count(1)
        self._downloads: dict[int, Download] = {}

    @property
    def connected(self) -> bool:
        """True if messages can be sent."""
        return self._ready

    def move(self, node: Node, settings: Settings) -> None:
        """From now on, connect to another machine, which replaces one that is gone."""
        with self._writing:
            self.node, self._settings = node, settings

    def connect(self) -> None:
        """Connect unless there is a connection.

        Raises:
            ConnectionLost: the server does not answer; the caller may try again.
            Exception: any error from `start`.
        """
        with self._writing:
            if self._ready:
                return
            if self.closed:
                raise self._lost()
            transport = self._start(self.node)
            try:
                self._handshake(transport)
                logger.info("value server is connected: node=%s", self.node_index)
            except BaseException:
                logger.warning("value server not reached: node=%s", self.node_index)
                self._disconnect(transport)
                raise

    def _handshake(self, transport: Transport) -> None:
        self._server_error = ""
        # Set before the check of `closed`, so that a concurrent `close` finds the transport.
        self._transport, self._last_received = transport, time.monotonic()
        if self.closed:
            raise self._lost()
        threading.Thread(
            target=self._receive,
            args=(transport,),
            name=f"skymagic-values-{self.node_index}",
            daemon=True,
        ).start()
        with contextlib.suppress(OSError):  # the receiving thread notices, and records why
            transport.write(store.encode(self._settings))
        if not self._wait_for(lambda: self._ready, transport, START_TIMEOUT):
            raise ConnectionLost(
                f"the value server on {self.node.name} does not start{self._server_reason()}"
            )

    def send(self, message: StoreMessage, data: memoryview | None = None) -> None:
        """Send a message, followed by raw bytes.

        Raises:
            ConnectionLost: the server cannot be reached at the moment.
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
            except BaseException:  # an interrupt: it is unknown how much was sent
                self._disconnect(transport)
                raise

    def continue_download(self, name: str, download: Download) -> None:
        """Download a file from where the last attempt ended.

        Returns when it is complete or not needed any more, or when the connection is lost.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: there is not enough memory, or the file was damaged in transit.
        """
        # A new number for each attempt, so that late pieces of an earlier one are ignored.
        number = next(self._numbers)
        # The connection that the request is about to use: if it is lost, the wait ends.
        transport = self._transport
        # Before the request, so that the reply finds it.
        self._downloads[number] = download
        try:
            # Resumes at the received bytes. If the connection is lost, the caller tries again.
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
        """Make threads that wait for a file check again if it is still needed."""
        with self._changed:
            self._changed.notify_all()

    def disconnect(self) -> None:
        """Close the connection and its server; both are started again when needed."""
        self._disconnect(self._transport)

    def close(self) -> None:
        """Close the connection and its server for good. Safe to call twice."""
        self.closed = True
        self._disconnect(self._transport)
        if self._closing is not None:
            self._closing.join(timeout=10.0)

    def drop_if_silent(self) -> bool:
        """Drop the connection if nothing was received for too long, and return True in that case.

        A server that has failed sends no heartbeats.
        """
        transport = self._transport
        if transport is not None and time.monotonic() - self._last_received > self._silence_timeout:
            self._disconnect(transport)
            return True
        return False

    # -- receiving ---------------------------------------------------------------------------------

    def _wait_for(
        self, done: Callable[[], bool], transport: Transport | None, timeout: float = float("inf")
    ) -> bool:
        """Wait for a condition; return False if the connection is lost or the time is up."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if done():
                    return True
                if (
                    self._transport is not transport
                    or transport is None
                    or time.monotonic() > deadline
                ):
                    return False
                # Wake up regularly to notice missing heartbeats.
                self._changed.wait(1.0)
            if self._ready:
                self.drop_if_silent()

    def _receive(self, transport: Transport) -> None:
        def read() -> bytes:
            if self._transport is not transport:
                # Disconnected in the meantime: end this thread as at the end of the stream.
                return b""
            data = transport.read()
            self._last_received = time.monotonic()
            return data

        try:
            for message, payload in store.CODEC.messages(read, noise=True):
                if isinstance(message, ReadChunk):
                    self._receive_piece(message, payload)
                elif isinstance(message, ReadReply | Heartbeat):
                    self._handle_reply(message)
                else:
                    # Before `_handle_reply`, which allows sending: the files listed in `Ready` must
                    # be known before anything is sent.
                    self._on_message(self.node_index, message)
                    if isinstance(message, Ready):
                        self._handle_reply(message)
        except (EOFError, OSError):  # the server has ended, or the connection is lost
            pass
        except Exception:  # after any error the rest of the stream cannot be decoded
            logger.warning(
                "message of the value server not handled: node=%s", self.node_index, exc_info=True
            )
        with contextlib.suppress(OSError, ValueError):  # the transport is being closed
            self._server_error = transport.complaint()
        self._disconnect(transport)

    def _handle_reply(self, message: Ready | ReadReply | Heartbeat) -> None:
        with self._changed:
            if isinstance(message, Ready):
                self.listening, self.free_bytes = message.listening, message.room
                self._ready = True
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
        """Drop this transport if it is still the current one.

        Several threads may notice the loss.
        """
        with self._changed:
            if transport is None or self._transport is not transport:
                return
            logger.info("connection to the value server has ended: node=%s", self.node_index)
            self._transport, self._ready = None, False
            self._changed.notify_all()
            # In the background, because closing may take a while.
            self._closing = threading.Thread(
                target=transport.close, name="skymagic-values-close", daemon=True
            )
            self._closing.start()
        self._on_message(self.node_index, None)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.node.name} is lost{self._server_reason()}")

    def _server_reason(self) -> str:
        return f": {self._server_error.splitlines()[-1]}" if self._server_error.strip() else ""
