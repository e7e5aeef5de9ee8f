"""The stop button: news while a cell runs on the ranks, and never a tear in what comes after it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from skymagic.errors import RunInterrupted, SkyError
from skymagic.run.submission import Submission

BEFORE = "stopped before the cell began"
LATE = "stopped when the cell had ended on every rank: what came back is kept"
BROKEN = "stopped while values came back: they are not kept"
SOON = 0.3
"""Seconds in which most values have come back: a press within them waits for that."""


class Button:
    """Owns SIGINT of the main thread until the block ends, where a cell's values are kept.

    Before the cell is sent an interrupt falls where it falls, and leaves the block as `RunInterrupted`; where Python loses
    the exception, in a destructor or a callback, the press stops the cell as soon as it is sent. A press that no run took
    is remembered, and raises `RunInterrupted` when the block ends, so that a loop of cells ends too. Blocks may be
    nested: the outermost counts.

    Args:
        listens: whether there is anything to press: not so on other threads.

    Attributes:
        values: what the error for a late press carries.
    """

    def __init__(self, *, listens: bool = True) -> None:
        self._listens = listens
        self._depth = 0
        self._reset()

    def _reset(self) -> None:
        self.values: Any = None
        self._pressed = 0
        """For nobody so far."""
        self._begun = False
        """Whether a cell has been sent."""
        self._submission: Submission | None = None
        self._before: Any = None
        """The handler that will be there again."""
        self._breaks_at: float | None = None

    def __enter__(self) -> Button:
        self._depth += 1
        if self._depth == 1 and self._listens:
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is not None:  # None: it was not set from Python
                signal.signal(signal.SIGINT, self._on_press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, _: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        begun, pressed, values = self._close()
        if isinstance(problem, KeyboardInterrupt) and not isinstance(problem, SkyError):
            raise RunInterrupted(BROKEN if begun else BEFORE) from None
        if problem is None and pressed:
            late = RunInterrupted(LATE)
            late.values = values
            raise late

    @contextlib.contextmanager
    def aimed(self, submission: Submission) -> Iterator[None]:
        """Inside, a press is news of this submission; what it has not read at the end is remembered."""
        self._submission = submission
        while self._pressed and not self._begun:
            self._pressed -= 1
            submission.put("stop", -1)
        self._begun = True
        try:
            yield
        finally:
            self._submission = None
            self._pressed += submission.late()

    @contextlib.contextmanager
    def breakable(self) -> Iterator[None]:
        """Inside, values come back: when that takes long, a press ends it."""
        self._breaks_at = time.monotonic() + SOON
        try:
            yield
        finally:
            self._breaks_at = None

    def _on_press(self, signum: int, frame: FrameType | None) -> None:
        if self._submission is not None:
            self._submission.put("stop", -1)
            return
        self._pressed += 1
        if not self._begun and callable(self._before):
            self._before(signum, frame)
        if self._breaks_at is not None and (self._pressed > 1 or time.monotonic() > self._breaks_at):
            raise KeyboardInterrupt

    def _close(self) -> tuple[bool, int, Any]:
        """Whether there was a cell, how often the button was pressed for nobody, and the values."""
        before, late = self._before, 0
        if before is not None:
            try:
                signal.signal(signal.SIGINT, before)
            except KeyboardInterrupt:  # the last moment
                late = 1
        found = self._begun, self._pressed + late, self.values
        self._reset()
        return found


_main = Button()


def here() -> Button:
    """The button of this thread, to be entered: the notebook's on the main thread; elsewhere nobody presses it."""
    return _main if threading.current_thread() is threading.main_thread() else Button(listens=False)
