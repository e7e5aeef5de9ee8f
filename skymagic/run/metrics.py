"""What the ranks of a run have reported: all of it as a table by step and rank, and how far they are."""

from __future__ import annotations

import math
import statistics
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from skymagic.display.run_line import Number, Progress
from skymagic.run.slowness import Usage
from skymagic.wire.metrics import FIXED, SECONDS, STEP, TOTAL, USAGE, Names, unpacked

WINDOW = 20
"""Batches over which the rate of steps is taken: ten seconds, at two a second."""
HISTORY = 16
"""Values of a sparkline."""
MOST_NUMBERS = 3
"""Numbers that a line names."""
LAG_SECONDS = 3.0
"""So far behind the others, at their rate, a rank lags: news of ranks are up to a second apart."""
LAG_STEPS = 2
USAGE_SAMPLES = 60
"""Of what a rank says of itself each second, the newest are kept: what counts over a whole run is summed up in each."""

Key = tuple[int, Names]
"""A rank, and the names that it reports together: each such set has steps of its own."""


@dataclass
class Series:
    """The rows of one rank under one set of names, and where it is in them."""

    names: Names
    rows: array[float] = field(default_factory=lambda: array("d"))
    first: float = 0.0
    """The step with which the present pass began: 0 where steps are counted from 0."""
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(seconds, steps done) of the present pass, a point for each batch."""

    @property
    def width(self) -> int:
        """Doubles of one row."""
        return FIXED + len(self.names)

    def add(self, rows: array[float]) -> None:
        """Take the rows of a batch."""
        before = self.rows[-self.width + STEP] if self.rows else math.inf
        self.rows.extend(rows)
        steps = rows[STEP :: self.width]
        if steps[0] < before or list(steps) != sorted(steps):  # it begins, or begins again
            start = [i for i, step in enumerate(steps) if step < (steps[i - 1] if i else before)][-1]
            self.first = steps[start]
            self.points.clear()
            self.points.append((rows[start * self.width + SECONDS], self._done(steps[start])))
        self.points.append((rows[-self.width + SECONDS], self._done(steps[-1])))

    def _done(self, step: float) -> float:
        return step + 1 if self.first == 0 else step

    @property
    def progress(self) -> Progress:
        """How far it is in the present pass."""
        (begun, done_then), (now, done) = self.points[0], self.points[-1]
        total = self.rows[-self.width + TOTAL]
        rate = (done - done_then) / (now - begun) if now > begun else 0.0
        return Progress(done, None if math.isnan(total) else max(total, done), rate)

    def column(self, name: str) -> array[float]:
        """All values of one name."""
        return self.rows[FIXED + self.names.index(name) :: self.width]


class Metrics:
    """Everything that the ranks of one run have reported; filled while it goes on, read on any thread.

    Args:
        cell: the number of the notebook's cell.
    """

    def __init__(self, cell: int = 0) -> None:
        self.cell = cell
        self._series: dict[Key, Series] = {}
        self._usage: dict[int, deque[Usage]] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._series)

    @property
    def size(self) -> int:
        """Doubles that it holds."""
        with self._lock:
            return sum(len(series.rows) for series in self._series.values())

    def add(self, rank: int, batches: Iterable[Mapping[str, Any]]) -> None:
        """Take what a rank has sent."""
        with self._lock:
            for names, rows in unpacked(batches):
                if names == USAGE:
                    self._usage.setdefault(rank, deque(maxlen=USAGE_SAMPLES)).extend(_usages(rows))
                    continue
                series = self._series.get((rank, names)) or self._series.setdefault((rank, names), Series(names))
                series.add(rows)

    # -- as it goes on -------------------------------------------------------------------------------------------------

    def by_rank(self) -> dict[int, Progress]:
        """How far each rank is that reports: in the loop that will take longest, where it has several."""
        found: dict[int, list[Progress]] = {}
        with self._lock:
            for (rank, _), series in self._series.items():
                found.setdefault(rank, []).append(series.progress)
        return {rank: max(several, key=_outermost) for rank, several in found.items()}

    def progress(self) -> Progress | None:
        """How far the run is: as its slowest rank. None where nothing was reported."""
        ranks = list(self.by_rank().values())
        known = [one for one in ranks if one.share is not None]
        if known:
            return min(known, key=lambda one: one.share or 0.0)
        return min(ranks, key=lambda one: one.done, default=None)

    def lagging(self, finished: Iterable[int] = ()) -> dict[int, int]:
        """Rank → steps behind the middle of the others, for ranks that have fallen back by seconds.

        Args:
            finished: ranks whose cell is over.
        """
        there = {rank: one for rank, one in self.by_rank().items() if rank not in set(finished)}
        if len(there) < 2:
            return {}
        found = {}
        for rank, one in there.items():
            others = [other for number, other in there.items() if number != rank and other.total == one.total]
            if others:
                behind = statistics.median(other.done for other in others) - one.done
                rate = statistics.median(other.rate for other in others)
                if behind >= LAG_STEPS and behind >= rate * LAG_SECONDS and rate > 0:
                    found[rank] = round(behind)
        return found

    def usage(self) -> dict[int, list[Usage]]:
        """By rank what it has said of what may slow it down, oldest first."""
        with self._lock:
            return {rank: list(samples) for rank, samples in self._usage.items()}

    def numbers(self) -> list[Number]:
        """The newest value of each of the first few names: over the ranks that report it, their mean and range."""
        with self._lock:
            columns: dict[str, dict[int, array[float]]] = {}
            for (rank, names), series in self._series.items():
                for name in names:
                    columns.setdefault(name, {})[rank] = series.column(name)
        chosen = list(columns.items())[:MOST_NUMBERS]
        return [_number(name, ranks) for name, ranks in chosen]

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _rows(self) -> list[tuple[int, Names, array[float]]]:
        with self._lock:
            return [(rank, names, series.rows[:]) for (rank, names), series in self._series.items()]

    def frame(self) -> Any:
        """The table: see `table`."""
        return table([self])


def _usages(rows: array[float]) -> Iterator[Usage]:
    width = FIXED + len(USAGE)
    for start in range(0, len(rows), width):
        yield Usage(rows[start + SECONDS], *rows[start + FIXED : start + width])


def _outermost(one: Progress) -> tuple[bool, float]:
    return (one.total is not None, one.left if one.left is not None else 0.0)


def _number(name: str, ranks: Mapping[int, array[float]]) -> Number:
    newest = [values[-1] for _, values in sorted(ranks.items())]
    first = ranks[min(ranks)]
    count = min(len(first), HISTORY)
    history = tuple(first[round(i * (len(first) - 1) / max(count - 1, 1))] for i in range(count))
    return Number(name, statistics.fmean(newest), min(newest), max(newest), history)


def records(runs: Sequence[Metrics]) -> list[dict[str, Any]]:
    """A dict for each step of each rank, by step and rank: ``step``, ``rank``, ``cell``, ``seconds``, and the numbers.

    Numbers that a rank has reported at one step in several calls stand together; of the same name the newer counts. Where a
    rank's steps begin again under the same names, in another epoch or another cell, they are counted on.
    """
    found: dict[tuple[float, int], dict[str, Any]] = {}
    counted: dict[Key, tuple[float, float]] = {}
    """(what is added to steps, the last step as it was reported)."""
    for run in runs:
        for rank, names, rows in run._rows():
            added, last = counted.get((rank, names), (0.0, -math.inf))
            for start in range(0, len(rows), FIXED + len(names)):
                seconds, step = rows[start + SECONDS], rows[start + STEP]
                if step < last:
                    added += last + 1 - step
                last = step
                row = found.setdefault((added + step, rank), {})
                row.update(step=_plain(added + step), rank=rank, cell=run.cell, seconds=seconds)
                row.update(zip(names, rows[start + FIXED : start + FIXED + len(names)], strict=True))
            counted[rank, names] = added, last
    return [row for _, row in sorted(found.items(), key=lambda item: item[0])]


def _plain(step: float) -> float | int:
    return int(step) if step.is_integer() else step


def table(runs: Sequence[Metrics]) -> Any:
    """What runs have reported, as a DataFrame with the index (step, rank); without pandas the list of `records`."""
    rows = records(runs)
    if find_spec("pandas") is None:
        return rows
    import pandas

    names = list(dict.fromkeys(name for row in rows for name in row)) or ["step", "rank", "cell", "seconds"]
    return pandas.DataFrame(rows, columns=names).set_index(["step", "rank"])


def kept(runs: Sequence[Metrics], doubles: int) -> Iterator[Metrics]:
    """The newest of these that hold no more than so many doubles together, and the newest in any case; oldest first."""
    chosen: list[Metrics] = []
    for run in reversed([run for run in runs if run]):
        doubles -= run.size
        if chosen and doubles < 0:
            break
        chosen.append(run)
    yield from reversed(chosen)
