"""A rank's standard output and error: put back where a cell has broken them, for ipykernel answers nobody when it cannot flush."""

from __future__ import annotations

import os
import sys
from typing import TextIO

NAMES = {1: "stdout", 2: "stderr"}


def text_stream(fd: int) -> TextIO:
    """A stream that shows each line at once, and never raises over a character."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class Stdio:
    """Keeps the pipes that are behind descriptors 1 and 2 at the time it is made."""

    def __init__(self) -> None:
        self._pipes = {fd: os.dup(fd) for fd in NAMES}

    def restore(self) -> None:
        """Open what was closed; replace ``sys.stdout`` where it is None, closed, or cannot be flushed.

        A stream of the user's own that works stays, and so does a descriptor that leads elsewhere now.
        """
        for fd, name in NAMES.items():
            try:
                os.fstat(fd)
            except OSError:
                os.dup2(self._pipes[fd], fd)
            try:
                getattr(sys, name).flush()
            except Exception:
                setattr(sys, name, text_stream(fd))
