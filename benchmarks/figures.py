"""What a benchmark yields: a figure of ours beside a peer's and beside a limit, and the table of them."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RANKS = 4


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Figures travel as JSON between processes: all fields are plain values.
    """

    name: str
    ours: float
    """In `unit`; infinite when it did not come to an end."""
    unit: str = "s"
    peer: float | None = None
    """The same of another tool, in the same unit."""
    who: str = ""
    """The other tool."""
    limit: float | None = None
    """What `ours` may be; None where nothing was promised."""
    relative: bool = False
    """The limit is one of the ratio ours / peer."""
    least: bool = False
    """The limit is a lower one."""

    @property
    def ratio(self) -> float | None:
        """Ours / the peer's."""
        return self.ours / self.peer if self.peer else None

    @property
    def good(self) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        judged = self.ratio if self.relative else self.ours
        if judged is None or math.isnan(judged):
            return False
        return judged >= self.limit if self.least else judged <= self.limit

    def cells(self) -> tuple[str, ...]:
        """What stands in the table."""
        sign, unit = "≥" if self.least else "≤", " ×" if self.relative else ""
        return (
            self.name,
            amount(self.ours, self.unit),
            f"{amount(self.peer, self.unit)} {self.who}" if self.peer is not None else "",
            f"{self.ratio:.2f}" if self.ratio else "",
            "" if self.limit is None else f"{sign} {self.limit:g}{unit or ' ' + self.unit}",
            {None: "", True: "ok", False: "over"}[self.good],
        )


HEADER = ("figure", "ours", "peer", "ratio", "limit", "")


def amount(value: float, unit: str) -> str:
    """A number with its unit, in three digits or so."""
    if math.isinf(value):
        return "no end"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def table(figures: Sequence[Figure]) -> str:
    """All figures as text, numbers to the right."""
    rows = [HEADER, *(figure.cells() for figure in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        words = [
            word.rjust(width) if column in (1, 3) else word.ljust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def alternate(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Measure each side once a round, so that a busy moment of the machine hits all; figures by side."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        for side, figures in zip(sides, found, strict=True):
            figures.append(side())
        say(f"  {number + 1}/{rounds}: " + ", ".join(f"{figures[-1]:.4g}" for figures in found))
    return found


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def say(text: str) -> None:
    """How far it is, beside the table."""
    print(text, file=sys.stderr, flush=True)
