"""Bounded logs: the oldest part of a file is given back to the file system, and every position in it stays what it was.

A log has several writers (the agent; a rank, for what user code silences) and readers that know positions in it, so it is neither
renamed nor begun anew. Its beginning becomes a hole instead (``fallocate`` with FALLOC_FL_PUNCH_HOLE: ext4, xfs, btrfs, tmpfs, NFS 4.2).
Readers find where it ends by SEEK_DATA.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
BLOCK = 4096
"""A hole has whole blocks."""


def trim(fd: int, limit: int) -> bool:
    """Keep the last seven eighths of `limit` bytes of a file that is longer than `limit`; whether it is within its limit then."""
    length = os.fstat(fd).st_size - limit * 7 // 8
    begin, length = first(fd), length // BLOCK * BLOCK
    if os.fstat(fd).st_size - begin <= limit:
        return True
    if sys.platform != "linux":
        return False
    import ctypes  # only where a log has become that long

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, KEEP_SIZE | PUNCH_HOLE, 0, length) == 0)


def first(fd: int) -> int:
    """Where a file's data begins: behind the hole at its beginning, 0 where there is none."""
    here = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):  # an empty file, or a system that does not tell
        return 0
    finally:
        os.lseek(fd, here, os.SEEK_SET)


def begins(log: BinaryIO) -> int:
    """Where the first whole line of an open log begins; 0 of one that was never trimmed."""
    start = first(log.fileno())
    if start:
        log.seek(start)
        start += len(log.readline(1 << 20))
    return start
