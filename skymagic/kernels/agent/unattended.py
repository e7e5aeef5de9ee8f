"""The end of a run whose notebook has been away for too long: interrupted as by the stop button, and killed where that does not help."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

from skymagic.plan.limits import Lifetime
from skymagic.plan.units import duration_text

if TYPE_CHECKING:
    from skymagic.kernels.agent.ranks import Ranks

GRACE = 30.0
"""Seconds that ranks have to end their cell once they are interrupted."""


class UnattendedRuns:
    """Interrupts ranks, once for each time that the notebook is away, and kills those that go on.

    Args:
        lifetime: knows who is at work, and when that is to end.
        limit: seconds, for the line that says so.
    """

    def __init__(self, lifetime: Lifetime, limit: float) -> None:
        self._lifetime, self._limit = lifetime, limit
        self._interrupted: dict[int, float] = {}
        """Rank → when it is killed, of those that were interrupted and are at work still."""

    @property
    def due(self) -> float | None:
        """When something is to be done next (monotonic seconds)."""
        if self._interrupted:
            return min((when for when in self._interrupted.values() if when < math.inf), default=None)
        return self._lifetime.runs_end

    def stop_if_due(self, now: float, ranks: Ranks) -> None:
        """Stop what has no more time; a notebook that comes back leaves the rest to its own stop button."""
        end, working = self._lifetime.runs_end, self._lifetime.working
        if end is None:
            self._interrupted.clear()
            return
        self._interrupted = {rank: when for rank, when in self._interrupted.items() if rank in working}
        if not self._interrupted and now >= end:
            self._interrupted = dict.fromkeys(working, now + GRACE)
            for rank in working:
                text = duration_text(self._limit)
                ranks.note(rank, f"stopped after {text} without its notebook (--max-away {text})")
                ranks.signal(rank, signal.SIGINT)
        for rank in [rank for rank, when in self._interrupted.items() if when <= now]:
            self._interrupted[rank] = math.inf
            ranks.signal(rank, signal.SIGKILL)
