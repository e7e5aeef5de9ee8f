"""Progress as plain text, where a display cannot be replaced.

A terminal redraws its last line, and other text is written above it. A terminal without a cursor
(``TERM=dumb``, as in Emacs) and front ends that ignore updates of displays (qtconsole, Jupyter's
console) get lines, at most `LINES_PER_MINUTE`, because each of them stays.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINES_PER_MINUTE = 10
"""Maximum number of progress lines printed in a minute, by all runs of this process together."""


class PrintedLines:
    """Progress lines below each other, with a pause between them.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = float("-inf")

    @property
    def pause(self) -> float:
        """Seconds between two lines, and before the first line of a run."""
        return 60 / LINES_PER_MINUTE

    @property
    def due(self) -> bool:
        """True if the next line may be printed."""
        return self._clock() >= self._next

    def show(self, stream: Any, text: str) -> None:
        """Print a line."""
        self._next = self._clock() + self.pause
        stream.write(f"{text}\n")
        stream.flush()


class LastLine:
    """The line below all other text of a terminal, redrawn in place.

    It is not shown behind an unfinished line, such as a bar that a rank draws. Spaces erase it: not
    every terminal has a control sequence for that.
    """

    pause = 0.0
    due = True

    def __init__(self) -> None:
        self._text = ""
        self._stream: Any = None
        """The terminal that shows it."""
        self._unfinished = False
        """True if the last text that was written above did not end its line."""
        self._lock = threading.RLock()

    def show(self, stream: Any, text: str) -> None:
        """Show this text in place of the previous one, cut to the terminal's width."""
        with self._lock:
            if self._unfinished:
                return
            shown = text[: shutil.get_terminal_size().columns - 1]
            stream.write(f"\r{shown.ljust(len(self._text))}")
            stream.flush()
            self._text, self._stream = shown, stream

    def erase(self) -> None:
        """Remove the line. Safe to call twice."""
        with self._lock:
            if self._text:
                self._stream.write(f"\r{' ' * len(self._text)}\r")
                self._stream.flush()
            self._text = ""

    @contextmanager
    def above(self, stream: Any, text: str) -> Iterator[None]:
        """Erase the line while the caller writes `text`, and show it again below.

        Does nothing if the text goes elsewhere, such as standard output into a file.
        """
        if not is_terminal(stream):
            yield
            return
        with self._lock:
            line = self._text
            self.erase()
            yield
            self._unfinished = not text.endswith("\n")
            if line:  # at once: after half a second it would flicker with each line of output
                self.show(self._stream, line)

    def begin(self) -> None:
        """Forget text of earlier cells: the cursor is at the beginning of a line."""
        with self._lock:
            self._unfinished = False


def is_terminal(stream: Any) -> bool:
    """Return True if the stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (
        AttributeError,
        ValueError,
    ):  # a user's own object in place of a stream, or a closed one
        return False


def redraws_last_line(stream: Any) -> bool:
    """Return True if the stream is a terminal with a cursor."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")


printed_lines = PrintedLines()
last_line = LastLine()
