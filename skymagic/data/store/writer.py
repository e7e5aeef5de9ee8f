"""A file that is being written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

STEP = 1 << 18
"""Bytes copied, hashed and written at a time: small enough to stay in the processor's cache, where hashing is free."""


class Partial:
    """A file that has no name to be found by until it is complete; hashed as it is written.

    Args:
        directory: where it goes.
        spill: makes another directory when this one is full.
        prefix: of its name until then, for those who look for what was left.
    """

    def __init__(self, directory: Path, spill: Callable[[], Path], prefix: str = "") -> None:
        import xxhash

        self._prefix = prefix
        self.nbytes = 0
        self._spill: Callable[[], Path] | None = spill
        self._hash = xxhash.xxh3_128()
        self._scratch = memoryview(bytearray(STEP))
        self._open(directory)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def write(self, view: memoryview) -> None:
        """Append at most STEP bytes."""
        # The copy is what makes hash and file agree while other threads write to the value.
        copy = self._scratch[: view.nbytes]
        copy[:] = view
        self._hash.update(copy)
        self.nbytes += copy.nbytes
        while copy:
            try:
                copy = copy[os.write(self._descriptor, copy) :]
            except OSError as problem:
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT) or self._spill is None:
                    raise
                self._move(self._spill())

    def key(self) -> str:
        """The hash of what was written so far."""
        return str(self._hash.hexdigest())

    def read(self, offset: int, nbytes: int) -> bytes:
        """What was written, from an offset on."""
        return os.pread(self._descriptor, nbytes, offset)

    def finish(self, name: str) -> None:
        """Give the file its name."""
        self._path.rename(self._path.with_name(name))

    def _open(self, directory: Path) -> None:
        self._path = directory / f"{self._prefix}{os.urandom(16).hex()}.part"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _move(self, directory: Path) -> None:
        """Go on in another directory, with what there is."""
        descriptor, path = self._descriptor, self._path
        self._spill = None
        try:
            self._open(directory)
            size, done = os.fstat(descriptor).st_size, 0
            while done < size:
                done += os.sendfile(self._descriptor, descriptor, done, size - done)
        finally:
            os.close(descriptor)
            path.unlink()
