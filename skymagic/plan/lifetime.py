"""When a pool ends by itself: after so long without a cell, or after so long. Pure; the caller brings the time."""

from __future__ import annotations


class Lifetime:
    """What a node agent was told of ``--idle`` and ``--max-lifetime``, who is at work, and whether the notebook is there.

    Args:
        idle: seconds without work, None for no limit.
        max_lifetime: seconds from now on, None for no limit.
        now: seconds on a clock that never goes back, as in all methods.
        away: seconds without work on this node and without the notebook, None for no limit.
    """

    def __init__(
        self, idle: float | None, max_lifetime: float | None, now: float, away: float | None = None
    ) -> None:
        self._idle = idle
        self._max_lifetime = max_lifetime
        self._away = away
        self._started = now
        self._left: float | None = None
        """Since when the notebook is not connected."""
        self._quiet = now
        """Since when no rank of this node is at work; it says nothing while one is."""
        self._rested: float | None = None
        """Since when nobody is at work; None while somebody is, and before the ranks are there."""
        self._busy: set[int | str] = set()

    def begin(self, who: int | str) -> None:
        """A rank starts, or has begun a cell; or what else keeps the pool from being idle. Twice is safe."""
        self._busy.add(who)
        self._rested = None

    def end(self, who: int | str, now: float) -> None:
        """It is over; what had not begun changes nothing."""
        if who not in self._busy:
            return
        self._busy.discard(who)
        if not self._busy:
            self._rested = now
        if not self._ranks_work():
            self._quiet = now

    def left(self, now: float) -> None:
        """The notebook is not connected any more; twice is safe."""
        self._left = now if self._left is None else self._left

    def returned(self) -> None:
        """The notebook is connected."""
        self._left = None

    def _ranks_work(self) -> bool:
        return any(isinstance(who, int) for who in self._busy)

    def _forsaken_at(self) -> float | None:
        """When nobody has waited for this node for too long: a notebook that comes back later starts anew."""
        if self._away is None or self._left is None or self._ranks_work():
            return None
        return max(self._left, self._quiet) + self._away

    @property
    def due(self) -> float | None:
        """When the first limit is over if nothing else happens; None if that is never."""
        times = []
        if self._idle is not None and self._rested is not None:
            times.append(self._rested + self._idle)
        if self._max_lifetime is not None:
            times.append(self._started + self._max_lifetime)
        if (forsaken := self._forsaken_at()) is not None:
            times.append(forsaken)
        return min(times, default=None)

    def reason(self, now: float) -> str:
        """Why the pool is to end now, as in "it ended …"; empty while no limit is over."""
        # not at the top: it brings all of `plan`, for which the start of a node need not wait
        from skymagic.plan.units import duration_text

        if self._max_lifetime is not None and now >= self._started + self._max_lifetime:
            text = duration_text(self._max_lifetime)
            return f"after {text} (--max-lifetime {text})"
        if self._idle is not None and self._rested is not None and now >= self._rested + self._idle:
            text = duration_text(self._idle)
            return f"after {text} without a cell (--idle {text})"
        forsaken = self._forsaken_at()
        if forsaken is not None and self._away is not None and now >= forsaken:
            return f"after {duration_text(self._away)} without its notebook"
        return ""
