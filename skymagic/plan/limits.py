"""Limits of a pool: ranks per machine by open files, unusually many ranks, and lifetime; pure.

The caller supplies the time.
"""

from __future__ import annotations

from collections.abc import Iterator

from skymagic.plan.units import count, duration_text, size, verb_form

RANK_BYTES = 20_000_000
"""Measured memory of a rank before it runs anything, excluding memory shared with other ranks.

The memory of its cells is additional.
"""
MOST_DESCRIPTORS = 1 << 16
"""Limit of open files that an agent sets for its children, if the system permits it."""
RANK_DESCRIPTORS, OWN_DESCRIPTORS = 7, 130
"""Open files allowed for a node's agent: per rank, and for the agent itself.

No process opens more than an agent. Measured: 4 for each rank, and 13 for the agent itself.
"""
RANKS_PER_CORE = 32
"""Maximum number of ranks per core that start without confirmation by the user."""


def refusal(ranks: int, descriptors: int | None, location: str) -> list[str]:
    """Return the reason why a pool of this size cannot have its head there, or [].

    Without this check it would fail after minutes, with a message of a library.

    Args:
        descriptors: files that a process there may open, with the limit raised; None if unknown.
    """
    needed = ranks * RANK_DESCRIPTORS + OWN_DESCRIPTORS
    if descriptors is None or needed <= descriptors:
        return []
    need = (
        f"{count(ranks, 'rank')} {location} {verb_form(ranks, 'needs', 'need')} {needed} "
        "open files in one process"
    )
    most = max(0, (descriptors - OWN_DESCRIPTORS) // RANK_DESCRIPTORS)
    return [f"{need}, and {descriptors} are allowed (ulimit -Hn): there is room for {most}"]


def question(ranks: int, cpus: int) -> str:
    """Return the question before this many ranks start on this many cores, or "" if not unusual."""
    if ranks <= RANKS_PER_CORE * cpus:
        return ""
    return (
        f"{ranks} ranks on {count(cpus, 'CPU core')} are {ranks // cpus} for each, and need "
        f"{size(ranks * RANK_BYTES)} of memory "
        "before they do anything"
    )


def first_gpu(local_rank: int, local_world_size: int, gpus: int) -> int:
    """Return the index of a rank's first GPU in the list that its node's ranks share.

    Several ranks get the same index if there are fewer GPUs than ranks.
    """
    return local_rank * gpus // local_world_size


class Lifetime:
    """Idle timeout, maximum age and absence timeout of a pool, tracked on one node.

    It tracks what is at work, and whether the notebook is connected.

    Args:
        idle: seconds without work; None for no limit.
        max_lifetime: seconds from now on; None for no limit.
        now: seconds on a monotonic clock, as in all methods.
        away: seconds without work on this node and without the notebook; None for no limit.
        max_away: seconds that ranks of this node may work without the notebook; None for no limit.
    """

    def __init__(
        self,
        idle: float | None,
        max_lifetime: float | None,
        now: float,
        away: float | None = None,
        max_away: float | None = None,
    ) -> None:
        self._idle = idle
        self._max_away = max_away
        self._max_lifetime = max_lifetime
        self._away = away
        self._started = now
        self._disconnected_at: float | None = None
        """Time of the notebook's disconnection; None while it is connected."""
        self._ranks_idle_since = now
        """Time since which no rank of this node works; meaningless while one does."""
        self._idle_since: float | None = None
        """Time since which nothing works; None during work, and before the ranks are up."""
        self._busy: set[int | str] = set()

    def begin(self, who: int | str) -> None:
        """Record that a rank starts, has begun a cell, or that something else keeps the pool busy.

        Calling it twice is safe.
        """
        self._busy.add(who)
        self._idle_since = None

    def end(self, who: int | str, now: float) -> None:
        """Record the end of that work; no effect for work that had not begun."""
        if who not in self._busy:
            return
        self._busy.discard(who)
        if not self._busy:
            self._idle_since = now
        if not self._ranks_work():
            self._ranks_idle_since = now

    def notebook_left(self, now: float) -> None:
        """Record that the notebook is disconnected; calling it twice is safe."""
        self._disconnected_at = now if self._disconnected_at is None else self._disconnected_at

    def returned(self) -> None:
        """Record that the notebook is connected."""
        self._disconnected_at = None

    def elsewhere(self) -> list[int | str]:
        """Return the activities that keep the pool busy, except this node's ranks."""
        return [who for who in self._busy if not isinstance(who, int)]

    @property
    def busy(self) -> bool:
        """True if anything is at work."""
        return bool(self._busy)

    @property
    def away(self) -> bool:
        """True if the notebook is not connected."""
        return self._disconnected_at is not None

    @property
    def working(self) -> list[int]:
        """Working ranks of this node."""
        return sorted(who for who in self._busy if isinstance(who, int))

    def _ranks_work(self) -> bool:
        return bool(self.working)

    @property
    def runs_end(self) -> float | None:
        """Deadline of running work while the notebook is away; None for no deadline."""
        if self._max_away is None or self._disconnected_at is None or not self._ranks_work():
            return None
        return self._disconnected_at + self._max_away

    def _limits(self) -> Iterator[tuple[float, str]]:
        """Yield (deadline of the pool, reason) of each active limit."""
        if self._max_lifetime is not None:
            text = duration_text(self._max_lifetime)
            yield self._started + self._max_lifetime, f"after {text} (--max-lifetime {text})"
        if self._idle is not None and self._idle_since is not None:
            text = duration_text(self._idle)
            yield self._idle_since + self._idle, f"after {text} without a cell (--idle {text})"
        # a notebook that returns later than this starts a new pool
        if self._away is not None and self._disconnected_at is not None and not self._ranks_work():
            since = max(self._disconnected_at, self._ranks_idle_since)
            yield since + self._away, f"after {duration_text(self._away)} without its notebook"

    @property
    def due(self) -> float | None:
        """Deadline of the first limit to expire if nothing else happens; None for no limit."""
        return min((over for over, _ in self._limits()), default=None)

    def reason(self, now: float) -> str:
        """Return why the pool must end now, as in "it ended …"; "" if no limit has expired."""
        return next((reason for over, reason in self._limits() if now >= over), "")
