"""The limits of a pool: how many ranks a machine has open files for, how many are asked about before they start, and when the pool ends by itself; pure.

The caller brings the time.
"""

from __future__ import annotations

from collections.abc import Iterator

from skymagic.plan.units import agreeing, count, duration_text, size

RANK_BYTES = 20_000_000
"""Memory that a rank shares with no other before it has run anything, measured; what its cells take comes on top."""
MOST_DESCRIPTORS = 1 << 16
"""Up to so many an agent raises the limit of what it starts, where the system lets it."""
RANK_DESCRIPTORS, OWN_DESCRIPTORS = 7, 130
"""Files that the controller, which has most, has open for each rank of a pool; and for agent, controller and forkserver."""
RANKS_PER_CORE = 32
"""Beyond so many the user is asked whether that was meant."""


def refusal(ranks: int, descriptors: int | None, where: str) -> list[str]:
    """Why a pool of so many ranks cannot have its head there: without this it would fail after minutes, in words of a library's.

    Args:
        descriptors: files that a process there may have open, once the limit is raised; None where nobody tells.
    """
    needed = ranks * RANK_DESCRIPTORS + OWN_DESCRIPTORS
    if descriptors is None or needed <= descriptors:
        return []
    need = f"{count(ranks, 'rank')} {where} {agreeing(ranks, 'needs', 'need')} {needed} open files in one process"
    most = max(0, (descriptors - OWN_DESCRIPTORS) // RANK_DESCRIPTORS)
    return [f"{need}, and {descriptors} are allowed (ulimit -Hn): there is room for {most}"]


def question(ranks: int, cpus: int) -> str:
    """What to ask before so many ranks start on so many cores; "" where it is not out of the ordinary."""
    if ranks <= RANKS_PER_CORE * cpus:
        return ""
    return (
        f"{ranks} ranks on {count(cpus, 'CPU core')} are {ranks // cpus} for each, and need {size(ranks * RANK_BYTES)} of memory "
        "before they do anything"
    )


def first_gpu(local_rank: int, local_world_size: int, gpus: int) -> int:
    """The number of a rank's first GPU in the list that its node's ranks share; of several ranks where there are too few GPUs."""
    return local_rank * gpus // local_world_size


class Lifetime:
    """Idle timeout, maximum age and absence timeout of a pool, on one node: who is at work, and whether the notebook is there.

    Args:
        idle: seconds without work, None for no limit.
        max_lifetime: seconds from now on, None for no limit.
        now: seconds on a clock that never goes back, as in all methods.
        away: seconds without work on this node and without the notebook, None for no limit.
        max_away: seconds for which ranks of this node may work without the notebook, None for no limit.
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
        """When the notebook was disconnected; None while it is there."""
        self._ranks_idle_since = now
        """Since when no rank of this node is at work; it says nothing while one is."""
        self._idle_since: float | None = None
        """Since when nobody is at work; None while somebody is, and before the ranks are there."""
        self._busy: set[int | str] = set()

    def begin(self, who: int | str) -> None:
        """A rank starts, or has begun a cell; or what else keeps the pool from being idle. Twice is safe."""
        self._busy.add(who)
        self._idle_since = None

    def end(self, who: int | str, now: float) -> None:
        """Somebody's work is over; what had not begun changes nothing."""
        if who not in self._busy:
            return
        self._busy.discard(who)
        if not self._busy:
            self._idle_since = now
        if not self._ranks_work():
            self._ranks_idle_since = now

    def left(self, now: float) -> None:
        """The notebook is not connected any more; twice is safe."""
        self._disconnected_at = now if self._disconnected_at is None else self._disconnected_at

    def returned(self) -> None:
        """The notebook is connected."""
        self._disconnected_at = None

    def elsewhere(self) -> list[int | str]:
        """What keeps the pool from being idle and is none of this node's ranks."""
        return [who for who in self._busy if not isinstance(who, int)]

    @property
    def busy(self) -> bool:
        """Whether somebody is at work."""
        return bool(self._busy)

    @property
    def away(self) -> bool:
        """Whether the notebook is not connected."""
        return self._disconnected_at is not None

    @property
    def working(self) -> list[int]:
        """The ranks of this node that are at work."""
        return sorted(who for who in self._busy if isinstance(who, int))

    def _ranks_work(self) -> bool:
        return bool(self.working)

    @property
    def runs_end(self) -> float | None:
        """When what ranks are at work on is to be stopped, for the notebook has been away for too long; None for never."""
        if self._max_away is None or self._disconnected_at is None or not self._ranks_work():
            return None
        return self._disconnected_at + self._max_away

    def _limits(self) -> Iterator[tuple[float, str]]:
        """(when it is over, why the pool is to end then) of each limit that runs now."""
        if self._max_lifetime is not None:
            text = duration_text(self._max_lifetime)
            yield self._started + self._max_lifetime, f"after {text} (--max-lifetime {text})"
        if self._idle is not None and self._idle_since is not None:
            text = duration_text(self._idle)
            yield self._idle_since + self._idle, f"after {text} without a cell (--idle {text})"
        # nobody has waited for this node for too long: a notebook that comes back later starts anew
        if self._away is not None and self._disconnected_at is not None and not self._ranks_work():
            since = max(self._disconnected_at, self._ranks_idle_since)
            yield since + self._away, f"after {duration_text(self._away)} without its notebook"

    @property
    def due(self) -> float | None:
        """When the first limit is over if nothing else happens; None if that is never."""
        return min((over for over, _ in self._limits()), default=None)

    def reason(self, now: float) -> str:
        """Why the pool is to end now, as in "it ended …"; empty while no limit is over."""
        return next((reason for over, reason in self._limits() if now >= over), "")
