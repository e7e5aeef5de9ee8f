"""Progress bars of tqdm in what ranks print, read as progress; and the line that is open on the screen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from skymagic.display.labels import HOLD, Key, Terminal
from skymagic.display.run_line import Progress

TQDM = re.compile(
    r"([\d.]+)([kMGT]?)/([\d.]+)([kMGT]?) \[(?:\d+:)*\d+:\d+<[^,\]]*(?:, +([\d.]+)([kMGT]?)([^/\s,\]]*)/([^\s,\]]+))?"
)
"""Of tqdm's ``{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]``; the rate is "12.3it/s" or "1.5s/it"."""
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
