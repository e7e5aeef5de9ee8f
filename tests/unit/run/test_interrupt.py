"""The stop button, press by press, with real signals."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty

import pytest

from skymagic.errors import RunInterrupted
from skymagic.run import interrupt
from skymagic.run.submission import StopPressed, Submission
from tests.lab.golden import Golden


class Deaf:
    """Python loses what is raised while one of these is deleted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def deafness() -> Iterator[None]:
    """A press whose exception Python loses, and does not complain of here."""
    before, sys.unraisablehook = sys.unraisablehook, lambda lost: None
    try:
        thing = [Deaf()]
        thing.clear()
        gc.collect()
        yield
    finally:
        sys.unraisablehook = before


def presses(submission: Submission) -> int:
    """How many of them a run would hear."""
    count = 0
    while True:
        try:
            count += isinstance(submission.events.get_nowait(), StopPressed)
        except Empty:
            return count


def test_stop_press_lost_before_the_cell_stops_the_cell() -> None:
    submission = Submission([0])
    with interrupt.deferred() as one, deafness(), one.sent_to(submission):
        assert presses(submission) == 1


def test_a_press_before_the_cell_is_an_interrupt_of_the_cell(golden: Golden) -> None:
    with golden.raises(RunInterrupted), interrupt.deferred():
        signal.raise_signal(signal.SIGINT)


def test_a_press_while_the_cell_runs_is_its_news() -> None:
    submission = Submission([0])
    with interrupt.deferred() as one, one.sent_to(submission):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert presses(submission) == 2


def test_late_stop_is_reported_at_the_end(golden: Golden) -> None:
    def late() -> None:
        with interrupt.deferred() as one:
            with one.sent_to(Submission([0])):
                pass
            signal.raise_signal(signal.SIGINT)

    with golden.raises(RunInterrupted):
        late()


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    """A script started with ``nohup script &`` must not stop at a Ctrl-C meant for another process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        submission = Submission([0])
        with interrupt.deferred() as one, one.sent_to(submission):
            signal.raise_signal(signal.SIGINT)
            assert presses(submission) == 0
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_everything_is_restored_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt.deferred() as one, one.sent_to(Submission([0])):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
