"""`report`: numbers of a training by step, cheap enough for each step; a rank's kernel sends them on twice a second.

::

    main thread   report(…) ── a row of doubles ──▶ Recorder ◀── take, twice a second ── the rank's flusher thread ──▶ agent
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from array import array
from collections.abc import Callable
from typing import Any

from skymagic.wire.metrics import Names, Rows

RESERVED = frozenset({"rank", "cell", "seconds"})
"""Columns of the table that these names would hide."""
MOST_NAMES = 200
"""Different names that one rank may report: each is a column."""
LONGEST_NAME = 100
MOST_BYTES = 8 << 20
"""Bytes of rows that nobody has taken: a thread that reports between cells goes on for ever."""
NOWHERE = "sky.report: this process is not a rank of a pool, so what it reports is not kept"


def number(name: str, value: Any) -> float:
    """A number as a double; tensors and arrays of one element count as numbers.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, str | bytes | bytearray | complex):
        item = getattr(value, "item", None)
        try:
            return float(value if item is None else item())
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    kind = "None" if value is None else f"a {type(value).__name__}"
    raise TypeError(
        f"sky.report({name}=…) takes one number, not {kind}: reduce it first, as in {name}.mean()"
    ) from None


def position(name: str, value: Any) -> float:
    """A step, or a number of steps. Raises TypeError or ValueError for what cannot be one."""
    found = number(name, value)
    if not math.isfinite(found) or found < 0 or (name == "total" and not found):
        raise ValueError(
            f"sky.report({name}={value!r}): a number of steps is neither negative nor infinite, a total above 0"
        )
    return found


class Recorder:
    """Rows that were reported and not yet taken, by their names. Safe on any thread."""

    def __init__(self) -> None:
        self._rows: Rows = {}
        self._known: set[Names] = set()  # sets of names that were looked at
        self._names: set[str] = set()
        self._step = 0.0
        self.last_step: float | None = None
        """The step that the present cell has reported last, or None if it has reported none."""
        self._began = time.perf_counter()
        # reentrant: a signal handler of the user's may report while its thread does
        self._lock = threading.RLock()

    def begin(self) -> None:
        """A cell begins: steps that are not given, and seconds, are counted from here."""
        self._step, self.last_step, self._began = 0.0, None, time.perf_counter()

    def add(self, step: Any, total: Any, numbers: dict[str, Any]) -> None:
        """Keep one row. Raises TypeError or ValueError for names and values that cannot be reported."""
        names = tuple(numbers)
        if names not in self._known:
            self._learn(names)
        for name, value in numbers.items():
            if type(value) is not float:
                numbers[name] = number(name, value)
        if step is None:
            step = self._step + 1
        elif type(step) is not int or step < 0:
            step = position("step", step)
        if total is None:
            total = math.nan
        elif type(total) is not int or total < 1:
            total = position("total", total)
        with self._lock:
            self._step = self.last_step = step
            rows = self._rows.get(names)
            if rows is None:
                rows = self._rows[names] = array("d")
            if len(rows) < MOST_BYTES // 8:
                rows.extend((time.perf_counter() - self._began, step, total, *numbers.values()))

    def take(self) -> Rows:
        """All rows, which are forgotten here."""
        if not self._rows:
            return {}
        with self._lock:
            rows, self._rows = self._rows, {}
        return rows

    def _learn(self, names: Names) -> None:
        for name in names:
            if not name.strip() or len(name) > LONGEST_NAME:
                raise ValueError(f"sky.report: {name[:LONGEST_NAME]!r} cannot be a column's name")
            if name in RESERVED:
                raise ValueError(
                    f"sky.report: {name!r} is already a column of the table: report it under another name"
                )
        if len(self._names.union(names)) > MOST_NAMES:
            raise ValueError(
                f"sky.report: more than {MOST_NAMES} different names; report fewer, under names that stay"
            )
        self._names.update(names)
        self._known.add(names)


_recorder = Recorder()


def last_step() -> float | None:
    """Return the step that the present cell has reported last, or None if it has reported none."""
    return _recorder.last_step


_sending = threading.RLock()
_send: Callable[[Rows], None] | None = None
"""Where rows go; None outside a rank."""
"""Where the rows of the present cell go too."""


def report(*, step: float | None = None, total: float | None = None, **numbers: Any) -> None:
    """Report numbers of one step of a training, as ``sky.report(step=i, total=len(loader), loss=loss)``.

    Costs microseconds, so that each step may call it. On a rank all of it is kept and comes to the notebook twice a second:
    the line of the running cell shows the newest, ``pool.metrics`` has everything by step and rank. Elsewhere it is checked
    and dropped, with one warning.

    Args:
        step: the step that has ended, counted from 0 or 1; the one after this rank's last if it is not given. Where a loop's
            steps begin again, as each epoch's do, the table counts on.
        total: how many steps there are.
        numbers: a number by name; a tensor or an array of one element counts as one (a tensor on a GPU is waited for).

    Raises:
        TypeError: a value that is not one number.
        ValueError: a name that cannot be a column's (``rank``, ``cell`` and ``seconds`` are taken); a step below 0.
    """
    _recorder.add(step, total, numbers)
    if _send is None:
        _recorder.take()
        warnings.warn(NOWHERE, stacklevel=2)


def attach(send: Callable[[Rows], None]) -> None:
    """This process is a rank: `flush` sends rows here. Processes that it forks are none."""
    global _send
    _send = send
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    global _send, _recorder, _sending
    _send, _recorder, _sending = None, Recorder(), threading.RLock()


def begin() -> None:
    """A cell begins; the rank's kernel calls it."""
    _recorder.begin()


def flush(more: Rows | None = None) -> None:
    """Send what was reported since the last time; the rank's kernel calls it, on any thread. On return what others have taken is sent too."""
    if _send is None:
        return
    with _sending:  # what comes after the end of a cell's output is heard by nobody
        if rows := {**_recorder.take(), **(more or {})}:
            _send(rows)
