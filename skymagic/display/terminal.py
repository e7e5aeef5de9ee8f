"""The open line of a stream, as carriage returns and backspaces leave it, and tqdm's bars read as progress. Pure.

Of a terminal's control sequences, colours are kept and those that erase the line are obeyed. Those that move the cursor to other lines are
dropped: ranks draw their bars in one line (`kernels.rank.bars`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from skymagic.display.run_line import Progress

SEQUENCE = r"\x1b\[[\d;?]*[ -/]*"
"""A control sequence without its last character, which says what it is."""
CONTROLS = re.compile(rf"(\n|\r|\x08|{SEQUENCE}[@-~])")
UNFINISHED = re.compile(rf"(?:\x1b|{SEQUENCE})\Z")
"""The beginning of a control sequence, of which the rest comes with the next text."""
COLOURS_AT_END = re.compile(r"(?:\x1b\[[\d;]*m)*\Z")

Key = tuple[int, str]
"""A rank and the name of its stream."""


class OpenLine:
    """The line of a stream that has not ended."""

    def __init__(self, now: float) -> None:
        self.text = ""
        self.since = now
        """When the line began."""
        self.redrawn = False
        """Whether it is a bar: written over with a carriage return."""
        self._unfinished = ""
        self._over = False
        """The cursor is at the line's beginning: the next text replaces what stands there."""
        self._colours = ""
        """Colours that were set there, for the next text."""

    @property
    def blank(self) -> bool:
        """Whether the line shows nothing."""
        return not self.text.strip()

    def feed(self, text: str, now: float) -> list[str]:
        """Take text, and return the lines that it ends."""
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
                self._obey(piece)
            elif piece:
                self._write(piece)
        return ended

    def _begin(self, now: float) -> None:
        self.text, self.since, self.redrawn, self._over, self._colours = "", now, False, False, ""

    def _back(self) -> None:
        """Remove the last character, as front ends do; the colours after it stay."""
        colours = COLOURS_AT_END.search(self.text)
        if colours is not None and not self._over:
            self.text = self.text[: max(0, colours.start() - 1)] + colours[0]

    def _obey(self, sequence: str) -> None:
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
        """End the line, and return it; a bar that was wiped away leaves none."""
        text, wiped = self.text, self.blank and self.redrawn
        self._begin(self.since)
        return [] if wiped or not text else [text]

    def wiped(self) -> str:
        """Return what replaces the line by blanks in a terminal that shows it."""
        return f"\r{' ' * len(self.text)}\r"

    def repainted(self) -> str:
        """Return what makes a terminal show the line, and puts its cursor where it is."""
        return self.text + "\r" * (self._over and self.redrawn)


TQDM = re.compile(
    r"([\d.]+)([kMGT]?)/([\d.]+)([kMGT]?) \[(?:\d+:)*\d+:\d+<[^,\]]*(?:, +([\d.]+)([kMGT]?)([^/\s,\]]*)/([^\s,\]]+))?"
)
"""Pattern of tqdm's ``{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]``; the rate is "12.3it/s" or "1.5s/it"."""
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
LABEL = re.compile(r" *\d+%\|")
"""What follows a bar's description."""
BLANKS = re.compile(" +\r")
"""What wipes a bar away."""
LONGEST_ROW = 1000
"""Characters of the longest row that may be a bar."""


def bar(row: str) -> Progress | None:
    """How far a line of tqdm says that its loop is; None for any other line."""
    found = TQDM.search(row)
    if found is None:
        return None
    done, scale, total, of, rate, times, unit, per = found.groups()
    try:
        speed = float(rate or 0) * SCALES[times or ""]
        speed = 1 / speed if unit == "s" and per != "s" and speed else speed  # seconds for one step
        return Progress(float(done) * SCALES[scale], float(total) * SCALES[of], speed)
    except ValueError:  # "1.2.3": something else
        return None


def nested(bars: list[Progress]) -> Progress | None:
    """How far the outermost of nested bars is, with what the inner ones have of its next step."""
    if not bars:
        return None
    outer, inner = bars[0], nested(bars[1:])
    if inner is None or inner.share is None or outer.total is None:
        return outer
    rate = outer.rate or (inner.rate / inner.total if inner.total else 0.0)
    return Progress(min(outer.total, outer.done + inner.share % 1), outer.total, rate)


class StreamBars:
    """The bars that one stream draws in its open line, in the order in which they first appeared: outer ones before inner ones."""

    def __init__(self) -> None:
        self._bars: dict[tuple[str, float | None], Progress | None] = {}
        """By description and total; None for a bar that is wiped away, and may be drawn again."""
        self._newest: tuple[str, float | None] | None = None
        self._row = ""

    def feed(self, text: str) -> None:
        """Take text of the stream."""
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
        found = bar(row) if len(row) <= LONGEST_ROW else None
        if found is not None:
            name = LABEL.split(row, 1)[0].strip(), found.total
            if name not in self._bars:
                self._bars = {known: at for known, at in self._bars.items() if at is not None}
            self._bars[name] = found
            self._newest = name

    def _wipe(self) -> None:
        """Take the bar that was drawn last from what is shown."""
        if self._newest is not None:
            self._bars[self._newest] = None
            shown = [name for name, at in self._bars.items() if at is not None]
            self._newest = shown[-1] if shown else None

    def _end(self, row: str) -> None:
        """Forget the bar whose line has ended, and those within it."""
        if self._newest is None or len(row) > LONGEST_ROW or bar(row) is None:
            return
        names = list(self._bars)
        outer = names[: names.index(self._newest)]
        self._bars = {name: self._bars[name] for name in outer}
        self._newest = outer[-1] if outer else None

    def __iter__(self) -> Iterator[Progress]:
        return (at for at in self._bars.values() if at is not None)


class Bars:
    """The bars of all ranks, and the line that was written last. Pure; the caller brings the time."""

    def __init__(self) -> None:
        self._streams: dict[Key, tuple[StreamBars, OpenLine]] = {}
        self._last: Key | None = None

    def feed(self, rank: int, name: str, text: str, now: float, *, all: bool = False) -> None:
        """Take text of a rank's stream; `all` also where it has no bars."""
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
        """How far the slowest rank's bars are; None where there are none."""
        ranks = (nested(list(bars)) for bars, _ in self._streams.values())
        known = [progress for progress in ranks if progress is not None]
        return min(known, key=lambda one: one.share or 0.0, default=None)

    def open_line(self) -> tuple[str, OpenLine] | None:
        """The name of the stream that was written last, and its line, if that has not ended."""
        if self._last is None:
            return None
        line = self._streams[self._last][1]
        return None if line.blank else (self._last[1], line)
