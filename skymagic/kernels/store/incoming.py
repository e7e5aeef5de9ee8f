"""Values in a node's store, including incomplete ones that other nodes read while they arrive."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from skymagic.content.store import STEP, Partial, available, make_overflow, overflow, private
from skymagic.wire.store import PIECE_BYTES, is_name

PREFIX = ".incoming-"


class StoreFolder:
    """Directories of a store, as the value server fills them.

    Raises:
        PermissionError: the directory belongs to another user or is open to others.
    """

    def __init__(self, directory: Path, share: float, hash: str) -> None:
        self.directory = directory
        self.share = share
        self.hash = hash
        private(directory)

    def room(self) -> int:
        """Return how many bytes still fit into the directory."""
        with os.scandir(self.directory) as entries:
            used = sum(_length(entry) for entry in entries)
        # a share of the memory that the store could have: the free memory and its own
        return int((available(self.directory) + used) * self.share) - used

    def overflow_folder(self) -> Path:
        """Return the overflow directory on disk, creating it on first use."""
        return make_overflow(self.directory)

    def find(self, name: str) -> Path | None:
        """Return the path of a file, or None if it does not exist."""
        for directory in (self.directory, overflow(self.directory)):
            if (directory / name).exists():
                return directory / name
        return None

    def names(self) -> list[str]:
        """Return the names of all complete values."""
        folders = filter(Path.is_dir, (self.directory, overflow(self.directory)))
        return [
            entry.name for folder in folders for entry in os.scandir(folder) if is_name(entry.name)
        ]

    def open(self, name: str) -> BinaryIO:
        """Open a file unbuffered. Raises FileNotFoundError."""
        return (self.find(name) or self.directory / name).open("rb", buffering=0)

    def drop(self, names: Iterable[str]) -> None:
        """Unlink files; existing memory maps stay valid."""
        for name in names:
            path = self.find(name)
            if path is not None:
                path.unlink(missing_ok=True)

    def remove_partials(self) -> None:
        """Unlink the incomplete files of a server that was killed."""
        for directory in (self.directory, overflow(self.directory)):
            for path in directory.glob(f"{PREFIX}*.part"):
                path.unlink(missing_ok=True)


def _length(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # deleted meanwhile
        return 0


class IncomingValue:
    """A value that is being written and may be read meanwhile.

    It is closed when it is complete or abandoned.
    """

    def __init__(
        self, folder: StoreFolder, name: str, nbytes: int, on_progress: Callable[[], None]
    ) -> None:
        self.name = name
        self.final: str | None = None  # the value's name in the store, once it is complete
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._open = True
        # a value that does not fit into the store goes to the overflow folder on disk
        first = folder.directory if nbytes <= folder.room() else folder.overflow_folder()
        self._partial = Partial(first, folder.overflow_folder, PREFIX, folder.hash)

    @property
    def received(self) -> int:
        """Number of bytes received so far."""
        return self._partial.nbytes

    def write(self, data: memoryview) -> None:
        """Append bytes, unless the value was abandoned meanwhile.

        Raises:
            OSError: the store is full.
        """
        with self._lock:
            if not self._open:
                return
            for start in range(0, len(data), STEP):
                self._partial.write(data[start : start + STEP])
        self._on_progress()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes from an offset on that were received so far."""
        with self._lock:
            return self._partial.read(offset, nbytes) if self._open else b""

    def seal(self, key: str) -> None:
        """Check the hash of a complete value, and give the file its final name.

        Raises:
            OSError: the value was abandoned, or its content does not match the key.
        """
        with self._lock:
            if not self._open:
                raise OSError(errno.ECANCELED, "it was given up")
            if (actual := self._partial.key()) != key:
                raise OSError(
                    errno.EBADMSG, f"it was damaged in transit: got {actual}, expected {key}"
                )
            self.final = file_name_of(self.name, key)
            self._partial.finish(self.final)
            self._end()
        self._on_progress()

    def close(self) -> None:
        """Abandon the value, unless it is complete; twice is safe."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._partial.__exit__()


def file_name_of(name: str, key: str) -> str:
    """Return the file name of a value whose content has this key."""
    return f"{name.partition('-')[0]}-{key}"


def read_slices(slices: Iterable[tuple[BinaryIO, int, int]]) -> Iterator[memoryview]:
    """Yield slices of files, given as (file, offset, length), one piece at a time."""
    for file, offset, nbytes in slices:
        file.seek(offset)
        while nbytes and (data := file.read(min(nbytes, PIECE_BYTES))):
            nbytes -= len(data)
            yield memoryview(data)
