"""Messages and files from a value server to the notebook.

Files are sent in pieces, which are deflated while the connection is the bottleneck.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from skymagic.wire.codec import write_all
from skymagic.wire.store import PIECE_BYTES, Read, ReadChunk, ReadReply, StoreMessage, encode

_MAX_QUEUED_PIECES = 4
"""Maximum number of pieces waiting to be written."""
_WORTHWHILE_RATIO = 0.9
"""A piece is sent deflated if that makes it shorter than this share of its size."""
_FAST_AFTER_PIECES = 16
"""Number of pieces after which a connection that was never busy counts as fast.

Until then, buffers along the path hide a slow one.
"""


class Sender:
    """Bounded send queue, written to a descriptor by a separate thread."""

    def __init__(self, descriptor: int, on_lost: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_lost = on_lost
        self._items: deque[tuple[bytes, bytes | None]] = deque()
        self._pieces = 0
        self._writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="values-sender", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether the queue is full, which leaves time to compress the next piece."""
        return self._pieces >= _MAX_QUEUED_PIECES

    def send(self, message: StoreMessage) -> None:
        """Queue a message without waiting."""
        with self._changed:
            self._items.append((encode(message), None))
            self._changed.notify_all()

    def send_piece(self, message: StoreMessage, data: bytes) -> None:
        """Queue a message and raw bytes; wait while the queue is full (back pressure)."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces < _MAX_QUEUED_PIECES)
            self._pieces += 1
            self._items.append((encode(message), data))
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the queue is empty, for at most a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._items and not self._writing, 1.0)

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._items)
                    line, data = self._items.popleft()
                    # taken from the queue but not sent yet: `close` must wait for it too
                    self._writing = True
                # without the lock: `send` must not wait for a slow connection
                write_all(self._descriptor, line)
                if data is not None:
                    write_all(self._descriptor, data)
                with self._changed:
                    self._writing = False
                    self._pieces -= data is not None
                    self._changed.notify_all()
        except OSError:
            self._on_lost()


class FileReader:
    """Thread that sends files one after the other."""

    def __init__(self, sender: Sender, find: Callable[[str], Path | None]) -> None:
        self._sender = sender
        self._find = find
        self._cancelled: set[int] = set()
        self._slow = False  # whether the connection was busy at the last conclusive measurement
        self._requests: queue.SimpleQueue[Read] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="values-reader", daemon=True).start()

    def read(self, request: Read) -> None:
        """Send a file."""
        self._requests.put(request)

    def cancel(self, number: int) -> None:
        """Cancel sending a file, or the rest of it."""
        self._cancelled.add(number)

    def _read(self) -> None:
        while True:
            request = self._requests.get()
            path = self._find(request.name)
            try:
                if path is None:
                    raise FileNotFoundError(request.name)
                with path.open("rb", buffering=0) as file:
                    self._send_file(request, file.fileno())
            except OSError:
                self._sender.send(ReadReply(request.number, -1))

    def _send_file(self, request: Read, descriptor: int) -> None:
        import xxhash

        self._sender.send(ReadReply(request.number, os.fstat(descriptor).st_size - request.offset))
        offset, count, busy = request.offset, 0, False
        while request.number not in self._cancelled and (
            data := os.pread(descriptor, PIECE_BYTES, offset)
        ):
            offset += len(data)
            count += 1
            busy = busy or self._sender.busy
            # the first pieces only fill buffers, so they cannot show that a connection is fast
            self._slow = busy or (self._slow and count < _FAST_AFTER_PIECES)
            sent = compressed_if_smaller(data) if self._slow else data
            check = xxhash.xxh3_64_hexdigest(data)
            self._sender.send_piece(
                ReadChunk(request.number, len(sent), sent is not data, check), sent
            )
        self._cancelled.discard(request.number)


def compressed_if_smaller(data: bytes) -> bytes:
    """Return the bytes deflated, or the same object if that is not worthwhile."""
    # an eighth of the data shows whether compressing all of it is worthwhile
    sample = data[: len(data) // 8]
    if len(zlib.compress(sample, 1)) > _WORTHWHILE_RATIO * len(sample):
        return data
    packed = zlib.compress(data, 1)
    return packed if len(packed) < _WORTHWHILE_RATIO * len(data) else data
