"""Interrupts: deferred delivery of SIGINT while a cell runs on the ranks, and the signal that stops one run from another thread.

Where a press of the stop button falls decides what becomes of it::

    with deferred()      │ before the cell │ cell on the ranks │ collecting values │ last lines of the block
    a press becomes      │ RunInterrupted, │ a "stop" event of │ RunInterrupted at │ RunInterrupted at the end,
                         │ at once         │ the submission    │ once, if it takes │ with the values: they are
                         │                 │                   │ long              │ kept
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from skymagic.errors import RunInterrupted, SkyError
from skymagic.run.metrics import Metrics
from skymagic.run.submission import Submission

STOPPED_BEFORE = "stopped before the cell began"
STOPPED_AFTER = "stopped after the cell ended on every rank: results that came back are kept"
STOPPED_COLLECTING = "stopped while values came back: they are not kept"
COLLECT_GRACE = 0.3
"""Seconds in which most values have come back: an interrupt within them is deferred."""


class StopSignal:
    """Cancellation of one run from another thread, as the stop button does it: once interrupts, twice kills."""

    def __init__(self) -> None:
        self.sent = 0
        self._submission: Submission | None = None
        self._lock = threading.Lock()

    @property
    def attached(self) -> bool:
        """Whether the run has begun."""
        return self._submission is not None

    @property
    def run(self) -> int:
        """The pool's number of the run; 0 while it has not begun."""
        return 0 if self._submission is None else self._submission.number

    @property
    def metrics(self) -> Metrics | None:
        """What the run's ranks have reported; None while it has not begun."""
        return None if self._submission is None else self._submission.metrics

    def send(self) -> None:
        """Stop the run; one that has not begun does not begin."""
        with self._lock:
            self.sent += 1
            if self._submission is not None:
                self._submission.put("stop", -1)

    def attach(self, submission: Submission) -> None:
        """Begin to serve a run; what was sent before reaches it now."""
        with self._lock:
            self._submission = submission
            for _ in range(self.sent):
                submission.put("stop", -1)


def pressing(stop: StopSignal) -> Callable[[], None]:
    """What a stop button does to a run of this thread, from any other: what the notebook's own does to one on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return stop.send
    # SIGINT also stops what goes on before the ranks begin and after they have ended: values that are sent, or come back
    return partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)


class DeferredInterrupts:
    """Deferred delivery of SIGINT: owns its handler on the main thread until the block ends, where a cell's values are kept.

    Before the cell is sent an interrupt falls where it falls, and leaves the block as `RunInterrupted`; where Python loses
    the exception, in a destructor or a callback, it stops the cell as soon as it is sent. An interrupt that no run took
    stays pending, and raises `RunInterrupted` when the block ends, so that a loop of cells ends too. Blocks may be
    nested: the outermost counts.

    Where SIGINT is ignored, as in a script after ``nohup`` or ``&`` in a shell without job control, it stays so: nothing stops
    its cells but their own time limits. A notebook's kernel sets a handler for each cell, however it was started.

    Args:
        installs: whether SIGINT is to be handled: Python lets only the main thread do so.

    Attributes:
        values: what the error for a late interrupt carries.
    """

    def __init__(self, *, installs: bool = True) -> None:
        self._installs = installs
        self._depth = 0
        self._reset()

    def _reset(self) -> None:
        self.values: Any = None
        self._pending = 0  # interrupts that no run has taken so far
        self._sent = False  # whether a cell has been sent
        self._submission: Submission | None = None
        self._previous_handler: Any = None
        self._interruptible_from: float | None = None

    def __enter__(self) -> DeferredInterrupts:
        self._depth += 1
        if self._depth == 1 and self._installs:
            self._previous_handler = signal.getsignal(signal.SIGINT)
            if self._previous_handler in (None, signal.SIG_IGN):
                self._previous_handler = (
                    None  # it was not set from Python, or whoever started this process wants none
                )
            else:
                signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, kind: object, problem: BaseException | None, _: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        sent, pending, values = self._close()
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, SkyError):
            raise RunInterrupted(STOPPED_COLLECTING if sent else STOPPED_BEFORE) from None
        if problem is None and pending:
            late = RunInterrupted(STOPPED_AFTER)
            late.values = values
            raise late

    @contextlib.contextmanager
    def sent_to(self, submission: Submission) -> Iterator[None]:
        """Inside, an interrupt is an event of this submission; what it has not read at the end is pending again."""
        self._submission = submission
        while self._pending and not self._sent:
            self._pending -= 1
            submission.put("stop", -1)
        self._sent = True
        try:
            yield
        finally:
            self._submission = None
            self._pending += submission.undelivered_stops()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, values come back: when that takes long, an interrupt ends it."""
        self._interruptible_from = time.monotonic() + COLLECT_GRACE
        try:
            yield
        finally:
            self._interruptible_from = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        # Python runs this between two bytecodes of the main thread: no lock may be taken that the thread may hold
        if self._submission is not None:
            self._submission.put("stop", -1)
            return
        self._pending += 1
        if not self._sent and callable(self._previous_handler):
            self._previous_handler(signum, frame)
        since = self._interruptible_from
        if since is not None and (self._pending > 1 or time.monotonic() > since):
            raise KeyboardInterrupt

    def _close(self) -> tuple[bool, int, Any]:
        """(whether there was a cell, pending interrupts, the values); the previous handler is there again."""
        late = 0
        if self._previous_handler is not None:
            try:
                signal.signal(signal.SIGINT, self._previous_handler)
            except KeyboardInterrupt:  # it came when the previous handler was back already
                late = 1
        found = self._sent, self._pending + late, self.values
        self._reset()
        return found


_main = DeferredInterrupts()


def deferred() -> DeferredInterrupts:
    """This thread's interrupts, as a block to enter: the notebook's on the main thread; elsewhere there are none."""
    on_main = threading.current_thread() is threading.main_thread()
    return _main if on_main else DeferredInterrupts(installs=False)
