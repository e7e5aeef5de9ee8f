"""Memory maps of files: as maps of the same file where the other side sees it, else as arrays of their contents."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skymagic.data.values.rebuild import here


@contextlib.contextmanager
def to_processes(*, same_files: bool) -> Iterator[None]:
    """Within: what is pickled goes to processes that see the same files, or not."""
    before, here.same_files = here.same_files, same_files
    try:
        yield
    finally:
        here.same_files = before


_MODES = {"r": "r", "r+": "r+", "w+": "r+"}
"""A map's mode, and that of another map of the same file; what was written copy-on-write is in no file."""


def reduce_map(array: Any) -> tuple[Any, ...] | None:
    """How a ``numpy.memmap`` is mapped again by a process that sees the same files; None where its contents have to travel."""
    if not here.same_files or array.mode not in _MODES or not isinstance(array.base, mmap.mmap):
        return None
    try:
        found = Path(array.filename).stat()
    except (OSError, TypeError):  # it has been deleted, or never had a name
        return None
    order = "C" if array.flags.c_contiguous else "F"
    where = (os.fspath(array.filename), found.st_dev, found.st_ino)
    return again, (*where, array.dtype, _MODES[array.mode], array.offset, array.shape, order)


def again(
    path: str, device: int, inode: int, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any
) -> Any:
    """Map a file.

    Raises:
        FileNotFoundError: it is not there, or is another one by now.
    """
    import numpy

    found = Path(path).stat()
    if (found.st_dev, found.st_ino) != (device, inode):
        raise FileNotFoundError(f"{path} was mapped into memory in the notebook, and is another file now")
    return numpy.memmap(path, dtype=dtype, mode=mode, offset=offset, shape=shape, order=order)


def is_map(value: object) -> bool:
    """Whether a value is a memory map of a file; numpy is not imported for it."""
    return type(value).__name__ == "memmap" and isinstance(getattr(value, "base", None), mmap.mmap)


def why_as_array(value: object) -> str:
    """Why a map of a file arrives as an array, where its user may not expect that; "" where it does not, or is none."""
    if not is_map(value):
        return ""
    path = getattr(value, "filename", None) or "a file"
    if not here.same_files:
        return f"it maps {path}, which is on this machine"
    mode = getattr(value, "mode", None)
    return "" if mode not in _MODES or reduce_map(value) else f"it maps {path}, which is not there any more"
