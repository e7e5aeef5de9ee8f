"""Reading a rank's log for the notebook: its last lines, and what came after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skymagic.kernels.agent.trimming import begins
from skymagic.wire.agent import HEAD_CHARACTERS, HEAD_LINES, KEPT_CHARACTERS, KEPT_LINES, WHOLE_LOG

PIECE = 1 << 20
"""Bytes of a log that are read at once."""
LOST = "[what was written before is not kept any more: SkyMagic.log_limit]\n"
"""Stands in the place of what was trimmed off."""
KNOWN_RUNS = 1000
"""How many of the last runs are found in a log."""


class Spans:
    """Where each of the last runs stands in a rank's log, in bytes; the log goes on when the rank is started anew."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int | None]] = {}
        self._cells: dict[int, int] = {}
        self._current = 0

    def begin(self, run: int, start: int, cell: int = 0) -> None:
        """What follows is this run's, of this cell; 0 is none."""
        self.end(start)  # of a rank that was replaced amidst it
        self._current = run
        if run:
            self._spans[run], self._cells[run] = (start, None), cell
            for old in list(self._spans)[:-KNOWN_RUNS]:
                del self._spans[old], self._cells[old]

    def skip(self, start: int) -> None:
        """What was written of the run so far is not its own: a heading."""
        if self._current:
            self._spans[self._current] = start, None

    def end(self, end: int) -> None:
        """The run is over; twice is safe."""
        if self._current:
            self._spans[self._current] = self._spans[self._current][0], end
        self._current = 0

    def find(self, run: int) -> tuple[int, int | None] | None:
        """(start, end) of a run, the end None while it goes on; None where it is not known. `WHOLE_LOG` is all there is."""
        return (0, None) if run == WHOLE_LOG else self._spans.get(run)

    def listed(self) -> dict[str, Any]:
        """``runs``: [run, cell] of each that is known, the oldest first."""
        return {"runs": [[run, self._cells[run]] for run in self._spans]}


def last(path: str, lines: int) -> dict[str, Any]:
    """The last lines of a log as ``text``, and where it ended, as ``end``; a log that is not there is empty."""
    try:
        with open(path, "rb") as log:
            begin, end = begins(log), log.seek(0, os.SEEK_END)
            found, length = b"", min(end - begin, PIECE)
            while length and found.count(b"\n") <= lines and len(found) < end - begin:
                log.seek(end - length)
                found = log.read(length)
                length = min(end - begin, 4 * length)
    except FileNotFoundError:
        return {"text": "", "end": 0}
    text = b"\n".join(found.split(b"\n")[-lines - found.endswith(b"\n") :])  # a bar's states are one line
    return {"text": text.decode(errors="replace"), "end": end}


def kept(folder: Path) -> Iterator[tuple[int, str]]:
    """(rank, the last lines of its log) of all logs in a folder: what the notebook has after the pool's end."""
    for path in sorted(folder.glob("rank-*.log")):
        rank = int(path.stem.removeprefix("rank-"))
        lines, limit = (KEPT_LINES, KEPT_CHARACTERS) if rank else (HEAD_LINES, HEAD_CHARACTERS)
        yield rank, last(str(path), lines)["text"][-limit:]


def since(path: str, start: int) -> dict[str, Any]:
    """What a log holds from byte `start` on, in whole lines: ``text``, and where it ends: ``end``."""
    try:
        with open(path, "rb") as log:
            start = max(start, begins(log))
            log.seek(start)
            found = log.read(PIECE)
    except FileNotFoundError:
        found = b""
    if len(found) < PIECE:
        found = found[: found.rfind(b"\n") + 1]
    return {"text": found.decode(errors="replace"), "end": start + len(found)}


def of_run(path: str, span: tuple[int, int | None] | None, start: int | None) -> dict[str, Any]:
    """A piece of what a run wrote: ``text``, where it ends: ``end``, whether there is ``more``, and whether the run is ``known`` and ``over``."""
    if span is None:
        return {"text": "", "end": 0, "more": False, "known": False, "over": True}
    first, last = span
    lost, start = start is None, first if start is None else start
    try:
        with open(path, "rb") as log:
            begin, end = begins(log), log.seek(0, os.SEEK_END) if last is None else last
            lost, start = lost and begin > start, min(max(start, begin), max(start, end))
            log.seek(start)
            found = log.read(min(PIECE, max(0, end - start)))
    except FileNotFoundError:
        end, found, lost = start, b"", False
    if more := start + len(found) < end:
        found = found[: found.rfind(b"\n") + 1] or found  # a character is not cut in two
    return {
        "text": LOST * lost + found.decode(errors="replace"),
        "end": start + len(found),
        "more": more,
        "known": True,
        "over": last is not None,
    }
