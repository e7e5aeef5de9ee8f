"""Values on their way into a node's store, which other nodes may read as far as they have come."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from skymagic.data.store.store import available, overflow, private
from skymagic.data.store.writer import STEP, Partial

_PREFIX = ".depot-"


class Ground:
    """A store's directories, as a depot fills them.

    Args:
        directory: the store's; made when it does not exist.
        share: the part of the free space that may be filled, 0 to 1.

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

    def place(self, nbytes: int) -> Path:
        """The directory that a file of this size goes to."""
        return self.directory if nbytes <= self.room() else self.spill()

    def spill(self) -> Path:
        """The directory on disk, made when it is needed first."""
        directory = overflow(self.directory)
        private(directory)
        return directory

    def find(self, name: str) -> Path | None:
        """Where the file of that name lies."""
        for directory in (self.directory, overflow(self.directory)):
            if (directory / name).exists():
                return directory / name
        return None

    def drop(self, names: Iterable[str]) -> None:
        """Unlink files; what is mapped stays mapped."""
        for name in names:
            path = self.find(name)
            if path is not None:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or files are left in it
            overflow(self.directory).rmdir()

    def clear(self) -> None:
        """Unlink what a depot that was killed has left half done."""
        for directory in (self.directory, overflow(self.directory)):
            for path in directory.glob(f"{_PREFIX}*.part"):
                path.unlink(missing_ok=True)


def _length(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # gone meanwhile
        return 0


class Arrival:
    """A value that is being written; closed when it has landed or is given up.

    Args:
        ground: where it goes.
        name: the file's name, unless its content turns out to be another.
        nbytes: how long it will be.
        news: called when more of it has come.
    """

    def __init__(self, ground: Ground, name: str, nbytes: int, news: Callable[[], None]) -> None:
        self.name = name
        self.final: str | None = None
        """Its name in the store, once it has landed."""
        self._ground = ground
        self._news = news
        self._lock = threading.Lock()
        self._open = True
        self._partial = Partial(ground.place(nbytes), ground.spill, _PREFIX)

    @property
    def come(self) -> int:
        """Bytes that are here."""
        return self._partial.nbytes

    def write(self, data: memoryview) -> None:
        """Append bytes; nothing happens when it was given up meanwhile.

        Raises:
            OSError: there is no room.
        """
        with self._lock:
            if not self._open:
                return
            for start in range(0, len(data), STEP):
                self._partial.write(data[start : start + STEP])
        self._news()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from an offset on, as far as they are here."""
        with self._lock:
            return self._partial.read(offset, nbytes) if self._open else b""

    def seal(self, key: str) -> None:
        """It is complete: give the file its name.

        Raises:
            OSError: it was given up, or its content is not what the key says.
        """
        with self._lock:
            if not self._open:
                raise OSError(errno.ECANCELED, "it was given up")
            if (found := self._partial.key()) != key:
                raise OSError(errno.EBADMSG, f"it was damaged on its way: {found} came, {key} was sent")
            self.final = renamed(self.name, key)
            self._partial.finish(self.final)
            self._end()
        self._news()

    def close(self) -> None:
        """Give it up, unless it has landed; twice is safe."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._partial.__exit__()


def renamed(name: str, key: str) -> str:
    """The name of a file whose content has this key."""
    return f"{name.partition('-')[0]}-{key}"
