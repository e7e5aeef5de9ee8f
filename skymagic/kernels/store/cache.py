"""An LRU cache on disk: values that the user's pools have left on a machine, found again by their content."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from skymagic.data.store.store import LARGE, private
from skymagic.wire import atomic
from skymagic.wire.codec import write_all

MAX_AGE = 30 * 86400.0
"""Seconds after which a value that no pool has asked for is removed."""
PIECE_BYTES = 1 << 20


def cache_folder() -> Path:
    """Where the values are: in the user's home, for the user alone."""
    return Path.home() / ".skymagic" / "values"


class ValueCache:
    """A folder of values, each under its xxh3-128; the least recently used go first.

    Best effort: a folder that cannot be written keeps nothing, without a message. What is too old goes at the start.

    Args:
        folder: made when it is needed first.
        limit: bytes that all values together may fill.
        min_age: seconds that a value must have lain in the store to be worth keeping.
    """

    def __init__(self, folder: Path, limit: int, min_age: float) -> None:
        self._folder = folder
        self._limit = limit
        self._min_age = min_age
        self._queue: queue.SimpleQueue[tuple[float, str, Callable[[], Path | None]]] = queue.SimpleQueue()
        threading.Thread(target=self._store, name="values-cache", daemon=True).start()

    def find(self, key: str, nbytes: int) -> Path | None:
        """The file of a value; None when there is none of this length."""
        path = self._folder / key
        try:
            private(self._folder)
            if path.stat().st_size != nbytes:
                return None
            os.utime(path)
        except OSError:
            return None
        return path

    def add(self, key: str, nbytes: int, source: Callable[[], Path | None]) -> None:
        """Keep a value for later pools, if it is worth it; `source` returns where it is then, None when it has gone."""
        if LARGE <= nbytes <= self._limit:
            self._queue.put((time.monotonic() + self._min_age, key, source))

    def remove(self, key: str) -> None:
        """Unlink a value whose content is not what its key says."""
        (self._folder / key).unlink(missing_ok=True)

    def _store(self) -> None:
        with contextlib.suppress(OSError):
            if self._folder.exists():
                private(self._folder)
                self._make_room(0)
        while True:
            when, key, source = self._queue.get()
            time.sleep(max(0.0, when - time.monotonic()))
            path = source()
            if path is not None:
                with contextlib.suppress(OSError):
                    self._copy(path, key)

    def _copy(self, source: Path, key: str) -> None:
        atomic.private_folder(self._folder.parent)
        private(self._folder)
        if (self._folder / key).exists():
            return
        self._make_room(source.stat().st_size)
        part = self._folder / f"{secrets.token_hex(16)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for data in read_pieces(source):
                write_all(descriptor, data)
            part.rename(self._folder / key)
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        """Remove what is too old, and then the oldest until the value fits."""
        files = sorted(
            (status.st_mtime, status.st_size, path) for path in self._folder.iterdir() for status in [path.stat()]
        )
        size = sum(length for _, length, _ in files)
        for used, length, path in files:
            if size + nbytes > self._limit or used < time.time() - MAX_AGE:
                path.unlink(missing_ok=True)
                size -= length


def read_pieces(path: Path) -> Iterator[memoryview]:
    """A file's bytes, one piece at a time."""
    with path.open("rb", buffering=0) as file:
        while data := file.read(PIECE_BYTES):
            yield memoryview(data)


def read_slices(slices: Iterable[tuple[BinaryIO, int, int]]) -> Iterator[memoryview]:
    """Bytes of files, each from an offset on and of a length, one piece at a time."""
    for file, offset, nbytes in slices:
        file.seek(offset)
        while nbytes and (data := file.read(min(nbytes, PIECE_BYTES))):
            nbytes -= len(data)
            yield memoryview(data)
