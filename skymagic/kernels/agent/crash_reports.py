"""Python's reports of crashes, on their way to the screen.

Python's faulthandler writes up to a hundred frames of a process that crashes to standard error. All
of them go to the rank's log; the cell shows the first line and the frames of the user's own code.
"""

from __future__ import annotations

import re

from skymagic.data.capture.numbering import CELL_FILE
from skymagic.kernels.stacks import FRAME, is_internal, is_library

BEGIN = b"Fatal Python error: "
"""Begins a report. It is written in one piece, so that no read of the pipe splits it."""
REPORT_LINE = re.compile(
    r"Fatal Python error: |Python runtime state: |Extension modules: "
    r"|(?:Current thread|Thread|Stack)\b.*\(most recent call first\):"
    r"|  (?:File|Binary file|<|\.\.\.|Garbage-collecting)|$"
)
"""Matches the lines of a report, including the empty ones."""
BEGINNINGS = (
    *(BEGIN, b"Python runtime state: ", b"Extension modules: "),
    *(b"Current thread", b"Thread", b"Stack", b"  "),
)
"""Beginnings of these lines, to tell whether one that is incomplete belongs to a report."""
MAX_FRAMES = 8
"""Number of the user's frames to show of a report: an endless recursion has a hundred."""


class CrashFilter:
    """Shortens the crash reports in what a rank's processes write to standard error."""

    def __init__(self) -> None:
        self._in_report = False
        self._frames = 0  # frames of the current report that are shown
        self._incomplete = b""  # the last line of a report, which has not ended yet

    def feed(self, data: bytes) -> bytes:
        """Return what to show of the next text; a line of a report is held back until it ends."""
        data, self._incomplete, shown = self._incomplete + data, b"", b""
        while data:
            if not self._in_report:
                before, begin, after = data.partition(BEGIN)
                shown, data, self._in_report = shown + before, begin + after, bool(begin)
                continue
            line, newline, next_lines = data.partition(b"\n")
            if not newline and any(
                line.startswith(beginning) or beginning.startswith(line) for beginning in BEGINNINGS
            ):
                self._incomplete = line
                return shown
            text = line.decode(errors="replace")
            self._in_report = REPORT_LINE.match(text) is not None
            if self._in_report:
                shown, data = shown + self._shown_line(text).encode(), next_lines
        return shown

    def end(self) -> bytes:
        """Return what to show of a line that will not end any more."""
        line, self._incomplete, self._in_report = self._incomplete, b"", False
        return self._shown_line(line.decode(errors="replace")).encode() if line else b""

    def _shown_line(self, line: str) -> str:
        if line.encode().startswith(BEGIN):
            self._frames = 0
            return line + "\n"
        frame = FRAME.search(line)
        if frame is None or is_internal(frame["file"]) or is_library(frame["file"]):
            return ""
        self._frames += 1
        if self._frames > MAX_FRAMES:
            return ""
        if CELL_FILE.search(frame["file"]):
            return f"  line {frame['line']} of the cell, in {frame['name']}\n"
        return line + "\n"
