"""`report`: training metrics by step, cheap enough for each step.

The rank's kernel sends them twice a second.

::

    main thread   report(…) ── a row of doubles ──▶ Recorder
                                                      │ take, twice a second
                                                      ▼
                                         the rank's flusher thread ──▶ agent
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from skymagic.wire.metrics import Names, Rows

RESERVED = frozenset({"rank", "cell", "seconds"})
"""Columns of the table that metrics of these names would hide."""
MOST_NAMES = 200
"""Most distinct names that one rank may report; each is a column."""
LONGEST_NAME = 100
MOST_BYTES = 8 << 20
"""Most bytes of untaken rows, because a thread that reports between cells never stops."""
NOWHERE = "sky.report: this process is not a rank of a pool, so what it reports is not kept"


def number(name: str, value: Any) -> float:
    """Return a number as a double; tensors and arrays of one element count as numbers.

    Raises:
        TypeError: it is not a number.
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
    """Return a step, or a number of steps.

    Raises TypeError or ValueError if the value cannot be one.
    """
    steps = number(name, value)
    if not math.isfinite(steps) or steps < 0 or (name == "total" and not steps):
        raise ValueError(
            f"sky.report({name}={value!r}): a number of steps is neither negative nor infinite, "
            "a total above 0"
        )
    return steps


class Recorder:
    """Reported rows that have not been taken yet, by their names. Safe on any thread."""

    def __init__(self) -> None:
        self._rows: Rows = {}
        self._known: set[Names] = set()  # sets of names that passed the checks
        self._names: set[str] = set()
        self._step = 0.0
        self.last_step: float | None = None
        """Last step reported by the current cell, or None if it has reported none."""
        self._began = time.perf_counter()
        # Reentrant, because the user's signal handler may report while its thread does.
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Start a cell: seconds, and steps that are not given, count from here."""
        self._step, self.last_step, self._began = 0.0, None, time.perf_counter()

    def add(self, step: Any, total: Any, numbers: Mapping[str, object]) -> None:
        """Add one row. Raises TypeError or ValueError for names and values that cannot be
        reported.
        """
        names = tuple(numbers)
        if names not in self._known:
            self._record_names(names)
        values = [
            value if type(value) is float else number(name, value)
            for name, value in numbers.items()
        ]
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
                rows.extend((time.perf_counter() - self._began, step, total, *values))

    def take(self) -> Rows:
        """Return all rows and forget them."""
        if not self._rows:
            return {}
        with self._lock:
            rows, self._rows = self._rows, {}
        return rows

    def _record_names(self, names: Names) -> None:
        for name in names:
            if not name.strip() or len(name) > LONGEST_NAME:
                raise ValueError(f"sky.report: {name[:LONGEST_NAME]!r} cannot be a column's name")
            if name in RESERVED:
                raise ValueError(
                    f"sky.report: {name!r} is already a column of the table: "
                    "report it under another name"
                )
        if len(self._names.union(names)) > MOST_NAMES:
            raise ValueError(
                f"sky.report: more than {MOST_NAMES} different names; "
                "report fewer, under names that stay"
            )
        self._names.update(names)
        self._known.add(names)


_recorder = Recorder()


def last_step() -> float | None:
    """Return the last step reported by the current cell, or None if it has reported none."""
    return _recorder.last_step


_sending = threading.RLock()
_send: Callable[[Rows], None] | None = None
"""Receiver of the rows; None outside a rank."""


def report(*, step: float | None = None, total: float | None = None, **numbers: Any) -> None:
    """Report metrics of a training step, such as ``sky.report(step=i, total=len(loader),
    loss=loss)``.

    A call takes microseconds, so it can be made at each step. On a rank every row is recorded and
    sent to the notebook twice a second: the running cell's progress line shows the latest values,
    and ``pool.metrics`` has all of them by step and rank. Outside a pool the values are checked and
    dropped, with one warning.

    Args:
        step: the step that has ended, counted from 0 or 1; by default the one after this rank's
            last. If a loop's steps start again, as in each epoch, the table continues counting.
        total: total number of steps.
        numbers: metrics by name; a tensor or an array of one element counts as a number (this waits
            for a tensor on a GPU).

    Raises:
        TypeError: a value is not one number.
        ValueError: a name cannot be a column (``rank``, ``cell`` and ``seconds`` are taken), or a
            step is below 0.
    """
    _recorder.add(step, total, numbers)
    if _send is None:
        _recorder.take()
        warnings.warn(NOWHERE, stacklevel=2)


def attach(send: Callable[[Rows], None]) -> None:
    """Mark this process as a rank: `flush` calls `send`. Processes that it forks are not ranks."""
    global _send
    _send = send
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    global _send, _recorder, _sending
    _send, _recorder, _sending = None, Recorder(), threading.RLock()


def begin() -> None:
    """Start a cell; called by the rank's kernel."""
    _recorder.begin()


def flush(more: Rows | None = None) -> None:
    """Send everything reported since the last call, including rows that other threads are sending.

    Called by the rank's kernel, on any thread.
    """
    if _send is None:
        return
    with _sending:  # rows sent after the end of a cell's output would be lost
        if rows := {**_recorder.take(), **(more or {})}:
            _send(rows)
