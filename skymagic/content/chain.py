"""Transfer of values between nodes: each server sends values as they arrive, and follows others.

The connections use TLS (`wire.tls`): only the pool's certificate and key let a peer connect or
listen in. A follower requests values one after the other on a persistent connection, with TCP's
window as flow control::

    follower → server   FollowValue (name, offset)    send from this offset on
    server → follower   ValuePiece, bytes             … as they arrive; once a second without bytes
    server → follower   ValuePiece (key)              the end; the value's hash must be the key

A follower that no longer wants a value closes the connection.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from skymagic.wire import tls
from skymagic.wire.authentication import Door
from skymagic.wire.codec import payload_size
from skymagic.wire.store import (
    PEER_CODEC,
    PIECE_BYTES,
    FollowValue,
    Listener,
    PeerMessage,
    Replicate,
    ValuePiece,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
"""Seconds after which an idle server sends a heartbeat."""
PEER_TIMEOUT = 5.0
"""Seconds without a message after which the peer counts as gone."""
RECONNECT_PAUSE = 0.1
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP keepalive for idle connections: a machine that loses its power closes nothing."""

ReadValue = Callable[[str, int, int], tuple[bytes, str]]
"""Reads (name, offset, limit): returns available bytes, or b"" and the key at the value's end."""


class PeerConnection:
    """Connection between two value servers whose peer is authenticated; it owns the socket."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")
        self._piece = memoryview(bytearray(PIECE_BYTES))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # detects that the peer's machine has lost its power
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def send(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send a message followed by bytes.

        Raises OSError, and TimeoutError if the peer does not accept them in time.
        """
        self._sock.settimeout(2 * PEER_TIMEOUT)
        self._sock.sendall(PEER_CODEC.encode(message, data))

    def receive(self, timeout: float | None) -> tuple[PeerMessage, memoryview]:
        """Return the next message and its bytes, which are valid until the next call.

        Raises:
            OSError: the connection has ended, or no message came in time.
            ValueError: the data is not a message.
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
        """Make the receiving thread find the connection ended; may be called on any thread."""
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, which would remove the encryption under that thread
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; twice is safe."""
        with contextlib.suppress(OSError):
            self._stream.close()
            self._sock.close()


class PeerServer:
    """Server that sends values to the nodes that follow this one.

    Args:
        addresses: the only addresses that it listens at; those that this machine lacks are left
            out if there are others.
        pem: the pool's certificate and key.
        read: returns the available bytes of a value from an offset on.
    """

    def __init__(self, addresses: Sequence[str], pem: str, read: ReadValue) -> None:
        self._read = read
        self._changed = threading.Condition()
        # counts the calls of `wake`, so that none between two looks is missed
        self._version = 0
        self.listening: list[Listener] = []
        context = tls.context(pem, server=True)
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = socket.create_server((address, 0), family=family)
            except OSError:
                if len(addresses) == 1:
                    raise
                continue
            self.listening.append((address, listener.getsockname()[1]))
            door = Door(listener, self._serve, context)
            threading.Thread(
                target=self._accept, args=(door,), name="values-peer-server", daemon=True
            ).start()

    def wake(self) -> None:
        """Signal that there is more to send."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _accept(self, door: Door) -> None:
        while True:
            door.accept()

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
            # before the look, so that what arrives between the look and the wait ends the wait
            version = self._version
            try:
                data, key = self._read(name, offset, PIECE_BYTES)
            except OSError:  # it is being unlinked; the notebook sends the follower another order
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
    """Thread that fetches values from other nodes, one after the other.

    Args:
        pem: the pool's certificate and key.
        write: takes a name and bytes, and returns how many bytes the value has now; may raise
            OSError.
        complete: takes a name and the expected key; may raise OSError.
        fail: takes a name and the error: an OSError of `write` or `complete`, or a TimeoutError.
        own: where this node's own server listens. Where all private addresses are tried, one of
            another node may be this node's too.
    """

    def __init__(
        self,
        pem: str,
        write: Callable[[str, memoryview], int],
        complete: Callable[[str, str], None],
        fail: Callable[[str, OSError], None],
        own: Sequence[Listener] = (),
    ) -> None:
        self._own = frozenset(own)
        self._context = tls.context(pem, server=False)
        self._write, self._complete, self._fail = write, complete, fail
        self._orders: dict[str, Replicate] = {}
        # its lock is reentrant: `_wake` calls `_is_current`, which takes it again
        self._changed = threading.Condition()
        self._connections: dict[tuple[Listener, ...], PeerConnection] = {}
        self._receiving: tuple[Replicate, PeerConnection] | None = None
        threading.Thread(target=self._follow, name="values-follower", daemon=True).start()

    def follow(self, order: Replicate) -> None:
        """Fetch a value, or resume it from another node."""
        with self._changed:
            logger.debug("value is fetched: name=%s from=%s", order.name, order.sources)
            self._orders[order.name] = order
            self._wake()

    def abandon(self, name: str) -> None:
        """Cancel the fetch of a value; twice is safe."""
        with self._changed:
            self._orders.pop(name, None)
            self._wake()

    def _wake(self) -> None:
        """Wake the thread, even if it waits on a connection for an unwanted value."""
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
                    logger.warning("value not fetched: name=%s reason=%s", order.name, problem)
                    self.abandon(order.name)
                    self._fail(
                        order.name,
                        problem if isinstance(problem, OSError) else OSError(str(problem)),
                    )

    def _is_current(self, order: Replicate) -> bool:
        with self._changed:
            return self._orders.get(order.name) is order

    def _move_behind_others(self, order: Replicate) -> bool:
        """Move an order without progress behind the others, to avoid a deadlock.

        Its node may be waiting for this one.
        """
        with self._changed:
            if len(self._orders) < 2 or self._orders.get(order.name) is not order:
                return False
            # a dict keeps the order of insertion: it is the last one now
            self._orders[order.name] = self._orders.pop(order.name)
            return True

    def _get(self, order: Replicate) -> str | None:
        """Write the bytes of a value as they arrive, and return its key.

        Returns None when the order changed or another one goes first.
        """
        peer = tuple(order.sources)
        # writes nothing: returns how much has arrived from an earlier source
        received = self._write(order.name, memoryview(b""))
        connection = self._connections.pop(peer, None) or self._connect(order)
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
                # pieces of this value may be on the way, and do not say which value they belong to
                connection.close()
            else:
                self._connections[peer] = connection
        return key

    def _connect(self, order: Replicate) -> PeerConnection | None:
        """Connect to an order's node, which may still be starting.

        Returns None if the order changes.
        """
        end = time.monotonic() + PEER_TIMEOUT
        while self._is_current(order):
            if (sock := self._probe(order.sources)) is not None:
                return PeerConnection(sock)
            logger.debug("peer not reached, tried again: sources=%s", order.sources)
            if time.monotonic() > end:
                raise _no_answer_error(order)
            time.sleep(RECONNECT_PAUSE)
        return None

    def _probe(self, sources: Sequence[Listener]) -> ssl.SSLSocket | None:
        """Connect to all of a node's listeners at once, and return the first connection, or None.

        In another network the same private address belongs to another machine, which has no
        certificate of this pool.
        """
        sources = [source for source in sources if source not in self._own]
        if len(sources) == 1:
            return self._dial(sources[0])
        answered: queue.SimpleQueue[None] = queue.SimpleQueue()
        lock, first = threading.Lock(), list[ssl.SSLSocket]()

        def probe(source: Listener) -> None:
            sock = self._dial(source)
            with lock:
                late = bool(first)
                if sock is not None and not late:
                    first.append(sock)
            if sock is not None and late:
                sock.close()
            answered.put(None)

        # All at once: an address in another network may drop packets, and take its whole timeout.
        for source in sources:
            threading.Thread(target=probe, args=(source,), daemon=True).start()
        for _ in sources:
            answered.get()
            if first:
                return first[0]
        return None

    def _dial(self, source: Listener) -> ssl.SSLSocket | None:
        sock = None
        try:
            sock = socket.create_connection(source, PEER_TIMEOUT)
            return self._context.wrap_socket(sock)
        except OSError:
            if sock is not None:
                sock.close()
            return None

    def _pieces(self, order: Replicate, connection: PeerConnection, received: int) -> str | None:
        last_progress = time.monotonic()
        try:
            connection.send(FollowValue(order.name, received))
        except OSError:
            raise _no_answer_error(order) from None
        while True:
            try:
                piece, data = connection.receive(PEER_TIMEOUT)
            except OSError:
                raise _no_answer_error(order) from None
            if not self._is_current(order):
                return None
            if data:
                self._write(order.name, data)
                last_progress = time.monotonic()
            if isinstance(piece, ValuePiece) and piece.key:
                return piece.key
            # heartbeats only: the peer may be waiting for a value from this node
            if (
                time.monotonic() - last_progress > 2 * HEARTBEAT_INTERVAL
                and self._move_behind_others(order)
            ):
                return None


def _no_answer_error(order: Replicate) -> TimeoutError:
    """Return the error of a failed connection.

    It is a timeout: the bytes received are kept, to resume with another node as the source.
    """
    places = ", ".join(f"{address}:{port}" for address, port in order.sources)
    return TimeoutError(f"no answer from {places}")
