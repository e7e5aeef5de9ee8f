"""Values from node to node: each depot serves what it has, as it arrives, and follows others.

The sockets speak CURVE: whoever has not got the pool's key pair can neither connect nor listen in.
A follower asks for a value from an offset on and grants credit, in bytes; the server sends as much as has come, each
piece with its offset. Asking: ``[name, offset, credit]``; more credit: ``[name, null, credit]``; no more: ``[name, -1, 0]``.
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

CHUNK = 1 << 19
"""Bytes of one message."""
WINDOW = 1 << 23
"""Bytes that a follower lets come before it has written them."""
BEAT = 1.0
"""Seconds after which a server that has nothing to send says so, and a follower that it is still there."""
SILENCE = 5.0
"""Seconds without a word after which the other end is taken for gone."""

Supply = Callable[[str, int, int], tuple[bytes, str]]
"""(name, offset, limit) → bytes, as many as are here; or no bytes and the key of a value that ends at the offset."""


class Alarm:
    """Wakes a thread that polls."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        """Wake it."""
        with contextlib.suppress(OSError):  # full: it will wake anyhow
            os.write(self._write, b"!")

    def clear(self) -> None:
        """It is awake."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass


@dataclass
class _Reader:
    """What one follower wants."""

    offset: int
    credit: int
    heard: float = field(default_factory=time.monotonic)


class Server:
    """Sends values to the nodes that follow this one.

    Args:
        address: where it listens; on no other.
        public: the pool's key pair.
        secret: its other half.
        supply: what there is.
    """

    def __init__(self, address: str, public: str, secret: str, supply: Supply) -> None:
        self._supply = supply
        self._readers: dict[tuple[bytes, str], _Reader] = {}
        self._alarm = Alarm()
        context: Any = zmq.Context.instance()
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback("*", _OnlyPool(public))
        self._socket = context.socket(zmq.ROUTER)
        _secure(self._socket, public, secret)
        self._socket.curve_server = True
        self._socket.sndhwm = self._socket.rcvhwm = 0  # the followers' credit is the limit
        where = f"[{address}]" if ":" in address else address
        self._socket.ipv6 = ":" in address
        self.port = self._socket.bind_to_random_port(f"tcp://{where}", 49152, 65535)
        threading.Thread(target=self._serve, name="depot-server", daemon=True).start()

    def news(self) -> None:
        """There is more to send."""
        self._alarm.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._alarm.descriptor, zmq.POLLIN)
        beat = time.monotonic()
        while True:
            poller.poll(int(BEAT * 1000))
            self._alarm.clear()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._hear(*self._socket.recv_multipart(zmq.NOBLOCK))
            for (who, name), reader in list(self._readers.items()):
                self._send(who, name, reader)
            if time.monotonic() - beat >= BEAT:
                beat = time.monotonic()
                self._beat(beat)

    def _hear(self, who: bytes, *frames: bytes) -> None:
        try:
            name, offset, credit = json.loads(frames[0])
            if not store.is_name(name):
                return
        except (ValueError, TypeError, IndexError):
            return
        if offset == -1:
            self._readers.pop((who, name), None)
        elif offset is not None:
            self._readers[who, name] = _Reader(int(offset), int(credit))
        elif (reader := self._readers.get((who, name))) is not None:
            reader.credit += int(credit)
            reader.heard = time.monotonic()

    def _send(self, who: bytes, name: str, reader: _Reader) -> None:
        while reader.credit > 0:
            try:
                data, key = self._supply(name, reader.offset, min(reader.credit, CHUNK))
            except OSError:  # it is being unlinked; whoever asked will be told by the notebook
                return
            if not data and not key:
                return
            self._say(who, name, reader.offset, key, data)
            reader.offset += len(data)
            reader.credit -= len(data)
            if key:
                self._readers.pop((who, name), None)
                return

    def _beat(self, now: float) -> None:
        for (who, name), reader in list(self._readers.items()):
            if now - reader.heard > 2 * SILENCE:
                del self._readers[who, name]
            else:
                self._say(who, name, reader.offset)

    def _say(self, who: bytes, name: str, offset: int, key: str = "", data: bytes = b"") -> None:
        self._socket.send_multipart([who, name.encode(), str(offset).encode(), key.encode(), data])


class Follower:
    """Gets values from other nodes, one after the other, on a thread of its own.

    Args:
        public: the pool's key pair.
        secret: its other half.
        write: takes a name and bytes of it, and says how many are here; may raise OSError.
        land: takes a name and the key that it should have; may raise OSError.
        fail: takes a name and why it did not come; an OSError of `write` or `land`, or a TimeoutError.
    """

    def __init__(
        self,
        public: str,
        secret: str,
        write: Callable[[str, memoryview], int],
        land: Callable[[str, str], None],
        fail: Callable[[str, OSError], None],
    ) -> None:
        self._keys = public, secret
        self._write, self._land, self._fail = write, land, fail
        self._orders: dict[str, Replicate] = {}
        self._lock = threading.Lock()
        self._alarm = Alarm()
        self._sockets: dict[tuple[str, int], Any] = {}
        threading.Thread(target=self._follow, name="depot-follower", daemon=True).start()

    def follow(self, order: Replicate) -> None:
        """Get a value, or go on with it from another node."""
        with self._lock:
            self._orders[order.name] = order
        self._alarm.set()

    def abandon(self, name: str) -> None:
        """Do not get it after all; twice is safe."""
        with self._lock:
            self._orders.pop(name, None)
        self._alarm.set()

    def _follow(self) -> None:
        poller = zmq.Poller()
        poller.register(self._alarm.descriptor, zmq.POLLIN)
        while True:
            with self._lock:
                order = next(iter(self._orders.values()), None)
            if order is None:
                poller.poll()
                self._alarm.clear()
                continue
            try:
                key = self._get(order)
                if key is not None:
                    self._land(order.name, key)
                    self.abandon(order.name)
            except Exception as problem:
                if self._stands(order):
                    self.abandon(order.name)
                    self._fail(order.name, problem if isinstance(problem, OSError) else OSError(str(problem)))

    def _stands(self, order: Replicate) -> bool:
        with self._lock:
            return self._orders.get(order.name) is order

    def _gives_way(self, order: Replicate) -> bool:
        """Put an order that does not move behind the others: it may wait for a node that waits for this one."""
        with self._lock:
            if len(self._orders) < 2 or self._orders.get(order.name) is not order:
                return False
            self._orders[order.name] = self._orders.pop(order.name)
            return True

    def _get(self, order: Replicate) -> str | None:
        """Write what comes until the end, and say its key; None when the order changed or gave way."""
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
        come = self._write(order.name, memoryview(b""))
        socket.send(json.dumps([order.name, come, WINDOW]).encode())
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._alarm.descriptor, zmq.POLLIN)
        heard = moved = said = time.monotonic()
        owed = 0
        while self._stands(order):
            ready = dict(poller.poll(int(BEAT * 1000)))
            self._alarm.clear()
            now = time.monotonic()
            if socket in ready:
                name, offset, key, data = socket.recv_multipart(copy=True)
                if name.decode() != order.name or int(offset) != come:
                    continue  # of what was asked for before
                heard = now
                if data:
                    come, moved = self._write(order.name, memoryview(data)), now
                    owed += len(data)
                if key:
                    return str(key.decode())
            elif now - heard > SILENCE:
                raise TimeoutError(f"no word from {order.address}:{order.port}")
            if now - moved > 2 * BEAT and self._gives_way(order):
                return None
            if owed >= WINDOW // 4 or now - said > BEAT:
                socket.send(json.dumps([order.name, None, owed]).encode())
                owed, said = 0, now
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


class _OnlyPool:
    """Lets in those who have the pool's key."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator for each connection."""
        return key == self._public


def _secure(socket: Any, public: str, secret: str) -> None:
    socket.curve_publickey = public.encode()
    socket.curve_secretkey = secret.encode()
    socket.linger = 0
