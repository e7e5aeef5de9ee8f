"""The open line of a stream after carriage returns and backspaces, and tqdm's bars as progress.

Pure. Of a terminal's control sequences, colours are kept and those that erase the line are applied.
Sequences that move the cursor to other lines are dropped: ranks draw their bars in one line
(`kernels.rank.bars`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from skymagic.display.run_line import Progress

SEQUENCE = r"\x1b\[[\d;?]*[ -/]*"
"""Control sequence without its last character, which determines its function."""
CONTROLS = re.compile(rf"(\n|\r|\x08|{SEQUENCE}[@-~])")
UNFINISHED = re.compile(rf"(?:\x1b|{SEQUENCE})\Z")
"""Beginning of a control sequence whose rest arrives with the next text."""
COLOURS_AT_END = re.compile(r"(?:\x1b\[[\d;]*m)*\Z")

Key = tuple[int, str]
"""Rank and name of its stream."""


class OpenLine:
    """The last line of a stream, not ended yet."""

    def __init__(self, now: float) -> None:
        self.text = ""
        self.since = now
        """Start time of the line."""
        self.redrawn = False
        """True if it is a bar: overwritten after a carriage return."""
        self._unfinished = ""
        self._over = False
        """True if the cursor is at the line's start, so that the next text replaces the line."""
        self._colours = ""
        """Colours set while the cursor was at the line's beginning; the next text takes them."""

    @property
    def blank(self) -> bool:
        """True if the line shows nothing."""
        return not self.text.strip()

    def feed(self, text: str, now: float) -> list[str]:
        """Process text, and return the lines that it ends."""
        if self.blank:
            self.since = now
        text = self._unfinished + text
        unfinished = UNFINISHED.search(text)
        self._unfinished = unfinished[0] if unfinished else ""
        ended = []
        for piece in CONTROLS.split(text.removesuffix(self._unfinished)):
            if piece == "\n":
                ended.append(self.text)
                self._begin(now)
            elif piece == "\r":
                self.redrawn = self._over = True
            elif piece == "\b":
                self._back()
            elif piece.startswith("\x1b[") and CONTROLS.fullmatch(piece):
                self._apply_sequence(piece)
            elif piece:
                self._write(piece)
        return ended

    def _begin(self, now: float) -> None:
        self.text, self.since, self.redrawn, self._over, self._colours = "", now, False, False, ""

    def _back(self) -> None:
        """Remove the last character, as front ends do; colours after it are kept."""
        colours = COLOURS_AT_END.search(self.text)
        if colours is not None and not self._over:
            self.text = self.text[: max(0, colours.start() - 1)] + colours[0]

    def _apply_sequence(self, sequence: str) -> None:
        if sequence.endswith("m") and self._over:
            self._colours += sequence
        elif sequence.endswith("m"):
            self.text += sequence
        elif sequence.endswith("2K") or (sequence.endswith("K") and self._over):
            self.text = ""

    def _write(self, text: str) -> None:
        if self._over:
            self.text, self._over, self._colours = self._colours + text, False, ""
        else:
            self.text += text

    def end(self) -> list[str]:
        """End the line, and return it; an erased bar leaves none."""
        text, wiped = self.text, self.blank and self.redrawn
        self._begin(self.since)
        return [] if wiped or not text else [text]

    def erasing_text(self) -> str:
        """Return the text that blanks out the line in a terminal that shows it."""
        return f"\r{' ' * len(self.text)}\r"

    def redrawing_text(self) -> str:
        """Return the text that makes a terminal show the line, with its cursor position."""
        return self.text + "\r" * (self._over and self.redrawn)


TQDM = re.compile(
    r"([\d.]+)([kMGT]?)/([\d.]+)([kMGT]?) \[(?:\d+:)*\d+:\d+<[^,\]]*"
    r"(?:, +([\d.]+)([kMGT]?)([^/\s,\]]*)/([^\s,\]]+))?"
)
"""Pattern of tqdm's ``{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]``.

The rate is "12.3it/s" or "1.5s/it".
"""
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
LABEL = re.compile(r" *\d+%\|")
"""Text after a bar's description."""
BLANKS = re.compile(" +\r")
"""Text that erases a bar."""
LONGEST_ROW = 1000
"""Maximum length of a row that may be a bar."""


def bar(row: str) -> Progress | None:
    """Return the progress of a loop from a line of tqdm, or None for any other line."""
    match = TQDM.search(row)
    if match is None:
        return None
    steps, scale, total, total_scale, rate, rate_scale, unit, per_unit = match.groups()
    try:
        speed = float(rate or 0) * SCALES[rate_scale or ""]
        # tqdm shows slow rates in seconds per step
        speed = 1 / speed if unit == "s" and per_unit != "s" and speed else speed
        return Progress(float(steps) * SCALES[scale], float(total) * SCALES[total_scale], speed)
    except ValueError:  # "1.2.3": something else
        return None


def nested(bars: list[Progress]) -> Progress | None:
    """Return the progress of the outermost bar, including the inner bars' part of its next step."""
    if not bars:
        return None
    outer, inner = bars[0], nested(bars[1:])
    if inner is None or inner.share is None or outer.total is None:
        return outer
    rate = outer.rate or (inner.rate / inner.total if inner.total else 0.0)
    return Progress(min(outer.total, outer.done + inner.share % 1), outer.total, rate)


class StreamBars:
    """Bars that one stream draws in its open line, in order of first appearance.

    Outer bars therefore come before inner ones.
    """

    def __init__(self) -> None:
        self._bars: dict[tuple[str, float | None], Progress | None] = {}
        """By description and total; None for an erased bar, which may be drawn again."""
        self._newest: tuple[str, float | None] | None = None
        self._row = ""

    def feed(self, text: str) -> None:
        """Process text of the stream."""
        *rows, self._row = re.split(r"(?<=[\r\n])", self._row + text)
        self._row = self._row[: LONGEST_ROW + 1]
        for row in rows:
            self._draw(row)
            if BLANKS.fullmatch(row):
                self._wipe()
            elif row.endswith("\n"):
                self._end(row)
        self._draw(self._row)

    def _draw(self, row: str) -> None:
        progress = bar(row) if len(row) <= LONGEST_ROW else None
        if progress is not None:
            bar_key = LABEL.split(row, 1)[0].strip(), progress.total
            if bar_key not in self._bars:
                self._bars = {
                    key: bar_progress
                    for key, bar_progress in self._bars.items()
                    if bar_progress is not None
                }
            self._bars[bar_key] = progress
            self._newest = bar_key

    def _wipe(self) -> None:
        """Remove the most recently drawn bar from the displayed ones."""
        if self._newest is not None:
            self._bars[self._newest] = None
            shown = [name for name, bar_progress in self._bars.items() if bar_progress is not None]
            self._newest = shown[-1] if shown else None

    def _end(self, row: str) -> None:
        """Forget the bar whose line has ended, and its inner bars."""
        if self._newest is None or len(row) > LONGEST_ROW or bar(row) is None:
            return
        names = list(self._bars)
        outer = names[: names.index(self._newest)]
        self._bars = {name: self._bars[name] for name in outer}
        self._newest = outer[-1] if outer else None

    def __iter__(self) -> Iterator[Progress]:
        return (progress for progress in self._bars.values() if progress is not None)


class Bars:
    """Bars of all ranks, and the most recently written line. Pure; the caller supplies the time."""

    def __init__(self) -> None:
        self._streams: dict[Key, tuple[StreamBars, OpenLine]] = {}
        self._last: Key | None = None

    def feed(self, rank: int, name: str, text: str, now: float, *, all: bool = False) -> None:
        """Process text of a rank's stream; with `all`, also of a stream without bars."""
        key = (rank, name)
        if key not in self._streams:
            if not all and "\r" not in text:
                return
            self._streams[key] = StreamBars(), OpenLine(now)
        bars, line = self._streams[key]
        bars.feed(text)
        line.feed(text, now)
        self._last = key

    def progress(self) -> Progress | None:
        """Return the progress of the slowest rank, or None without bars."""
        ranks = (nested(list(bars)) for bars, _ in self._streams.values())
        by_rank = [progress for progress in ranks if progress is not None]
        return min(by_rank, key=lambda progress: progress.share or 0.0, default=None)

    def open_line(self) -> tuple[str, OpenLine] | None:
        """Return the name and the open line of the most recently written stream.

        Return None if that line has ended.
        """
        if self._last is None:
            return None
        line = self._streams[self._last][1]
        return None if line.blank else (self._last[1], line)
