"""Values from node to node: each server sends what it has, as it arrives, and follows others.

The connections speak TLS (`wire.tls`): without the pool's certificate and key nobody can connect or listen in. A follower asks for one
value after the other on a connection that stays open, and TCP's own window is the flow control::

    follower → server   FollowValue (name, offset)    send from this offset on
    server → follower   ValuePiece, bytes             … as they arrive; without bytes, once a second: still there
    server → follower   ValuePiece (key)              that was all; its hash must be the key

A follower that wants no more of a value closes the connection.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

from skymagic.wire import tls
from skymagic.wire.authentication import Door
from skymagic.wire.codec import payload_size
from skymagic.wire.store import (
    PEER_CODEC,
    PIECE_BYTES,
    FollowValue,
    PeerMessage,
    Replicate,
    ValuePiece,
)

HEARTBEAT_INTERVAL = 1.0
"""Seconds after which a server that has nothing to send says so."""
PEER_TIMEOUT = 5.0
"""Seconds without a message after which the other end counts as gone."""
RECONNECT_PAUSE = 0.1
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""For a connection without a request: a machine that has lost its power closes nothing."""

ReadValue = Callable[[str, int, int], tuple[bytes, str]]
"""(name, offset, limit) → bytes, as many as are here; or no bytes and the key of a value that ends at the offset."""


class PeerConnection:
    """A connection between two value servers, whose other end is known; it takes the socket over."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")
        self._piece = memoryview(bytearray(PIECE_BYTES))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def send(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send a message, and the bytes behind it; raises OSError, TimeoutError where they are not taken in time."""
        self._sock.settimeout(2 * PEER_TIMEOUT)
        self._sock.sendall(PEER_CODEC.encode(message, data))

    def receive(self, timeout: float | None) -> tuple[PeerMessage, memoryview]:
        """The next message and its bytes, which are valid until the one after it.

        Raises:
            OSError: the connection has ended, or nothing came in time.
            ValueError: it is no message.
        """
        self._sock.settimeout(timeout)
        line = self._stream.readline(PEER_CODEC.max_line)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection has ended")
        message = PEER_CODEC.decode(line)
        data = self._piece[: payload_size(message)]
        if data and self._stream.readinto(data) < len(data):
            raise ConnectionError("the connection has ended")
        return message, data

    def wake(self) -> None:
        """Let the thread that receives find the connection ended; may be called on any."""
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, which takes the encryption away from under that thread
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; twice is safe."""
        with contextlib.suppress(OSError):
            self._stream.close()
            self._sock.close()


class PeerServer:
    """Sends values to the nodes that follow this one.

    Args:
        address: where it listens; on no other.
        pem: the pool's certificate and key.
        read: the bytes of a value from an offset on, as far as they are here.
    """

    def __init__(self, address: str, pem: str, read: ReadValue) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._version = (
            0  # counts the calls of `wake`: what came between two looks must not be slept through
        )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self.port: int = listener.getsockname()[1]
        self._door = Door(listener, self._serve, tls.context(pem, server=True))
        threading.Thread(target=self._accept, name="values-peer-server", daemon=True).start()

    def wake(self) -> None:
        """There is more to send."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            self._door.accept()

    def _serve(self, sock: ssl.SSLSocket) -> None:
        with sock:
            connection = PeerConnection(sock)
            while True:
                request, _ = connection.receive(None)
                if isinstance(request, FollowValue):
                    self._send(connection, request.name, request.offset)

    def _send(self, connection: PeerConnection, name: str, offset: int) -> None:
        key = ""
        while not key:
            version = self._version
            try:
                data, key = self._read(name, offset, PIECE_BYTES)
            except (
                OSError
            ):  # it is being unlinked; the follower gets another order from the notebook
                data, key = b"", ""
            if data or key:
                connection.send(ValuePiece(len(data), key), data)
                offset += len(data)
            elif not self._wait_for_more(version):
                connection.send(ValuePiece(0))

    def _wait_for_more(self, version: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._version != version, HEARTBEAT_INTERVAL)


class Follower:
    """Gets values from other nodes, one after the other, on a thread of its own.

    Args:
        pem: the pool's certificate and key.
        write: takes a name and bytes of it, and returns how many are here; may raise OSError.
        complete: takes a name and the key that it should have; may raise OSError.
        fail: takes a name and why it did not come; an OSError of `write` or `complete`, or a TimeoutError.
    """

    def __init__(
        self,
        pem: str,
        write: Callable[[str, memoryview], int],
        complete: Callable[[str, str], None],
        fail: Callable[[str, OSError], None],
    ) -> None:
        self._context = tls.context(pem, server=False)
        self._write, self._complete, self._fail = write, complete, fail
        self._orders: dict[str, Replicate] = {}
        self._changed = threading.Condition()
        self._connections: dict[tuple[str, int], PeerConnection] = {}
        self._receiving: tuple[Replicate, PeerConnection] | None = None
        threading.Thread(target=self._follow, name="values-follower", daemon=True).start()

    def follow(self, order: Replicate) -> None:
        """Get a value, or resume it from another node."""
        with self._changed:
            self._orders[order.name] = order
            self._wake()

    def abandon(self, name: str) -> None:
        """Do not get it after all; twice is safe."""
        with self._changed:
            self._orders.pop(name, None)
            self._wake()

    def _wake(self) -> None:
        """Wake the thread, also from a connection on which it waits for what nobody wants any more."""
        self._changed.notify_all()
        if self._receiving is not None and not self._is_current(self._receiving[0]):
            self._receiving[1].wake()

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders)
                order = next(iter(self._orders.values()))
            try:
                key = self._get(order)
                if key is not None:
                    self._complete(order.name, key)
                    self.abandon(order.name)
            except Exception as problem:
                if self._is_current(order):
                    self.abandon(order.name)
                    self._fail(
                        order.name,
                        problem if isinstance(problem, OSError) else OSError(str(problem)),
                    )

    def _is_current(self, order: Replicate) -> bool:
        with self._changed:
            return self._orders.get(order.name) is order

    def _yield(self, order: Replicate) -> bool:
        """Deadlock avoidance: put an order without progress behind the others, for its node may be waiting for this one."""
        with self._changed:
            if len(self._orders) < 2 or self._orders.get(order.name) is not order:
                return False
            self._orders[order.name] = self._orders.pop(order.name)
            return True

    def _get(self, order: Replicate) -> str | None:
        """Write what comes until the end, and return its key; None when the order changed or another goes first."""
        place = order.address, order.port
        received = self._write(order.name, memoryview(b""))
        connection = self._connections.pop(place, None) or self._connect(order)
        if connection is None:
            return None
        key = None
        try:
            with self._changed:
                self._receiving = order, connection
                self._wake()  # it may have been abandoned before
            key = self._pieces(order, connection, received)
        finally:
            with self._changed:
                self._receiving = None
            if key is None:
                connection.close()
            else:
                self._connections[place] = connection
        return key

    def _connect(self, order: Replicate) -> PeerConnection | None:
        """A connection to an order's node, which may be starting; None when the order changed."""
        end = time.monotonic() + PEER_TIMEOUT
        while self._is_current(order):
            sock = None
            try:
                sock = socket.create_connection((order.address, order.port), PEER_TIMEOUT)
                return PeerConnection(self._context.wrap_socket(sock))
            except OSError:
                if sock is not None:
                    sock.close()
                if time.monotonic() > end:
                    raise _no_word(order) from None
            time.sleep(RECONNECT_PAUSE)
        return None

    def _pieces(self, order: Replicate, connection: PeerConnection, received: int) -> str | None:
        last_progress = time.monotonic()
        try:
            connection.send(FollowValue(order.name, received))
        except OSError:
            raise _no_word(order) from None
        while True:
            try:
                piece, data = connection.receive(PEER_TIMEOUT)
            except OSError:
                raise _no_word(order) from None
            if not self._is_current(order):
                return None
            if data:
                self._write(order.name, data)
                last_progress = time.monotonic()
            if isinstance(piece, ValuePiece) and piece.key:
                return piece.key
            if time.monotonic() - last_progress > 2 * HEARTBEAT_INTERVAL and self._yield(order):
                return None


def _no_word(order: Replicate) -> TimeoutError:
    """The connection has failed: what has come is kept, to resume with another node as the source."""
    return TimeoutError(f"no answer from {order.address}:{order.port}")
