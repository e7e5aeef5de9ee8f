"""What the ranks of a run report: all of it as a table by step and rank, how far they are, and in words why a run is slow.

Each second ranks also report their use of memory, processors and data loaders (`runtime.usage`); it is held against limits, and each reason
for slowness is said once, with its ranks."""

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
from skymagic.plan.units import agreeing, rank_words
from skymagic.wire.metrics import (
    FIXED,
    SECONDS,
    STEP,
    TOTAL,
    USAGE,
    Names,
    imported_module,
    unpacked,
)

WINDOW_SECONDS = 10.0
"""Over which shares are taken while a run goes on."""
LOADING_SHARE = 0.2
"""Share of a step from which waiting for its batch is worth a word."""
LEAST_SECONDS = 1.0
"""Seconds of steps that must be known for that."""
FULL = 0.95
"""Share of a memory in use that is near its limit."""
AT_REST = 0.1
"""Share of the time in which a GPU computes, below which it is at rest."""
REST_SECONDS = 10.0  # for which it must be so: a step may begin with work on the processor
GPU_FULL = ("has its memory full", "have their memory full")
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
"""How many of the samples that a rank sends each second are kept: what counts over a whole run is summed up in each."""


@dataclass(frozen=True)
class Usage:
    """What one rank says of itself at one moment.

    Attributes:
        seconds: since the cell began on that rank.
        node: where it is.
        waited, stepped: seconds of waiting for batches, of the seconds of the steps that took them, since the cell began.
        memory: share in use of its node's memory. held: the share that this rank's process has.
        gpu_memory, gpu_use: shares of its GPU's memory and time in use; NaN where there is none.
    """

    seconds: float
    node: float = 0.0
    waited: float = 0.0
    stepped: float = 0.0
    memory: float = 0.0
    held: float = 0.0
    gpu_memory: float = math.nan
    gpu_use: float = math.nan


Told = Mapping[int, Sequence[Usage]]
"""By rank what it has said, oldest first."""


def reasons_now(told: Told, ended: Iterable[int] = ()) -> list[str]:
    """Why a run is slow that goes on."""
    over = set(ended)
    recent = {
        rank: _recent_usage(samples)
        for rank, samples in told.items()
        if samples and rank not in over
    }
    words = [
        _loading(
            {rank: _loading_share(samples[0], samples[-1]) for rank, samples in recent.items()},
            "spends",
            "spend",
        )
    ]
    words.append(_full({rank: samples[-1] for rank, samples in recent.items()}, "is"))
    resting = [rank for rank, samples in told.items() if rank in recent and _rests(samples)]
    words.append(_gpus(resting, "is idle", "are idle"))
    words.append(
        _gpus(
            [rank for rank, samples in recent.items() if samples[-1].gpu_memory >= FULL], *GPU_FULL
        )
    )
    return [each for each in words if each]


def reasons_over(told: Told) -> list[str]:
    """Why a run was slow that has ended: over all of it."""
    all_of_it = {rank: samples for rank, samples in told.items() if samples}
    shares = {rank: _loading_share(Usage(0.0), samples[-1]) for rank, samples in all_of_it.items()}
    peaks = {rank: max(samples, key=lambda one: one.memory) for rank, samples in all_of_it.items()}
    return [each for each in (_loading(shares, "spent", "spent"), _full(peaks, "was")) if each]


def _recent_usage(samples: Sequence[Usage]) -> list[Usage]:
    """Samples of the last seconds, with the one before them."""
    since = samples[-1].seconds - WINDOW_SECONDS
    first = next(index for index, one in enumerate(samples) if one.seconds >= since)
    before = samples[first - 1] if first else Usage(0.0)
    return [before, *samples[first:]]


def _loading_share(first: Usage, last: Usage) -> float:
    """Share of waiting for batches in the steps between two samples; 0 where too little is known."""
    seconds = last.stepped - first.stepped
    return (last.waited - first.waited) / seconds if seconds >= LEAST_SECONDS else 0.0


def _loading(shares: Mapping[int, float], one: str, several: str) -> str:
    slow = {rank: share for rank, share in shares.items() if share > LOADING_SHARE}
    if not slow:
        return ""
    low, high = round(100 * min(slow.values())), round(100 * max(slow.values()))
    verb = agreeing(len(slow), one, several)
    whose = agreeing(len(slow), "its", "their")
    return f"{rank_words(sorted(slow))} {verb} {low if low == high else f'{low}–{high}'}% of {whose} steps loading data"


def _full(newest: Mapping[int, Usage], verb: str) -> str:
    """Words on the node whose memory is fullest."""
    fullest = max((one.memory for one in newest.values()), default=0.0)
    if fullest < FULL:
        return ""
    node = next(one.node for one in newest.values() if one.memory == fullest)
    there = {rank: one for rank, one in newest.items() if one.node == node}
    most = max(there, key=lambda rank: there[rank].held)
    where = (
        "memory"
        if len({one.node for one in newest.values()}) == 1
        else f"memory of node {node:.0f}"
    )
    return f"{where} {verb} {fullest:.0%} full, rank {most} holds the most ({there[most].held:.0%})"


def _rests(samples: Sequence[Usage]) -> bool:
    """Whether a GPU has not computed for a while, though its rank's cell goes on."""
    last = samples[-1].seconds
    recent = [one for one in samples if one.seconds >= last - REST_SECONDS]
    long_enough = last - samples[0].seconds >= REST_SECONDS and len(recent) > 1
    return long_enough and all(one.gpu_use < AT_REST for one in recent)


def _gpus(ranks: Sequence[int], one: str, several: str) -> str:
    if not ranks:
        return ""
    return f"{agreeing(len(ranks), 'the GPU', 'the GPUs')} of {rank_words(sorted(ranks))} {agreeing(len(ranks), one, several)}"


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
            start = [i for i, step in enumerate(steps) if step < (steps[i - 1] if i else before)][
                -1
            ]
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
    """Everything that the ranks of one run have reported; filled while it goes on, read on any thread."""

    def __init__(self, cell: int = 0) -> None:
        self.cell = cell
        self._series: dict[Key, Series] = {}
        self._usage: dict[int, deque[Usage]] = {}
        self._importing: dict[int, str] = {}
        """By rank the package whose import takes long; "" once it is over."""
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
                if (module := imported_module(names)) is not None:
                    self._importing[rank] = module
                    continue
                if names == USAGE:
                    self._usage.setdefault(rank, deque(maxlen=USAGE_SAMPLES)).extend(_usages(rows))
                    continue
                series = self._series.get((rank, names)) or self._series.setdefault(
                    (rank, names), Series(names)
                )
                series.add(rows)

    # -- as it goes on -------------------------------------------------------------------------------------------------

    def by_rank(self) -> dict[int, Progress]:
        """How far each rank is that reports: in the loop that will take longest, where it has several."""
        found: dict[int, list[Progress]] = {}
        with self._lock:
            for (rank, _), series in self._series.items():
                found.setdefault(rank, []).append(series.progress)
        return {
            rank: max(several, key=lambda one: (one.total is not None, one.left or 0.0))
            for rank, several in found.items()
        }

    def progress(self) -> Progress | None:
        """How far the run is: as its slowest rank. None where nothing was reported."""
        ranks = list(self.by_rank().values())
        known = [one for one in ranks if one.share is not None]
        if known:
            return min(known, key=lambda one: one.share or 0.0)
        return min(ranks, key=lambda one: one.done, default=None)

    def lagging(self, finished: Iterable[int] = ()) -> dict[int, int]:
        """Rank → steps behind the middle of the others, for ranks that have fallen back by seconds."""
        there = {rank: one for rank, one in self.by_rank().items() if rank not in set(finished)}
        if len(there) < 2:
            return {}
        found = {}
        for rank, one in there.items():
            others = [
                other
                for number, other in there.items()
                if number != rank and other.total == one.total
            ]
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

    def importing(self, ended: Iterable[int] = ()) -> dict[str, list[int]]:
        """Return the packages that are being imported, each with its ranks in order."""
        over = set(ended)
        ranks: dict[str, list[int]] = {}
        with self._lock:
            for rank, module in sorted(self._importing.items()):
                if module and rank not in over:
                    ranks.setdefault(module, []).append(rank)
        return ranks

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
    counted: dict[
        Key, tuple[float, float]
    ] = {}  # (what is added to steps, the last step as it was reported)
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
                row.update(
                    zip(names, rows[start + FIXED : start + FIXED + len(names)], strict=True)
                )
            counted[rank, names] = added, last
    return [row for _, row in sorted(found.items(), key=lambda item: item[0])]


def _plain(step: float) -> float | int:
    return int(step) if step.is_integer() else step


class Column(list[float]):
    """One column of a `Table`, with the methods of a pandas Series that need no index; NaN is left out of all figures."""

    def dropna(self) -> Column:
        """Return the values that are not NaN."""
        return Column(value for value in self if not math.isnan(value))

    def min(self) -> float:
        """Return the least value, or NaN if there is none."""
        return min(self.dropna(), default=math.nan)

    def max(self) -> float:
        """Return the greatest value, or NaN if there is none."""
        return max(self.dropna(), default=math.nan)

    def sum(self) -> float:
        """Return the sum."""
        return sum(self.dropna())

    def mean(self) -> float:
        """Return the arithmetic mean, or NaN if there is no value."""
        values = self.dropna()
        return statistics.fmean(values) if values else math.nan

    def tolist(self) -> list[float]:
        """Return the values as a plain list."""
        return list(self)


class Table(list[dict[str, Any]]):
    """What ranks have reported, where there is no pandas: a list of a dict for each step of each rank.

    Columns are read as those of a DataFrame: ``table.loss`` or ``table["loss"]``, and ``table.columns`` names them.
    """

    @property
    def columns(self) -> list[str]:
        """Names of the columns; step and rank, which are a DataFrame's index, are not among them."""
        return [name for name in _column_names(self) if name not in INDEX]

    def __getattr__(self, name: str) -> Column:
        if name not in _column_names(self):
            known = ", ".join(self.columns)
            raise AttributeError(
                f"no column {name!r} (there are: {known}); a DataFrame's methods need pandas: pip install pandas"
            )
        return Column(row.get(name, math.nan) for row in self)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        try:
            return self.__getattr__(key)
        except AttributeError as problem:
            raise KeyError(str(problem)) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_column_names(self)]


INDEX = ["step", "rank"]


def _column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that stand in any of these rows, in the order in which they appear."""
    found = dict.fromkeys(name for row in rows for name in row)
    return list(found) or [*INDEX, "cell", "seconds"]


def table(runs: Sequence[Metrics]) -> Any:
    """What runs have reported, as a DataFrame with the index (step, rank); a `Table` of the same columns without pandas."""
    rows = records(runs)
    if find_spec("pandas") is None:
        return Table(rows)
    import pandas

    names = _column_names(rows)
    return pandas.DataFrame(rows, columns=names).set_index(INDEX)


def kept(runs: Sequence[Metrics], doubles: int) -> Iterator[Metrics]:
    """The newest of these that hold no more than so many doubles together, and the newest in any case; oldest first."""
    chosen: list[Metrics] = []
    for run in reversed([run for run in runs if run]):
        doubles -= run.size
        if chosen and doubles < 0:
            break
        chosen.append(run)
    yield from reversed(chosen)
