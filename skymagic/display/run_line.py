"""The line of a running cell, and the one that stays of it: pure functions of how the run is."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from skymagic.plan.units import count, rank_words, size

BARS = "▁▂▃▄▅▆▇█"
QUIET = "color: #777; font-family: monospace"
SEPARATOR = " · "
SHOWN_BYTES, SHOWN_SECONDS = 1_000_000, 0.5
"""From so much on, the last line says what has travelled."""


@dataclass(frozen=True)
class Progress:
    """How far a loop is: steps done, of how many (None: nobody knows), and steps in a second (0: nobody knows)."""

    done: float
    total: float | None = None
    rate: float = 0.0

    @property
    def share(self) -> float | None:
        """Between 0 and 1."""
        return None if not self.total else min(1.0, self.done / self.total)

    @property
    def left(self) -> float | None:
        """Seconds until it is over, at this rate."""
        if self.total is None or not self.rate > 0:
            return 0.0 if self.share == 1 else None
        return max(0.0, self.total - self.done) / self.rate


@dataclass(frozen=True)
class Number:
    """What is reported under one name: the mean over ranks, the least, the most, and values of one rank over time."""

    name: str
    value: float
    low: float
    high: float
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunState:
    """How a run is now. Ranks that are in none of the lists are running."""

    ranks: int
    seconds: float
    done: int = 0
    failed: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    """In a collective to which others have not come."""
    progress: Progress | None = None
    numbers: Sequence[Number] = ()
    lagging: str = ""
    """Which rank is behind, in words."""
    activity: str = ""
    """What goes on instead of the cell: its values come back."""
    unit: str = "rank"
    """What is counted: of a script, nodes."""


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended."""

    ranks: int
    seconds: float
    failed: tuple[int, ...] = ()
    interrupted: bool = False
    timed_out: bool = False
    shipped: int = 0
    """Bytes."""
    ship_seconds: float = 0.0
    gathered: int = 0
    gather_seconds: float = 0.0
    names: tuple[str, ...] = ()
    """The notebook's variables that hold what came back."""
    numbers: Sequence[Number] = ()
    lagged: str = ""
    unit: str = "rank"


def line(state: RunState) -> str:
    """The line of a run that goes on: "4 ranks · 0:45 · 45% · 0:55 left · 12.5 steps/s · loss 0.203 ▇▅▃▂"."""
    return SEPARATOR.join([count(state.ranks, state.unit), clock(state.seconds), *state_parts(state)])


def state_parts(state: RunState) -> list[str]:
    """What that line says besides how many ranks there are, and since when."""
    if state.activity:
        return [state.activity]
    parts = progress_parts(state.progress) if state.progress is not None else []
    parts += [number_text(number) for number in state.numbers]
    if state.failed:
        parts.append(f"{rank_words(list(state.failed), state.unit)} failed")
    if state.done:
        parts.append(f"{state.done} done")
    if state.waiting:
        parts.append(f"{rank_words(list(state.waiting))} waiting")
    return [*parts, *([state.lagging] if state.lagging else [])]


def end_line(end: RunEnd) -> str:
    """The line that stays: "4 ranks · 12.3 s · shipped 400 MB in 0.2 s · results → `results`"."""
    ranks = [count(end.ranks, end.unit)] if end.ranks else []
    seconds = clock(end.seconds) if end.seconds >= 60 else f"{end.seconds:.1f} s"
    return SEPARATOR.join([*ranks, seconds, *end_parts(end)])


def end_parts(end: RunEnd) -> list[str]:
    """What that line says besides how many ranks there were, and how long it took."""
    parts = [f"{rank_words(list(end.failed), end.unit)} failed"] if end.failed else []
    parts += ["interrupted"] if end.interrupted else ["stopped: its time was over"] if end.timed_out else []
    if end.shipped >= SHOWN_BYTES or end.ship_seconds >= SHOWN_SECONDS:
        parts.append(f"shipped {size(end.shipped)} in {end.ship_seconds:.1f} s")
    if end.gathered >= SHOWN_BYTES or end.gather_seconds >= SHOWN_SECONDS:
        parts.append(f"gathered {size(end.gathered)} in {end.gather_seconds:.1f} s")
    parts += [number_text(number) for number in end.numbers]
    parts += [f"results → {', '.join(f'`{name}`' for name in end.names)}"] if end.names else []
    return [*parts, *([end.lagged] if end.lagged else [])]


def progress_parts(progress: Progress) -> list[str]:
    """Percent, time left and throughput, as far as they are known."""
    share, left = progress.share, progress.left
    parts = [f"step {progress.done:g}"] if share is None else [f"{math.floor(100 * share)}%"]
    parts += [f"{clock(left)} left"] if left is not None and share != 1 else []
    parts += [f"{short(progress.rate)} steps/s"] if progress.rate > 0 else []
    return parts


def number_text(number: Number) -> str:
    """A number with its range over ranks, where they differ, and how it went: "loss 0.203 (0.19–0.21) ▇▅▃▂"."""
    low, high = short(number.low), short(number.high)
    words = [number.name, short(number.value), f"({low}–{high})" if low != high else "", sparkline(number.history)]
    return " ".join(filter(None, words))


def sparkline(values: Sequence[float]) -> str:
    """Values as bars between their least and their most; nothing for fewer than three, a blank for what is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def short(value: float) -> str:
    """A number in three digits or so."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """A time as a clock shows it: "0:07", "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_html(text: str, share: float | None = None) -> str:
    """A line as HTML: in a quiet colour, with a bar where it is known how far the run is; a long one breaks between its parts."""
    if share is None:
        return f'<div style="{QUIET}">{html.escape(text)}</div>'
    bar = f'<progress value="{share:.3f}" max="1" style="flex: none; width: 8em"></progress>'
    parts = [f'<span style="white-space: nowrap">{html.escape(part)}</span>' for part in text.split(SEPARATOR)]
    return f'<div style="{QUIET}; display: flex; align-items: baseline; gap: .6em">{bar} <span>{SEPARATOR.join(parts)}</span></div>'
