"""What a terminal would show of the text of ranks: rows, a cursor that bars move, and tqdm's bars read as progress. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from skymagic.display.run_line import Progress

CONTROLS = re.compile(r"(\n|\r|\x1b\[\d*A|\x1b\[\d*K|\x1b\[\?25[lh])")
"""What moves the cursor, erases, or hides the cursor: tqdm sends the first three, rich all of them."""
UNFINISHED = re.compile(r"\x1b(\[\??\d*)?\Z")
"""The beginning of a control sequence, of which the rest comes with the next text."""
UP, ERASE, HIDE, UNHIDE = "\x1b[A", "\x1b[2K", "\x1b[?25l", "\x1b[?25h"
HOLD = 0.05
"""Seconds without text after which a bar above the cursor has ended: nested bars go down a line and come up again."""
MAX_HELD = 20
"""Lines that wait until a bar above them has ended."""
MAX_LIVE = 200
"""Rows that are taken for one drawing that moves: a program may hide the cursor, print lines and never show it again."""

Key = tuple[int, str]
"""A rank and the name of its stream."""


@dataclass
class Row:
    """A line on its way."""

    text: str = ""
    redrawn: bool = False
    """Whether the row is a bar: written over with a carriage return."""

    @property
    def blank(self) -> bool:
        """Whether the row shows nothing."""
        return not self.text.strip()


class Terminal:
    """What a terminal would show of the text of one stream that has not ended: rows, and a cursor that bars move. Pure."""

    def __init__(self, now: float) -> None:
        self.rows = [Row()]
        self.since = now
        """When the first row began."""
        self.touched = now
        self.shown = 0
        """How many of the rows a block shows."""
        self._at = 0
        self._over = False
        """The next text replaces what stands in the row."""
        self._unfinished = ""
        self._live = False
        """The cursor is hidden: rows are drawn together, again and again, and the cursor rests below bars that have not ended (rich)."""
        self._moved = False
        self._top = 0
        """The first row that was written when the cursor was last moved: while rows are live, those above it have ended."""

    def feed(self, text: str, now: float) -> None:
        """Take text."""
        if not self.open:
            self.since = now
        self.touched = now
        text = self._unfinished + text
        unfinished = UNFINISHED.search(text)
        self._unfinished = unfinished[0] if unfinished else ""
        for piece in CONTROLS.split(text.removesuffix(self._unfinished)):
            row = self.rows[self._at]
            if piece == "\n":
                self._at += 1
                if self._at == len(self.rows):
                    self.rows.append(Row())
                self._over = True
            elif piece == "\r":
                row.redrawn = self._over = self._moved = True
            elif piece in (HIDE, UNHIDE):
                self._live = piece == HIDE
            elif piece.endswith("A") and CONTROLS.fullmatch(piece):
                self._at, self._moved = max(0, self._at - int(piece[2:-1] or 1)), True
            elif piece == ERASE or (self._over and CONTROLS.fullmatch(piece)):
                row.text = ""
            elif piece:  # what erases the rest of a row has nothing to erase there
                if row.blank and not (
                    self._moved or self._live
                ):  # a line begins where a bar was wiped away
                    row.redrawn, self.shown = False, min(self.shown, self._at)
                row.text = piece if self._over else row.text + piece
                self._top = self._at if self._moved else self._top
                self._over = self._moved = False

    def take(self, *, all: bool = False) -> list[str]:
        """The rows that have ended, which are those above the cursor; of bars and what is below them only with `all`."""
        live = self._live and self._at - self._top < MAX_LIVE
        count = self._top if live else self._at
        if not (all or self._live) and count < MAX_HELD:
            count = next(
                (index for index, row in enumerate(self.rows[:count]) if row.redrawn), count
            )
        taken, self.rows = self.rows[:count], self.rows[count:]
        self._at, self._top = self._at - count, max(0, self._top - count)
        if taken:
            self.since = self.touched
        return [row.text for row in taken]

    def end(self) -> list[str]:
        """All rows, at the end; a bar that was wiped away leaves none."""
        taken, self.rows, self._at, self._top = self.rows, [Row()], 0, 0
        while taken and taken[-1].blank and (taken[-1].redrawn or not taken[-1].text):
            taken.pop()
        return [row.text for row in taken]

    def wiped(self) -> str:
        """What makes a terminal that shows these rows show blanks in their place, the cursor at the first."""
        blank = "\n".join(f"\r{' ' * len(row.text)}" for row in self.rows)
        return UP * self._at + blank + UP * (len(self.rows) - 1) + "\r"

    def repainted(self) -> str:
        """What makes a terminal show these rows, and puts its cursor where it is."""
        text = "\n".join(row.text for row in self.rows) + UP * (len(self.rows) - 1 - self._at)
        return text + "\r" * (self._over and self.rows[self._at].redrawn)

    @property
    def waiting(self) -> bool:
        """Rows that may have ended wait for more text."""
        return self._at > 0 and not self._live

    @property
    def moving(self) -> list[str]:
        """The rows that may be drawn again: what was written below bars that have ended (text of another stream may stand between) is not."""
        last = max((index for index, row in enumerate(self.rows) if row.redrawn), default=-1)
        return self.open[: last + 1] if 0 <= last < self._at and not self._live else self.open

    @property
    def open(self) -> list[str]:
        """The rows as they are now."""
        rows = [row.text for row in self.rows]
        while rows and not rows[-1].strip():
            rows.pop()
        return rows


TQDM = re.compile(
    r"([\d.]+)([kMGT]?)/([\d.]+)([kMGT]?) \[(?:\d+:)*\d+:\d+<[^,\]]*(?:, +([\d.]+)([kMGT]?)([^/\s,\]]*)/([^\s,\]]+))?"
)
"""Pattern of tqdm's ``{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]``; the rate is "12.3it/s" or "1.5s/it"."""
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


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
    """How far the outermost of bars is that stand below each other, with what the inner ones have of its next step."""
    if not bars:
        return None
    outer, inner = bars[0], nested(bars[1:])
    if inner is None or inner.share is None or outer.total is None:
        return outer
    rate = outer.rate or (inner.rate / inner.total if inner.total else 0.0)
    return Progress(min(outer.total, outer.done + inner.share % 1), outer.total, rate)


@dataclass
class Bars:
    """What the last lines of streams look like in a terminal. Pure; the caller brings the time."""

    _terminals: dict[Key, Terminal] = field(default_factory=dict)
    _last: Key | None = None

    def feed(self, rank: int, name: str, text: str, now: float, *, all: bool = False) -> None:
        """Take text of a rank's stream; `all` also where it has no bars."""
        key = (rank, name)
        terminal = self._terminals.get(key)
        if terminal is None:
            if not all and "\r" not in text:
                return
            terminal = self._terminals[key] = Terminal(now)
        terminal.feed(text, now)
        terminal.take()
        self._last = key

    def progress(self, now: float) -> Progress | None:
        """How far the slowest rank's bars are; None where there are none."""
        found: dict[int, Progress] = {}
        for (rank, _), terminal in self._terminals.items():
            if terminal.waiting and now - terminal.touched >= HOLD:
                terminal.take(all=True)
            if one := nested([each for row in terminal.open if (each := bar(row)) is not None]):
                found[rank] = one
        return min(found.values(), key=lambda one: one.share or 0.0, default=None)

    def open_line(self, now: float) -> tuple[str, Terminal] | None:
        """The stream that was written last, and its terminal, if it has a line that has not ended."""
        if self._last is None:
            return None
        terminal = self._terminals[self._last]
        if terminal.waiting and now - terminal.touched >= HOLD:
            terminal.take(all=True)
        return (self._last[1], terminal) if terminal.open else None
