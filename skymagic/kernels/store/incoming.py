"""Values in a node's store: on their way in, which other nodes may read as far as they have come, and kept on disk for later pools."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from skymagic.data.store.store import LARGE, STEP, Partial, available, make_overflow, overflow, private
from skymagic.wire import atomic
from skymagic.wire.codec import write_all
from skymagic.wire.store import PIECE_BYTES

_PREFIX = ".incoming-"


class StoreFolder:
    """A store's directories, as the value server fills them.

    Raises:
        PermissionError: the directory belongs to another user or is open to others.
    """

    def __init__(self, directory: Path, share: float) -> None:
        self.directory = directory
        self.share = share
        private(directory)

    def room(self) -> int:
        """Bytes that still fit into the directory."""
        with os.scandir(self.directory) as entries:
            ours = sum(_length(entry) for entry in entries)
        return int((available(self.directory) + ours) * self.share) - ours

    def folder_for(self, nbytes: int) -> Path:
        """The directory that a file of this size goes to."""
        return self.directory if nbytes <= self.room() else self.overflow_folder()

    def overflow_folder(self) -> Path:
        """The directory on disk, made when it is needed first."""
        return make_overflow(self.directory)

    def find(self, name: str) -> Path | None:
        """Where the file of that name lies."""
        for directory in (self.directory, overflow(self.directory)):
            if (directory / name).exists():
                return directory / name
        return None

    def open(self, name: str) -> BinaryIO:
        """The file of that name, unbuffered. Raises FileNotFoundError."""
        return (self.find(name) or self.directory / name).open("rb", buffering=0)

    def drop(self, names: Iterable[str]) -> None:
        """Unlink files; what is mapped stays mapped."""
        for name in names:
            path = self.find(name)
            if path is not None:
                path.unlink(missing_ok=True)

    def remove_partials(self) -> None:
        """Unlink the incomplete files of a server that was killed."""
        for directory in (self.directory, overflow(self.directory)):
            for path in directory.glob(f"{_PREFIX}*.part"):
                path.unlink(missing_ok=True)


def _length(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # gone meanwhile
        return 0


class IncomingValue:
    """A value that is being written, and may be read meanwhile; closed when it is complete or abandoned."""

    def __init__(self, folder: StoreFolder, name: str, nbytes: int, on_progress: Callable[[], None]) -> None:
        self.name = name
        self.final: str | None = None
        """The value's name in the store, once it is complete."""
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._open = True
        self._partial = Partial(folder.folder_for(nbytes), folder.overflow_folder, _PREFIX)

    @property
    def received(self) -> int:
        """Bytes that are here."""
        return self._partial.nbytes

    def write(self, data: memoryview) -> None:
        """Append bytes; nothing happens when it was abandoned meanwhile.

        Raises:
            OSError: there is no room.
        """
        with self._lock:
            if not self._open:
                return
            for start in range(0, len(data), STEP):
                self._partial.write(data[start : start + STEP])
        self._on_progress()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from an offset on, as far as they are here."""
        with self._lock:
            return self._partial.read(offset, nbytes) if self._open else b""

    def seal(self, key: str) -> None:
        """Check the hash of a complete value, and give the file its name.

        Raises:
            OSError: it was abandoned, or its content is not what the key says.
        """
        with self._lock:
            if not self._open:
                raise OSError(errno.ECANCELED, "it was given up")
            if (found := self._partial.key()) != key:
                raise OSError(errno.EBADMSG, f"it was damaged in transit: got {found}, expected {key}")
            self.final = renamed(self.name, key)
            self._partial.finish(self.final)
            self._end()
        self._on_progress()

    def close(self) -> None:
        """Abandon it, unless it is complete; twice is safe."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._partial.__exit__()


def renamed(name: str, key: str) -> str:
    """The name of a file whose content has this key."""
    return f"{name.partition('-')[0]}-{key}"


# -- an LRU cache on disk, for the user's later pools ----------------------------------------------


MAX_AGE = 30 * 86400.0
"""Seconds after which a value that no pool has asked for is removed."""


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
