"""When a pool ends by itself: after so long without a cell, or after so long. Pure; the caller brings the time."""

from __future__ import annotations

from skymagic.plan.units import duration_text


class Limits:
    """What a node agent was told of ``--idle`` and ``--max-lifetime``, and who is at work.

    Args:
        idle: seconds without work, None for no limit.
        max_lifetime: seconds from now on, None for no limit.
        now: seconds on a clock that never goes back, as in all methods.
    """

    def __init__(self, idle: float | None, max_lifetime: float | None, now: float) -> None:
        self._idle = idle
        self._max_lifetime = max_lifetime
        self._started = now
        self._rested: float | None = None
        """Since when nobody is at work; None while somebody is, and before the ranks are there."""
        self._busy: set[int | str] = set()

    def begin(self, who: int | str) -> None:
        """A rank starts, or has begun a cell; or what else keeps the pool from being idle. Twice is safe."""
        self._busy.add(who)
        self._rested = None

    def end(self, who: int | str, now: float) -> None:
        """It is over; what had not begun changes nothing."""
        if self._busy == {who}:
            self._rested = now
        self._busy.discard(who)

    @property
    def due(self) -> float | None:
        """When the first limit is over if nothing else happens; None if that is never."""
        times = []
        if self._idle is not None and self._rested is not None:
            times.append(self._rested + self._idle)
        if self._max_lifetime is not None:
            times.append(self._started + self._max_lifetime)
        return min(times, default=None)

    def reason(self, now: float) -> str:
        """Why the pool is to end now, as in "it ended …"; empty while no limit is over."""
        if self._max_lifetime is not None and now >= self._started + self._max_lifetime:
            text = duration_text(self._max_lifetime)
            return f"after {text} (--max-lifetime {text})"
        if self._idle is not None and self._rested is not None and now >= self._rested + self._idle:
            text = duration_text(self._idle)
            return f"after {text} without a cell (--idle {text})"
        return ""
