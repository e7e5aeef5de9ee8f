"""What a depot says to the notebook: messages at once, files in pieces that are deflated while the line is busy."""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from skymagic.wire.store import Message, Read, ReadChunk, ReadReply, encode
from skymagic.wire.transport import write_all

PIECE = 1 << 19
"""Bytes of a file that are sent at a time."""
_WAITING = 4
"""Pieces that may wait for the line."""
_WORTH = 0.9
"""A piece is sent deflated when it becomes shorter than this part of itself."""
_REST = 16
"""Pieces after one that was not worth it that are not tried."""
_ENOUGH = 16
"""Pieces after which a line that was never busy is a fast one: what is on the way hides a slow one until then."""


class Outlet:
    """Writes to a descriptor, on a thread of its own.

    Args:
        descriptor: where the notebook listens.
        gone: called once when nobody listens any more.
    """

    def __init__(self, descriptor: int, gone: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._gone = gone
        self._items: deque[tuple[bytes, bytes | None]] = deque()
        self._pieces = 0
        self._writing = False
        self._news = threading.Condition()
        threading.Thread(target=self._write, name="depot-outlet", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether pieces wait for the line: there is time to make the next one shorter."""
        return self._pieces >= _WAITING

    def say(self, message: Message) -> None:
        """A message; does not wait."""
        with self._news:
            self._items.append((encode(message), None))
            self._news.notify_all()

    def piece(self, message: Message, data: bytes) -> None:
        """A message and raw bytes; waits while many are waiting."""
        with self._news:
            self._news.wait_for(lambda: self._pieces < _WAITING)
            self._pieces += 1
            self._items.append((encode(message), data))
            self._news.notify_all()

    def close(self, patience: float = 1.0) -> None:
        """Let what was said go out, as far as somebody listens."""
        with self._news:
            self._news.wait_for(lambda: not self._items and not self._writing, patience)

    def _write(self) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._items)
                    line, data = self._items.popleft()
                    self._writing = True
                write_all(self._descriptor, line)
                if data is not None:
                    write_all(self._descriptor, data)
                with self._news:
                    self._writing = False
                    self._pieces -= data is not None
                    self._news.notify_all()
        except OSError:
            self._gone()


class Reading:
    """Sends files, one after the other, on a thread of its own.

    Args:
        outlet: where they go.
        find: where the file of a name lies; None when there is none.
    """

    def __init__(self, outlet: Outlet, find: Callable[[str], Path | None]) -> None:
        self._outlet = outlet
        self._find = find
        self._stopped: set[int] = set()
        self._slow = False
        """Whether the line was busy when last it could be told."""
        self._orders: queue.SimpleQueue[Read] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="depot-reading", daemon=True).start()

    def read(self, order: Read) -> None:
        """Send a file."""
        self._orders.put(order)

    def stop(self, number: int) -> None:
        """Do not send it, or not the rest of it."""
        self._stopped.add(number)

    def _read(self) -> None:
        while True:
            order = self._orders.get()
            path = self._find(order.name)
            try:
                if path is None:
                    raise FileNotFoundError(order.name)
                with path.open("rb", buffering=0) as file:
                    self._send(order, file.fileno())
            except OSError:
                self._outlet.say(ReadReply(order.number, -1))

    def _send(self, order: Read, descriptor: int) -> None:
        import xxhash

        self._outlet.say(ReadReply(order.number, os.fstat(descriptor).st_size - order.offset))
        offset, rest, count, busy = order.offset, 0, 0, False
        while order.number not in self._stopped and (data := os.pread(descriptor, PIECE, offset)):
            offset += len(data)
            count += 1
            busy = busy or self._outlet.busy
            self._slow = busy or (self._slow and count < _ENOUGH)
            rest = max(0, rest - 1)
            sent = deflated(data) if self._slow and not rest else data
            if self._slow and not rest and sent is data:
                rest = _REST
            check = xxhash.xxh3_64_hexdigest(data)
            self._outlet.piece(ReadChunk(order.number, len(sent), sent is not data, check), sent)
        self._stopped.discard(order.number)


def deflated(data: bytes) -> bytes:
    """The bytes deflated, or the very same object where that is not worth it."""
    sample = data[: len(data) // 8]
    if len(zlib.compress(sample, 1)) > _WORTH * len(sample):
        return data
    packed = zlib.compress(data, 1)
    return packed if len(packed) < _WORTH * len(data) else data
