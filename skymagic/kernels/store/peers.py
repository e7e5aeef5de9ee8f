"""Values from node to node with credit-based flow control: each server sends what it has, as it arrives, and follows others.

The sockets speak CURVE: whoever has not got the pool's key pair can neither connect nor listen in.
A follower asks for a value from an offset on and grants credit, in bytes; the server sends as much as has come, each
piece with its offset; a piece without bytes is a heartbeat, one with a key the end::

    follower → server   [name, offset, credit]        send from this offset on, so many bytes at most
    server → follower   name, offset, "", bytes       …as long as there is credit
    follower → server   [name, null, credit]          so many more
    server → follower   name, offset, key, ""         that was all; its hash must be the key
    follower → server   [name, -1, 0]                 no more
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from skymagic.wire import store
from skymagic.wire.store import Replicate

CHUNK_BYTES = 1 << 19
"""Bytes of one message."""
WINDOW_BYTES = 1 << 23
"""Bytes that a follower lets come before it has written them: its credit."""
HEARTBEAT_INTERVAL = 1.0
"""Seconds after which a server that has nothing to send says so, and a follower that it is still there."""
LONGEST_FRAME = CHUNK_BYTES + (1 << 16)
"""Bytes of a frame beyond which a connection is closed, before its sender is known too: of a handshake, a request or a piece."""
PEER_TIMEOUT = 5.0
"""Seconds without a message after which the other end counts as gone."""

ReadValue = Callable[[str, int, int], tuple[bytes, str]]
"""(name, offset, limit) → bytes, as many as are here; or no bytes and the key of a value that ends at the offset."""


class Wakeup:
    """Wakes a thread that polls: the self-pipe trick."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        """Wake the thread; may be called on any."""
        with contextlib.suppress(OSError):  # full: it will wake anyhow
            os.write(self._write, b"!")

    def clear(self) -> None:
        """The thread is awake."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass


@dataclass
class _Subscription:
    """What one follower gets of one value."""

    offset: int
    credit: int
    last_heard: float = field(default_factory=time.monotonic)


class PeerServer:
    """Sends values to the nodes that follow this one.

    Args:
        address: where it listens; on no other.
        public: the pool's key pair.
        secret: its other half.
        read: the bytes of a value from an offset on, as far as they are here.
    """

    def __init__(self, address: str, public: str, secret: str, read: ReadValue) -> None:
        self._read = read
        self._subscriptions: dict[tuple[bytes, str], _Subscription] = {}
        self._wakeup = Wakeup()
        context: Any = zmq.Context.instance()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _PoolKeyOnly(public))
        self._socket = context.socket(zmq.ROUTER)
        _secure(self._socket, public, secret)
        self._socket.curve_server = True
        self._socket.sndhwm = self._socket.rcvhwm = 0  # the followers' credit is the limit
        where = f"[{address}]" if ":" in address else address
        self._socket.ipv6 = ":" in address
        self.port = self._socket.bind_to_random_port(f"tcp://{where}", 49152, 65535)
        threading.Thread(target=self._serve, name="values-peer-server", daemon=True).start()

    def wake(self) -> None:
        """There is more to send."""
        self._wakeup.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.descriptor, zmq.POLLIN)
        beat = time.monotonic()
        while True:
            poller.poll(int(HEARTBEAT_INTERVAL * 1000))
            self._wakeup.clear()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._receive(*self._socket.recv_multipart(zmq.NOBLOCK))
            for (peer, name), subscription in list(self._subscriptions.items()):
                self._send(peer, name, subscription)
            if time.monotonic() - beat >= HEARTBEAT_INTERVAL:
                beat = time.monotonic()
                self._beat(beat)

    def _receive(self, peer: bytes, *frames: bytes) -> None:
        try:
            name, offset, credit = json.loads(frames[0])
            if not store.is_name(name):
                return
        except (ValueError, TypeError, IndexError):
            return
        if offset == -1:
            self._subscriptions.pop((peer, name), None)
        elif offset is not None:
            self._subscriptions[peer, name] = _Subscription(int(offset), int(credit))
        elif (subscription := self._subscriptions.get((peer, name))) is not None:
            subscription.credit += int(credit)
            subscription.last_heard = time.monotonic()

    def _send(self, peer: bytes, name: str, subscription: _Subscription) -> None:
        while subscription.credit > 0:
            try:
                data, key = self._read(name, subscription.offset, min(subscription.credit, CHUNK_BYTES))
            except OSError:  # it is being unlinked; the follower gets another order from the notebook
                return
            if not data and not key:
                return
            self._send_piece(peer, name, subscription.offset, key, data)
            subscription.offset += len(data)
            subscription.credit -= len(data)
            if key:
                self._subscriptions.pop((peer, name), None)
                return

    def _beat(self, now: float) -> None:
        for (peer, name), subscription in list(self._subscriptions.items()):
            if now - subscription.last_heard > 2 * PEER_TIMEOUT:
                del self._subscriptions[peer, name]
            else:
                self._send_piece(peer, name, subscription.offset)

    def _send_piece(self, peer: bytes, name: str, offset: int, key: str = "", data: bytes = b"") -> None:
        self._socket.send_multipart([peer, name.encode(), str(offset).encode(), key.encode(), data])


class Follower:
    """Gets values from other nodes, one after the other, on a thread of its own.

    Args:
        public: the pool's key pair.
        secret: its other half.
        write: takes a name and bytes of it, and returns how many are here; may raise OSError.
        complete: takes a name and the key that it should have; may raise OSError.
        fail: takes a name and why it did not come; an OSError of `write` or `complete`, or a TimeoutError.
    """

    def __init__(
        self,
        public: str,
        secret: str,
        write: Callable[[str, memoryview], int],
        complete: Callable[[str, str], None],
        fail: Callable[[str, OSError], None],
    ) -> None:
        self._keys = public, secret
        self._write, self._complete, self._fail = write, complete, fail
        self._orders: dict[str, Replicate] = {}
        self._lock = threading.Lock()
        self._wakeup = Wakeup()
        self._sockets: dict[tuple[str, int], Any] = {}
        threading.Thread(target=self._follow, name="values-follower", daemon=True).start()

    def follow(self, order: Replicate) -> None:
        """Get a value, or go on with it from another node."""
        with self._lock:
            self._orders[order.name] = order
        self._wakeup.set()

    def abandon(self, name: str) -> None:
        """Do not get it after all; twice is safe."""
        with self._lock:
            self._orders.pop(name, None)
        self._wakeup.set()

    def _follow(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.descriptor, zmq.POLLIN)
        while True:
            with self._lock:
                order = next(iter(self._orders.values()), None)
            if order is None:
                poller.poll()
                self._wakeup.clear()
                continue
            try:
                key = self._get(order)
                if key is not None:
                    self._complete(order.name, key)
                    self.abandon(order.name)
            except Exception as problem:
                if self._is_current(order):
                    self.abandon(order.name)
                    self._fail(order.name, problem if isinstance(problem, OSError) else OSError(str(problem)))

    def _is_current(self, order: Replicate) -> bool:
        with self._lock:
            return self._orders.get(order.name) is order

    def _yield(self, order: Replicate) -> bool:
        """Deadlock avoidance: put an order without progress behind the others, for its node may be waiting for this one."""
        with self._lock:
            if len(self._orders) < 2 or self._orders.get(order.name) is not order:
                return False
            self._orders[order.name] = self._orders.pop(order.name)
            return True

    def _get(self, order: Replicate) -> str | None:
        """Write what comes until the end, and return its key; None when the order changed or another goes first."""
        socket = self._socket(order.address, order.port)
        try:
            return self._pieces(order, socket)
        except TimeoutError:
            self._sockets.pop((order.address, order.port)).close(linger=0)
            raise
        finally:
            if not socket.closed:
                socket.send(json.dumps([order.name, -1, 0]).encode())

    def _pieces(self, order: Replicate, socket: Any) -> str | None:
        received = self._write(order.name, memoryview(b""))
        socket.send(json.dumps([order.name, received, WINDOW_BYTES]).encode())
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.descriptor, zmq.POLLIN)
        last_heard = last_progress = last_credit = time.monotonic()
        credit = 0
        while self._is_current(order):
            ready = dict(poller.poll(int(HEARTBEAT_INTERVAL * 1000)))
            self._wakeup.clear()
            now = time.monotonic()
            if socket in ready:
                name, offset, key, data = socket.recv_multipart(copy=True)
                if name.decode() != order.name or int(offset) != received:
                    continue  # a late piece of what was asked for before
                last_heard = now
                if data:
                    received, last_progress = self._write(order.name, memoryview(data)), now
                    credit += len(data)
                if key:
                    return str(key.decode())
            elif now - last_heard > PEER_TIMEOUT:
                raise TimeoutError(f"no word from {order.address}:{order.port}")
            if now - last_progress > 2 * HEARTBEAT_INTERVAL and self._yield(order):
                return None
            if credit >= WINDOW_BYTES // 4 or now - last_credit > HEARTBEAT_INTERVAL:
                socket.send(json.dumps([order.name, None, credit]).encode())
                credit, last_credit = 0, now
        return None

    def _socket(self, address: str, port: int) -> Any:
        socket = self._sockets.get((address, port))
        if socket is None:
            context: Any = zmq.Context.instance()
            socket = context.socket(zmq.DEALER)
            public, secret = self._keys
            _secure(socket, public, secret)
            socket.curve_serverkey = public.encode()
            socket.rcvhwm = socket.sndhwm = 0
            socket.linger = 0
            socket.ipv6 = ":" in address
            socket.connect(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
            self._sockets[address, port] = socket
        return socket


class _PoolKeyOnly:
    """Authenticates CURVE clients: those who have the pool's key alone."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator for each connection."""
        return key == self._public


def _secure(socket: Any, public: str, secret: str) -> None:
    socket.curve_publickey = public.encode()
    socket.curve_secretkey = secret.encode()
    socket.maxmsgsize = LONGEST_FRAME
    socket.linger = 0
