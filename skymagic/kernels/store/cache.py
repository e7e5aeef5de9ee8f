"""Values that the user's pools have left on a machine, found again by their content."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from skymagic.data.store.store import LARGE, private
from skymagic.wire.transport import write_all

AGE = 30 * 86400.0
"""Seconds after which a value that no pool has asked for is removed."""
STEP = 1 << 20


def place() -> Path:
    """Where they lie: in the user's home, for the user alone."""
    return Path.home() / ".skymagic" / "values"


class Cellar:
    """A folder of values, each under its xxh3-128; the ones that were asked for longest ago go first.

    Nothing here is promised: a folder that cannot be written keeps nothing, and says nothing.

    Args:
        folder: made when it is needed first.
        limit: bytes that all values together may fill.
        after: seconds that a value must have lain in the store to be worth keeping.
    """

    def __init__(self, folder: Path, limit: int, after: float) -> None:
        self._folder = folder
        self._limit = limit
        self._after = after
        self._waiting: queue.SimpleQueue[tuple[float, str, Callable[[], Path | None]]] = queue.SimpleQueue()
        threading.Thread(target=self._store, name="depot-cellar", daemon=True).start()

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

    def keep(self, key: str, nbytes: int, source: Callable[[], Path | None]) -> None:
        """Keep a value for later pools, if it is worth it; `source` says where it lies then, None when it has gone."""
        if LARGE <= nbytes <= self._limit:
            self._waiting.put((time.monotonic() + self._after, key, source))

    def forget(self, key: str) -> None:
        """A value is not what it should be."""
        (self._folder / key).unlink(missing_ok=True)

    def _store(self) -> None:
        while True:
            when, key, source = self._waiting.get()
            time.sleep(max(0.0, when - time.monotonic()))
            path = source()
            if path is not None:
                with contextlib.suppress(OSError):
                    self._copy(path, key)

    def _copy(self, source: Path, key: str) -> None:
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private(self._folder)
        if (self._folder / key).exists():
            return
        self._make_room(source.stat().st_size)
        part = self._folder / f"{secrets.token_hex(16)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for data in pieces(source):
                write_all(descriptor, data)
            part.rename(self._folder / key)
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        """Remove what is too old, and then the oldest until the value fits."""
        files = sorted(
            (status.st_mtime, status.st_size, path)
            for path in self._folder.iterdir()
            for status in [path.stat()]
        )
        size = sum(length for _, length, _ in files)
        for used, length, path in files:
            if size + nbytes > self._limit or used < time.time() - AGE:
                path.unlink(missing_ok=True)
                size -= length


def pieces(path: Path) -> Iterator[memoryview]:
    """A file's bytes, one piece at a time."""
    with path.open("rb", buffering=0) as file:
        while data := file.read(STEP):
            yield memoryview(data)
