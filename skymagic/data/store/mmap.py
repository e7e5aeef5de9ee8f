"""Files mapped privately: writable memory that is shared with nobody, and whose pages are shared until they are written."""

from __future__ import annotations

import _thread
import ctypes
import os
import weakref
from pathlib import Path

_MUCH = 1 << 26


def map_private(path: Path) -> memoryview:
    """A file's bytes as a writable private mapping, without a descriptor that stays open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(descriptor).st_size
        return _map(descriptor, nbytes) if nbytes else memoryview(bytearray())
    finally:
        os.close(descriptor)


# Before Python 3.13 a mmap object keeps a duplicate of the descriptor: a rank with a thousand arrays would run out.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_READ_WRITE = 3
_MAP_PRIVATE = 2


def _map(descriptor: int, nbytes: int) -> memoryview:
    address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def _unmap(address: int, nbytes: int) -> None:
    """Give memory back; much of it takes a while, for which nobody needs to wait."""
    if nbytes >= _MUCH:
        try:
            # Not threading.Thread: its locks may be held by whoever is interrupted by this finalizer.
            _thread.start_new_thread(_libc.munmap, (address, nbytes))
            return
        except RuntimeError:  # the interpreter is ending
            pass
    _libc.munmap(address, nbytes)
