"""Interrupts: deferred delivery of SIGINT while a cell runs, and a stop signal from other threads.

The time of a press of the stop button decides its effect::

    with deferred()      │ before the cell │ cell on the ranks │ collecting values │ end of block
    a press becomes      │ RunInterrupted, │ a "stop" event of │ RunInterrupted at │ RunInterrupted,
                         │ at once         │ the submission    │ once, if it takes │ with the values
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
from skymagic.run.submission import StopPressed, Submission

STOPPED_BEFORE = "stopped before the cell began"
STOPPED_AFTER = "stopped after the cell ended on every rank: results that came back are kept"
STOPPED_COLLECTING = "stopped while values came back: they are not kept"
COLLECT_GRACE = 0.3
"""Seconds that suffice to collect most values: an interrupt within them is deferred."""


class StopSignal:
    """Cancellation of one run from another thread, like the stop button.

    The first signal interrupts, the second one kills.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._submission: Submission | None = None
        self._lock = threading.Lock()

    @property
    def is_attached(self) -> bool:
        """True if the run has begun."""
        return self._submission is not None

    @property
    def run(self) -> int:
        """Number of the run in the pool; 0 before it begins."""
        return 0 if self._submission is None else self._submission.number

    @property
    def metrics(self) -> Metrics | None:
        """Metrics reported by the run's ranks; None before it begins."""
        return None if self._submission is None else self._submission.metrics

    def send(self) -> None:
        """Stop the run; a run that has not begun will not begin."""
        # The lock makes this one step for `attach`: otherwise a signal sent meanwhile would be
        # delivered twice, and the second one kills.
        with self._lock:
            self.sent += 1
            if self._submission is not None:
                self._submission.put(StopPressed())

    def attach(self, submission: Submission) -> None:
        """Connect to a run and deliver signals that were sent before."""
        with self._lock:
            self._submission = submission
            # signals may have been sent before the run began
            for _ in range(self.sent):
                submission.put(StopPressed())


def stop_from_any_thread(stop: StopSignal) -> Callable[[], None]:
    """Return a function that stops a run of this thread, like the stop button, from any thread."""
    if threading.current_thread() is not threading.main_thread():
        return stop.send
    # SIGINT also stops shipping before the ranks begin, and collecting values after they have ended
    return partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)


class DeferredInterrupts:
    """Deferred delivery of SIGINT.

    Owns the SIGINT handler on the main thread until the end of the block, where a cell's values are
    kept.

    Before the cell is sent, an interrupt takes effect at once, and leaves the block as
    `RunInterrupted`. If Python loses that exception, in a destructor or a callback, the interrupt
    stops the cell as soon as it is sent. An interrupt that no run received stays pending, and
    raises `RunInterrupted` at the end of the block, so that it also ends a loop of cells. Blocks
    may be nested: the outermost one counts.

    If SIGINT is ignored, as in a script after ``nohup`` or ``&`` in a shell without job control, it
    stays ignored: only time limits stop cells there. A notebook's kernel sets a handler for each
    cell, however it was started.

    Args:
        installs: install a handler for SIGINT; Python allows that only on the main thread.

    Attributes:
        values: the values that the error for a late interrupt carries.
    """

    def __init__(self, *, installs: bool = True) -> None:
        self._installs = installs
        self._depth = 0
        self._reset()

    def _reset(self) -> None:
        self.values: Any = None
        self._pending = 0  # interrupts that no run has received so far
        self._sent = False  # True once a cell has been sent
        self._submission: Submission | None = None
        self._previous_handler: Any = None
        self._interruptible_from: float | None = None

    def __enter__(self) -> DeferredInterrupts:
        self._depth += 1
        if self._depth == 1 and self._installs:
            self._previous_handler = signal.getsignal(signal.SIGINT)
            if self._previous_handler in (None, signal.SIG_IGN):
                # set outside Python, or the process was started with SIGINT ignored
                self._previous_handler = None
            else:
                signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, kind: object, problem: BaseException | None, _: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        sent, pending, values = self._close()
        # RunInterrupted is a KeyboardInterrupt too, and already says what happened
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, SkyError):
            raise RunInterrupted(STOPPED_COLLECTING if sent else STOPPED_BEFORE) from None
        # An interrupt that no run received still has to end a loop of cells.
        if problem is None and pending:
            late = RunInterrupted(STOPPED_AFTER)
            late.values = values
            raise late

    @contextlib.contextmanager
    def sent_to(self, submission: Submission) -> Iterator[None]:
        """Turn interrupts inside the block into events of this submission.

        Events that were not read by the end of the block become pending interrupts again.
        """
        self._submission = submission
        # Python may have lost an earlier interrupt's exception: it stops the cell now.
        while self._pending and not self._sent:
            self._pending -= 1
            submission.put(StopPressed())
        self._sent = True
        try:
            yield
        finally:
            self._submission = None
            self._pending += submission.undelivered_stops()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let an interrupt end the block, which collects values, if that takes long."""
        self._interruptible_from = time.monotonic() + COLLECT_GRACE
        try:
            yield
        finally:
            self._interruptible_from = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        # Python runs this between two bytecodes of the main thread, so it must not take a lock that
        # the thread may hold.
        if self._submission is not None:
            self._submission.put(StopPressed())
            return
        self._pending += 1
        # before the cell is sent, the interrupt takes effect at once
        if not self._sent and callable(self._previous_handler):
            self._previous_handler(signum, frame)
        # while values are collected: defer the first press for COLLECT_GRACE, never the second one
        since = self._interruptible_from
        if since is not None and (self._pending > 1 or time.monotonic() > since):
            raise KeyboardInterrupt

    def _close(self) -> tuple[bool, int, Any]:
        """Restore the previous handler.

        Returns:
            (True if there was a cell, number of pending interrupts, values)
        """
        late = 0
        if self._previous_handler is not None:
            try:
                signal.signal(signal.SIGINT, self._previous_handler)
            except KeyboardInterrupt:  # it arrived after the previous handler was restored
                late = 1
        result = self._sent, self._pending + late, self.values
        self._reset()
        return result


_main = DeferredInterrupts()


def deferred() -> DeferredInterrupts:
    """Return this thread's block of deferred interrupts.

    The main thread has a single shared block; on other threads it has no effect.
    """
    on_main = threading.current_thread() is threading.main_thread()
    return _main if on_main else DeferredInterrupts(installs=False)
