"""Acknowledgement of output that the user has seen.

An agent keeps the output of its ranks until the notebook acknowledges it, so that another notebook
can show the rest after this one was killed. No front end reports what it has shown: output counts
as shown some time after it was passed to the screen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

SHOWN_AFTER = 4.0
"""Seconds after which output that was passed to the screen counts as shown.

The screen holds back a cell's first output until its line is in place (`run_line.MAX_HELD`), and
open lines for a shorter time (`labels.DELAY`); the kernel's ZeroMQ sockets then need less than a
millisecond.
"""
INTERVAL = 0.5
"""Seconds between two acknowledgements of a run."""


class Acknowledgements:
    """Output that was passed to the screen, until it is acknowledged. Pure: the caller passes the
    time (monotonic seconds).

    Args:
        acknowledge: called with rank → number of the last piece that counts as shown.
    """

    def __init__(self, acknowledge: Callable[[Mapping[int, int]], object]) -> None:
        self._acknowledge = acknowledge
        self._passed: deque[tuple[float, int, int]] = deque()
        """(Time, rank, number) of pieces that do not count as shown yet."""
        self._due = 0.0

    def passed(self, rank: int, seq: int, now: float) -> None:
        """Record that a piece of a rank's output was passed to the screen."""
        self._passed.append((now, rank, seq))

    def update(self, now: float) -> None:
        """Acknowledge what counts as shown by now. Called often."""
        if now < self._due or not self._passed or self._passed[0][0] + SHOWN_AFTER > now:
            return
        # A flood has a hundred pieces a second, and an agent needs the last number only. What is
        # not acknowledged when this process is killed comes again, which costs a note.
        self._due = now + INTERVAL
        last: dict[int, int] = {}
        while self._passed and self._passed[0][0] + SHOWN_AFTER <= now:
            _, rank, last[rank] = self._passed.popleft()
        self._acknowledge(last)
