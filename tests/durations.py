"""Where the time of a test run is, by file: recorded by each run, shown at its end, and used to share the files among processes and machines.

``build/durations.json`` is what the last run took. ``make durations`` (``python -m tests.durations``) takes it over into
``tests/durations.tsv``, after a whole run: processes take the longest files first, and shards get about as much each.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("durations.tsv")
LAST = ROOT / "build/durations.json"
SHOWN = 10
"""Files in the table at the end of a run."""
SHORT = 1.0
"""Seconds below which a file needs no line in the kept table."""


@dataclass
class Spent:
    """What the tests of a file took.

    Attributes:
        seconds: set-up, call and teardown.
        starting: seconds of it in fixtures' set-ups, and until notebooks that tests open have their pools.
        asleep: seconds of it in ``time.sleep``, in the main thread of the tests' own process.
        processes: how many that process started.
        tests: how many ran, and `of` how many that the file has.
    """

    seconds: float = 0.0
    starting: float = 0.0
    asleep: float = 0.0
    processes: int = 0
    tests: int = 0
    of: int = 0

    def __add__(self, other: Spent) -> Spent:
        both = (getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        return replace(Spent(*both), of=max(self.of, other.of))  # each process has counted them all


class Clock:
    """Attributes the time of this process to the file whose test runs."""

    def __init__(self) -> None:
        self.files: dict[str, Spent] = {}
        self._now = Spent()  # where nothing is read
        self._in_setup = False

    def begin(self, file: str) -> None:
        """A test of this file begins."""
        self._now = self.files.setdefault(file, Spent())

    def end(self) -> None:
        """It is over."""
        self._now = Spent()

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the test is over."""
        self._now.seconds += seconds
        self._now.starting += seconds if name == "setup" else 0.0
        self._now.tests += name == "call"

    @contextmanager
    def setup(self) -> Iterator[None]:
        """A test is set up: all of it is counted as starting."""
        self._in_setup = True
        try:
            yield
        finally:
            self._in_setup = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Something is started; within a test's set-up that is counted already."""
        begun, now = time.monotonic(), self._now
        try:
            yield
        finally:
            if not self._in_setup:
                now.starting += time.monotonic() - begun

    def started(self) -> None:
        """A process was started."""
        self._now.processes += 1

    def slept(self, seconds: float) -> None:
        """The main thread has slept."""
        self._now.asleep += seconds


CLOCK = Clock()


def count_sleep() -> None:
    """Have ``time.sleep`` counted in this process; Python 3.11 has no audit event for it. The function pickles as the one that it replaces."""
    original = time.sleep

    def sleep(seconds: float, /) -> None:
        begun = time.monotonic()
        try:
            original(seconds)
        finally:
            if threading.current_thread() is threading.main_thread():
                CLOCK.slept(time.monotonic() - begun)

    sleep.__module__, sleep.__qualname__ = "time", "sleep"
    time.sleep = sleep  # type: ignore[assignment]


def plain(files: Mapping[str, Spent]) -> dict[str, dict[str, Any]]:
    """As JSON has it, and as a worker sends it."""
    return {name: asdict(spent) for name, spent in files.items()}


def merged(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Spent]:
    """What several processes took, by file."""
    total: dict[str, Spent] = {}
    for part in parts:
        for name, spent in part.items():
            total[name] = total.get(name, Spent()) + Spent(**spent)
    return total


def save(files: Mapping[str, Spent], path: Path = LAST) -> None:
    """Keep what a run took. What ran in part (chosen by -k) replaces no whole file."""
    path.parent.mkdir(exist_ok=True)
    before = merged([json.loads(path.read_text())]) if path.exists() else {}
    whole = {
        name: spent
        for name, spent in files.items()
        if spent.tests >= spent.of or name not in before
    }
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(plain(before | whole), indent=1, sort_keys=True) + "\n")
    fresh.replace(path)


def machine_time() -> tuple[float, float]:
    """Seconds of processor time since the machine started: used, and available; zeros where there is no /proc/stat (macOS)."""
    try:
        ticks = [
            int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        ]
    except OSError:
        return 0.0, 0.0
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(
        ticks
    ) / per_second  # 3: idle, 4: waiting for a disk


def used(before: tuple[float, float], after: tuple[float, float]) -> str:
    """How busy the machine's cores were between two readings of ``machine_time``."""
    available = after[1] - before[1]
    return (
        f"the cores worked {100 * (after[0] - before[0]) / available:.0f} % of the time"
        if available > 0
        else ""
    )


def lines(files: Mapping[str, Spent]) -> list[str]:
    """The slowest files, and the sum of all."""
    slowest = sorted(files.items(), key=lambda item: -item[1].seconds)[:SHOWN]
    total = sum(files.values(), Spent())
    return [
        f"{'seconds':>8} {'starting':>8} {'asleep':>7} {'processes':>9} {'tests':>6}  file",
        *(
            f"{spent.seconds:8.1f} {spent.starting:8.1f} {spent.asleep:7.1f} {spent.processes:9} {spent.tests:6}  {name}"
            for name, spent in [*slowest, (f"all {len(files)} files", total)]
        ),
    ]


def kept(path: Path = TABLE) -> dict[str, float]:
    """Seconds by file, as the kept table has them."""
    rows = (line.split("\t") for line in path.read_text().splitlines() if line)
    return {name: float(seconds) for seconds, name in rows}


def updated(
    table: Mapping[str, float], run: Mapping[str, Spent], exists: Callable[[str], bool]
) -> dict[str, float]:
    """The table after a run: files of which all tests ran have its figures, and those that are gone are gone."""
    fresh = {name: spent.seconds for name, spent in run.items() if spent.tests >= spent.of}
    return {
        name: seconds
        for name, seconds in {**table, **fresh}.items()
        if seconds >= SHORT and exists(name)
    }


def shards(weights: Mapping[str, float], count: int) -> list[set[str]]:
    """Files shared among so many machines, about as much for each: the longest first, to whom has least."""
    chosen: list[set[str]] = [set() for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(weights, key=lambda each: (-weights[each], each)):
        least = loads.index(min(loads))
        chosen[least].add(name)
        loads[least] += weights[name]
    return chosen


def shard(text: str) -> tuple[int, int]:
    """``2/4`` → (2, 4); raises ValueError for what is none."""
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(f"{text!r} is no shard: the second of four is 2/4")
    return int(number), int(count)


if __name__ == "__main__":
    last = merged([json.loads(LAST.read_text())])
    rows = updated(kept() if TABLE.exists() else {}, last, lambda name: (ROOT / name).exists())
    TABLE.write_text("".join(f"{seconds:.0f}\t{name}\n" for name, seconds in sorted(rows.items())))
