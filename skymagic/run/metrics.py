"""Numbers that the ranks of a run report: a table by step and rank, progress, reasons for slowness.

Every second, ranks also report their use of memory, processors and data loaders (`runtime.usage`).
The usage is compared with limits, and each reason for slowness is shown once, with its ranks.
"""

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
from skymagic.plan.units import rank_words, verb_form
from skymagic.wire.metrics import (
    FIXED,
    SECONDS,
    STEP,
    TOTAL,
    USAGE,
    MetricBatch,
    Names,
    imported_module,
    unpacked,
)

WINDOW_SECONDS = 10.0
"""Length in seconds of the window over which a current run's shares are computed."""
LOADING_SHARE = 0.2
"""Minimum share of a step spent waiting for its batch that is worth mentioning."""
LEAST_SECONDS = 1.0
"""Minimum seconds of measured steps before the loading share counts."""
FULL = 0.95
"""Minimum share of a memory in use that counts as nearly full."""
AT_REST = 0.1
"""Share of the time spent computing below which a GPU counts as idle."""
REST_SECONDS = 10.0  # minimum duration of idleness: a step may begin with work on the CPU
GPU_FULL = ("has its memory full", "have their memory full")
WINDOW = 20
"""Number of batches over which the step rate is computed: ten seconds at two batches per second."""
HISTORY = 16
"""Number of values in a sparkline."""
MOST_NUMBERS = 3
"""Maximum number of metrics shown in a line."""
LAG_SECONDS = 3.0
"""Minimum seconds behind the others, at their rate, that count as lagging.

Reports are up to a second apart.
"""
LAG_STEPS = 2
USAGE_SAMPLES = 60
"""Number of per-second samples kept for each rank; whole-run figures are cumulative."""


@dataclass(frozen=True)
class Usage:
    """Resource usage of one rank at one moment, as reported by the rank.

    Attributes:
        seconds: seconds since the cell began on that rank.
        node: node of the rank.
        waited: seconds spent waiting for batches since the cell began.
        stepped: total seconds of the steps that took these batches.
        memory: share in use of the node's memory.
        held: share of the node's memory that this rank's process holds.
        gpu_memory: share in use of the GPU's memory; NaN without a GPU.
        gpu_use: share of the time that the GPU spends computing; NaN without a GPU.
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
"""Rank → its usage samples, the oldest first."""


def current_causes(telemetry: Told, ended: Iterable[int] = ()) -> list[str]:
    """Explain why a current run is slow."""
    over = set(ended)
    recent = {
        rank: _recent_usage(samples)
        for rank, samples in telemetry.items()
        if samples and rank not in over
    }
    reasons = [
        _loading(
            {rank: _loading_share(samples[0], samples[-1]) for rank, samples in recent.items()},
            "spends",
            "spend",
        )
    ]
    reasons.append(_full({rank: samples[-1] for rank, samples in recent.items()}, "is"))
    resting = [
        rank for rank, samples in telemetry.items() if rank in recent and _is_gpu_idle(samples)
    ]
    reasons.append(_gpus(resting, "is idle", "are idle"))
    reasons.append(
        _gpus(
            [rank for rank, samples in recent.items() if samples[-1].gpu_memory >= FULL], *GPU_FULL
        )
    )
    return [reason for reason in reasons if reason]


def causes_over_run(telemetry: Told) -> list[str]:
    """Explain why a finished run was slow, based on all of it."""
    all_of_it = {rank: samples for rank, samples in telemetry.items() if samples}
    shares = {rank: _loading_share(Usage(0.0), samples[-1]) for rank, samples in all_of_it.items()}
    peaks = {
        rank: max(samples, key=lambda usage: usage.memory) for rank, samples in all_of_it.items()
    }
    return [
        reason for reason in (_loading(shares, "spent", "spent"), _full(peaks, "was")) if reason
    ]


def _recent_usage(samples: Sequence[Usage]) -> list[Usage]:
    """Return the samples within the window, and the sample before them."""
    since = samples[-1].seconds - WINDOW_SECONDS
    first = next(index for index, sample in enumerate(samples) if sample.seconds >= since)
    before = samples[first - 1] if first else Usage(0.0)
    return [before, *samples[first:]]


def _loading_share(first: Usage, last: Usage) -> float:
    """Return the share of the steps between two samples spent waiting for batches.

    Return 0 if too little is known.
    """
    seconds = last.stepped - first.stepped
    return (last.waited - first.waited) / seconds if seconds >= LEAST_SECONDS else 0.0


def _loading(shares: Mapping[int, float], one: str, several: str) -> str:
    slow = {rank: share for rank, share in shares.items() if share > LOADING_SHARE}
    if not slow:
        return ""
    low, high = round(100 * min(slow.values())), round(100 * max(slow.values()))
    verb = verb_form(len(slow), one, several)
    whose = verb_form(len(slow), "its", "their")
    return (
        f"{rank_words(sorted(slow))} {verb} {low if low == high else f'{low}–{high}'}% of {whose} "
        "steps loading data"
    )


def _full(newest: Mapping[int, Usage], verb: str) -> str:
    """Describe the node whose memory is fullest."""
    fullest = max((sample.memory for sample in newest.values()), default=0.0)
    if fullest < FULL:
        return ""
    node = next(sample.node for sample in newest.values() if sample.memory == fullest)
    samples_on_node = {rank: sample for rank, sample in newest.items() if sample.node == node}
    largest = max(samples_on_node, key=lambda rank: samples_on_node[rank].held)
    memory = (
        "memory"
        if len({sample.node for sample in newest.values()}) == 1
        else f"memory of node {node:.0f}"
    )
    return (
        f"{memory} {verb} {fullest:.0%} full, rank {largest} holds the most "
        f"({samples_on_node[largest].held:.0%})"
    )


def _is_gpu_idle(samples: Sequence[Usage]) -> bool:
    """Return True if a GPU has been idle for a while although its rank's cell is still running."""
    last = samples[-1].seconds
    recent = [sample for sample in samples if sample.seconds >= last - REST_SECONDS]
    long_enough = last - samples[0].seconds >= REST_SECONDS and len(recent) > 1
    return long_enough and all(sample.gpu_use < AT_REST for sample in recent)


def _gpus(ranks: Sequence[int], rank: str, several: str) -> str:
    if not ranks:
        return ""
    return (
        f"{verb_form(len(ranks), 'the GPU', 'the GPUs')} of {rank_words(sorted(ranks))} "
        f"{verb_form(len(ranks), rank, several)}"
    )


Key = tuple[int, Names]
"""A rank and the names that it reports together: each such set of names has its own steps."""


@dataclass
class Series:
    """Rows of one rank under one set of names, and its current step."""

    names: Names
    rows: array[float] = field(default_factory=lambda: array("d"))
    first: float = 0.0
    """First step of the current pass: 0 if steps are counted from 0."""
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(seconds, steps done) of the current pass, one point per batch."""

    @property
    def width(self) -> int:
        """Number of doubles in a row."""
        return FIXED + len(self.names)

    def add(self, rows: array[float]) -> None:
        """Append the rows of a batch."""
        before = self.rows[-self.width + STEP] if self.rows else math.inf
        self.rows.extend(rows)
        steps = rows[STEP :: self.width]
        # Lower steps mean another epoch. Its rate starts anew: the pause between two epochs, for a
        # validation, would make the estimate too low for a long time.
        if steps[0] < before or list(steps) != sorted(steps):  # a pass begins
            start = [i for i, step in enumerate(steps) if step < (steps[i - 1] if i else before)][
                -1
            ]
            self.first = steps[start]
            self.points.clear()
            self.points.append((rows[start * self.width + SECONDS], self._done(steps[start])))
        # one point for each batch: the rate is computed over the last WINDOW batches
        self.points.append((rows[-self.width + SECONDS], self._done(steps[-1])))

    def _done(self, step: float) -> float:
        # the step itself is done too: with a count from 0 that is one more than its number
        return step + 1 if self.first == 0 else step

    @property
    def progress(self) -> Progress:
        """Progress in the current pass."""
        (start, done_then), (now, done) = self.points[0], self.points[-1]
        total = self.rows[-self.width + TOTAL]
        # a clock that stands still, or a single batch so far: the rate is not known yet
        rate = (done - done_then) / (now - start) if now > start else 0.0
        return Progress(done, None if math.isnan(total) else max(total, done), rate)

    def column(self, name: str) -> array[float]:
        """Return all values of one name."""
        return self.rows[FIXED + self.names.index(name) :: self.width]


class Metrics:
    """Everything that the ranks of one run have reported; filled in the run, read on any thread."""

    def __init__(self, cell: int = 0) -> None:
        self.cell = cell
        self._series: dict[Key, Series] = {}
        self._usage: dict[int, deque[Usage]] = {}
        self._importing: dict[int, str] = {}
        """Rank → package whose import takes long; "" once the import is over."""
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._series)

    @property
    def size(self) -> int:
        """Number of doubles that the metrics hold."""
        with self._lock:
            return sum(len(series.rows) for series in self._series.values())

    def add(self, rank: int, batches: Iterable[MetricBatch]) -> None:
        """Add the batches that a rank has sent."""
        with self._lock:
            for names, rows in unpacked(batches):
                # imports and usage travel as batches with reserved names
                if (module := imported_module(names)) is not None:
                    self._importing[rank] = module
                    continue
                if names == USAGE:
                    self._usage.setdefault(rank, deque(maxlen=USAGE_SAMPLES)).extend(_usages(rows))
                    continue
                # not `setdefault` alone, which would make a Series for each batch
                series = self._series.get((rank, names)) or self._series.setdefault(
                    (rank, names), Series(names)
                )
                series.add(rows)

    # -- during the run ---------------------------------------------------------------------------

    def by_rank(self) -> dict[int, Progress]:
        """Return each rank's progress; of several loops, in the one that will take longest."""
        progress_lists: dict[int, list[Progress]] = {}
        with self._lock:
            for (rank, _), series in self._series.items():
                progress_lists.setdefault(rank, []).append(series.progress)
        return {
            rank: max(
                loops,
                key=lambda progress: (
                    progress.total is not None,
                    progress.remaining_seconds or 0.0,
                ),
            )
            for rank, loops in progress_lists.items()
        }

    def progress(self) -> Progress | None:
        """Return the progress of the slowest rank, or None if nothing was reported."""
        ranks = list(self.by_rank().values())
        with_share = [rank for rank in ranks if rank.share is not None]
        if with_share:
            return min(with_share, key=lambda progress: progress.share or 0.0)
        return min(ranks, key=lambda progress: progress.done, default=None)

    def lagging(self, finished: Iterable[int] = ()) -> dict[int, int]:
        """Find ranks that are seconds behind the others: rank → steps behind their median."""
        running = {
            rank: progress for rank, progress in self.by_rank().items() if rank not in set(finished)
        }
        if len(running) < 2:
            return {}
        steps_behind = {}
        for rank, progress in running.items():
            # ranks with another total have other work, as in a pipeline or without `drop_last`
            peers = [
                other
                for number, other in running.items()
                if number != rank and other.total == progress.total
            ]
            if peers:
                behind = statistics.median(other.done for other in peers) - progress.done
                rate = statistics.median(other.rate for other in peers)
                # In steps and in seconds: batches arrive twice a second, so a fast loop looks many
                # steps behind at any moment, and a slow one some seconds.
                if behind >= LAG_STEPS and behind >= rate * LAG_SECONDS and rate > 0:
                    steps_behind[rank] = round(behind)
        return steps_behind

    def usage(self) -> dict[int, list[Usage]]:
        """Return the usage samples by rank, the oldest first."""
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
        """Return the newest value of each of the first few names: mean and range over the ranks."""
        with self._lock:
            columns: dict[str, dict[int, array[float]]] = {}
            for (rank, names), series in self._series.items():
                for name in names:
                    columns.setdefault(name, {})[rank] = series.column(name)
        shown = list(columns.items())[:MOST_NUMBERS]
        return [_number(name, ranks) for name, ranks in shown]

    # -- after the run ----------------------------------------------------------------------------

    def _rows(self) -> list[tuple[int, Names, array[float]]]:
        with self._lock:
            return [(rank, names, series.rows[:]) for (rank, names), series in self._series.items()]

    def frame(self) -> Any:
        """Return the table of this run: see `table`."""
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


Row = dict[str, float]
"""Numbers of one step of one rank by the name of their column."""


def records(runs: Sequence[Metrics]) -> list[Row]:
    """Return a row for each step of each rank, ordered by step and rank.

    Its keys are ``step``, ``rank``, ``cell``, ``seconds``, and the names of the numbers. Numbers
    that a rank has reported for one step in several calls share a row; of the same name, the newer
    value counts. If a rank's steps start again under the same names, in another epoch or another
    cell, the step count continues.
    """
    rows_by_key: dict[tuple[float, int], Row] = {}
    # (offset added to steps, the last step as reported)
    offsets: dict[Key, tuple[float, float]] = {}
    for run in runs:
        for rank, names, rows in run._rows():
            offset, last = offsets.get((rank, names), (0.0, -math.inf))
            for start in range(0, len(rows), FIXED + len(names)):
                seconds, step = rows[start + SECONDS], rows[start + STEP]
                # A lower step starts another pass: continue the count after the last step, because
                # (step, rank) is the index of the table.
                if step < last:
                    offset += last + 1 - step
                last = step
                row = rows_by_key.setdefault((offset + step, rank), {})
                row.update(step=_plain(offset + step), rank=rank, cell=run.cell, seconds=seconds)
                row.update(
                    zip(names, rows[start + FIXED : start + FIXED + len(names)], strict=True)
                )
            offsets[rank, names] = offset, last
    return [row for _, row in sorted(rows_by_key.items(), key=lambda item: item[0])]


def _plain(step: float) -> float | int:
    return int(step) if step.is_integer() else step


class Column(list[float]):
    """Column of a `Table`, with the methods of a pandas Series that need no index; ignores NaN."""

    def dropna(self) -> Column:
        """Return the values that are not NaN."""
        return Column(value for value in self if not math.isnan(value))

    def min(self) -> float:
        """Return the minimum, or NaN for an empty column."""
        return min(self.dropna(), default=math.nan)

    def max(self) -> float:
        """Return the maximum, or NaN for an empty column."""
        return max(self.dropna(), default=math.nan)

    def sum(self) -> float:
        """Return the sum."""
        return sum(self.dropna())

    def mean(self) -> float:
        """Return the arithmetic mean, or NaN for an empty column."""
        values = self.dropna()
        return statistics.fmean(values) if values else math.nan

    def tolist(self) -> list[float]:
        """Return the values as a plain list."""
        return list(self)


class Table(list[Row]):
    """Reported numbers without pandas: a list with a row for each step of each rank.

    Columns are read as those of a DataFrame: ``table.loss`` or ``table["loss"]``, and
    ``table.columns`` names them.
    """

    @property
    def columns(self) -> list[str]:
        """Names of the columns, without step and rank, which are a DataFrame's index."""
        return [name for name in _column_names(self) if name not in INDEX]

    def __getattr__(self, name: str) -> Column:
        if name not in _column_names(self):
            names = ", ".join(self.columns)
            raise AttributeError(
                f"no column {name!r} (there are: {names}); a DataFrame's methods need pandas: pip "
                "install pandas"
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


def _column_names(rows: Sequence[Row]) -> list[str]:
    """Return the keys of all rows, in the order of their first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return list(names) or [*INDEX, "cell", "seconds"]


def table(runs: Sequence[Metrics]) -> Any:
    """Return the reported numbers as a DataFrame with the index (step, rank).

    Without pandas, the result is a `Table` with the same columns.
    """
    rows = records(runs)
    if find_spec("pandas") is None:
        return Table(rows)
    import pandas

    names = _column_names(rows)
    return pandas.DataFrame(rows, columns=names).set_index(INDEX)


def newest_within(runs: Sequence[Metrics], doubles: int) -> Iterator[Metrics]:
    """Iterate over the newest metrics with at most `doubles` doubles together, the oldest first.

    The newest metrics are always included.
    """
    newest: list[Metrics] = []
    for run in reversed([run for run in runs if run]):
        doubles -= run.size
        # the newest run is kept even if it exceeds the limit alone
        if newest and doubles < 0:
            break
        newest.append(run)
    yield from reversed(newest)
