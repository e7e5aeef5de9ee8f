"""A rank's standard output and error as Python code writes them: in one order."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from skymagic.kernels.rank.shell import text_stream
from skymagic.wire.streams import MOST, frame


class StderrWriter(io.RawIOBase):
    """Standard error of Python code, as frames in the pipe of standard output: what is written to both reaches the agent in its order.

    Where descriptor 2 leads elsewhere, as while a cell is silenced, or the pipe was closed, text goes to descriptor 2.
    """

    name, mode = "<stderr>", "wb"

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._pipe = os.dup(1)
        self._places = [(fd, _place(fd)) for fd in (2, self._pipe)]

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """For child processes and C libraries, which know nothing of frames."""
        return 2

    def write(self, text: bytes | bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer
        """Write some of it, and say how much."""
        piece = memoryview(text)[:MOST]
        if any(_place(fd) != place for fd, place in self._places):
            return os.write(2, piece)
        with contextlib.suppress(Exception):  # a line of standard output that has no end yet comes first
            self._output.flush()
        os.write(self._pipe, frame(piece))
        return len(piece)


def open_streams() -> None:
    """Make Python's own streams of descriptors 1 and 2."""
    sys.stdout = text_stream(1)
    writer: io.RawIOBase = StderrWriter(sys.stdout)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(writer), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _place(fd: int) -> tuple[int, int] | None:
    """What a descriptor leads to; None where it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
