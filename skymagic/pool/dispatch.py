"""Dispatch orders to ranks.

Holds the queue in front of the ranks, passes a rank's death on to the run that waits for it, and
collects the outcomes of runs that another notebook started.

Runs that share a rank execute in the order of their requests (FIFO); other runs execute in
parallel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from skymagic.cluster.agents import Agents
from skymagic.display import live
from skymagic.display.screen import Screen
from skymagic.errors import PoolError, RunInterrupted
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import SharedStatus, now
from skymagic.run.run import RunLoop
from skymagic.run.state import Limits, Report, RunSpec
from skymagic.run.submission import (
    OutputArrived,
    PoolClosed,
    PoolNote,
    RankDeath,
    RankFinished,
    Repeated,
    Submission,
)
from skymagic.wire import agent as wire
from skymagic.wire.order import Order
from skymagic.wire.outcome import RECALL, Failure, Outcome
from skymagic.wire.output import OutputComplete

logger = logging.getLogger(__name__)

WAKE_INTERVAL = 0.5
"""Seconds between wake-ups of a wait.

Python may sleep through an interrupt that arrives just before it starts to wait.
"""
OUTCOME_TIMEOUT = 10.0
"""Seconds for a rank whose output has ended to report its outcome."""
LOOK_INTERVAL = 5.0
"""Seconds between polls of all ranks.

After the first interval, an order from a killed notebook can no longer be on its way to a rank.
"""
_UNREGISTERED = "it did not register with the controller: %sky_restart starts it again"
_NOT_SENT = (
    "this rank did not get the cell, for its notebook was killed while it sent it: run the cell "
    "again"
)


class RankReservation:
    """Request for some ranks; as a context manager, waits for them and releases them.

    Attributes:
        run: the run that needs the ranks, if it is a cell.
        on_wait: called once with the reservations ahead of this one, if it has to wait for long.
        check: called repeatedly during the wait; an exception from it ends the wait.
    """

    run: RunSpec | None = None
    on_wait: Callable[[Sequence[RankReservation]], None] = staticmethod(lambda others: None)
    check: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, scheduler: Scheduler, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        self._scheduler = scheduler

    def __enter__(self) -> RankReservation:
        self._scheduler.acquire(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.release(self)


class Scheduler:
    """Queue of runs that wait for their ranks.

    All ranks of a reservation are acquired at once, so that no two reservations can deadlock.
    """

    def __init__(self) -> None:
        self._held: list[RankReservation] = []
        self._queue: list[RankReservation] = []
        self._changed = threading.Condition()
        self._last_chosen = -1

    def request(self, ranks: Iterable[int], *, urgent: bool = False) -> RankReservation:
        """Add a reservation to the end of the queue, or to its front if `urgent`; do not wait."""
        reservation = RankReservation(self, frozenset(ranks))
        with self._changed:
            self._queue.insert(0 if urgent else len(self._queue), reservation)
        return reservation

    def acquire(self, reservation: RankReservation) -> None:
        """Wait until no earlier reservation needs one of these ranks.

        An interrupt cancels the reservation.
        """
        notified = False
        try:
            while not self._take(reservation):
                reservation.check()
                if not notified:
                    notified = True
                    logger.info("run waits for its ranks: ranks=%s", sorted(reservation.ranks))
                    reservation.on_wait(self._before(reservation))
        except BaseException:
            self.release(reservation)
            raise

    def _take(self, reservation: RankReservation) -> bool:
        """Wait briefly for the ranks, and return True if the reservation has them."""
        with self._changed:
            if self._before(reservation):
                self._changed.wait(WAKE_INTERVAL)
            if self._before(reservation):
                return False
            self._queue.remove(reservation)
            self._held.append(reservation)
            logger.debug("ranks are reserved: ranks=%s", sorted(reservation.ranks))
            return True

    def release(self, reservation: RankReservation) -> None:
        """Cancel a reservation, or release its ranks; safe to call twice."""
        with self._changed:
            for reservations in (self._queue, self._held):
                if reservation in reservations:
                    reservations.remove(reservation)
            self._changed.notify_all()

    def runs(self) -> list[RunSpec]:
        """List the runs that hold their ranks, then the runs in the queue."""
        with self._changed:
            reservations = [*self._held, *self._queue]
        return [reservation.run for reservation in reservations if reservation.run is not None]

    def least_loaded(self, world_size: int, count: int = 1) -> list[int]:
        """Return the `count` ranks with the fewest reservations, held or queued.

        Ties are broken round-robin.
        """
        with self._changed:
            reservations = [*self._held, *self._queue]
            load = [
                sum(rank in reservation.ranks for reservation in reservations)
                for rank in range(world_size)
            ]
            ranks = sorted(
                range(world_size),
                key=lambda rank: (load[rank], (rank - self._last_chosen - 1) % world_size),
            )
            self._last_chosen = ranks[:count][-1]
            return ranks[:count]

    def _before(self, reservation: RankReservation) -> list[RankReservation]:
        """List the reservations ahead of this one that share a rank with it."""
        with self._changed:
            before = [*self._held, *self._queue[: self._queue.index(reservation)]]
            return [other for other in before if not other.ranks.isdisjoint(reservation.ranks)]


def _not_kept(rank: int, seq: int) -> None:
    """Do not record the display progress of an order that is not a run."""


UNSENT = Outcome(failure=Failure("CellNotSent", _NOT_SENT, (_NOT_SENT,)))


@dataclass(eq=False, repr=False)
class Following:
    """Polls ranks for their outcomes on a separate thread while the run is awaited (`with`).

    Ranks whose output has ended are polled at once. All others are polled every few seconds, to
    catch ranks whose notebook was killed before it sent them the cell, and ranks whose last output
    was lost.
    """

    _submission: Submission
    _agents: Agents
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: set[int] = field(default_factory=set)
    """Ranks whose output has ended and that were not asked for their outcome yet."""
    _over: bool = False

    def __enter__(self) -> Following:
        threading.Thread(target=self._ask, name="skymagic-follow", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def ended(self, rank: int) -> None:
        """Record that the rank's output has ended."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify()

    def _ask(self) -> None:
        waiting = {*self._submission.ranks}
        next_poll = time.monotonic() + LOOK_INTERVAL
        while (ended := self._wait(next_poll)) is not None:
            if ended & waiting:
                waiting -= self._told(ended & waiting, OUTCOME_TIMEOUT)
            if time.monotonic() >= next_poll:
                # LOOK_INTERVAL bounds how long a silent rank can delay the outcomes of the others
                waiting -= self._told(waiting, LOOK_INTERVAL, unsent=True)
                next_poll = time.monotonic() + LOOK_INTERVAL

    def _wait(self, until: float) -> set[int] | None:
        """Wait until a rank's output ends or `until` (as of `time.monotonic`) has passed.

        Returns:
            The ranks whose output has ended, or None if the run is over.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._ended, max(0.0, until - time.monotonic())
            )
            ended, self._ended = self._ended, set()
            return None if self._over else ended

    def _told(self, ranks: set[int], timeout: float, *, unsent: bool = False) -> set[int]:
        """Ask these ranks for their outcomes and pass the outcomes to the run.

        Args:
            unsent: treat ranks that do not have the cell by now as ranks that never will.

        Returns:
            The ranks that have ended.
        """
        run, finished = self._submission, set[int]()
        for rank, recalled in self._agents.ask(ranks, RECALL, timeout).items():
            if recalled is None:
                continue  # the rank does not answer
            number, outcome = recalled.run, recalled.outcome
            if number > run.number or (number and outcome is None):
                continue  # the rank is still executing
            if number < run.number:
                if not unsent:
                    continue
                run.put(OutputArrived(OutputComplete(rank)))
            own_outcome = outcome if number == run.number else None
            run.put(RankFinished(rank, own_outcome or UNSENT))
            finished.add(rank)
        return finished


@dataclass(eq=False, repr=False)
class Dispatch:
    """Submissions in flight, and the events that reach them."""

    _status: SharedStatus
    _resources: PoolResources
    on_late_death: Callable[[wire.RankExited], None] = lambda exited: None
    """Called on the run's thread when a rank has died and no run waits for it any more."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held briefly while the fields below change."""
    _under_way: set[Submission] = field(default_factory=set)
    _following: dict[Submission, Following] = field(default_factory=dict)
    """Submissions of runs that another notebook started."""

    def send(
        self, submission: Submission, order: Order, source: str, screen: Screen, limits: Limits
    ) -> Report:
        """Send an order to ranks that are reserved for it, and wait for them."""
        engine = self._resources.engine
        return self._run(
            submission, lambda: engine.submit(submission, order, source), screen, limits
        )

    def follow(self, submission: Submission, screen: Screen, limits: Limits) -> Report:
        """Continue a run that another notebook started, from where its display stopped.

        Waits for the run's ranks.
        """
        shown = self._status.shown.read(submission.number)
        submission.repeated = Repeated({rank: seq for rank, (_, seq) in shown.items()})
        agents = self._resources.agents
        positions = {rank: max(0, shown.get(rank, (0, 0))[0]) for rank in submission.ranks}
        with Following(submission, agents) as following:
            self._following[submission] = following
            try:
                return self._run(submission, lambda: agents.follow(positions), screen, limits)
            finally:
                del self._following[submission]

    def _run(
        self, submission: Submission, begin: Callable[[], object], screen: Screen, limits: Limits
    ) -> Report:
        agents = self._resources.agents
        shown, number = self._status.shown, submission.number
        on_begin = partial(shown.begin, number) if number else _not_kept
        on_mark = partial(shown.mark, number) if number else _not_kept
        try:
            self._status.lifetime.begin(id(submission))
            with agents.busy(submission.ranks):
                self._begin(submission, begin)
                is_left = self._left if number and self._status.plan.outlives else None
                loop = RunLoop(submission, agents, screen, limits, on_begin, on_mark, is_left)
                report = loop.wait()
            if report.closed and self._status.closed is not None:
                raise PoolError(self._status.closed, code="pool-closed", names=[self._status.name])
            if report.left_running:
                name = self._status.name
                raise RunInterrupted(
                    f"the kernel was shut down, and the ranks keep running: %sky_attach {name} "
                    "continues with this cell",
                    code="kernel-shut-down",
                    names=[name],
                )
        finally:
            self._status.lifetime.end(id(submission), now())
            with self._lock:
                self._under_way.discard(submission)
        for death in submission.unread(RankDeath):  # died after reporting the outcome
            self.on_late_death(death.exited)
        for note in submission.unread(PoolNote):
            self._status.note(note.text)
        self._resources.engine.purge(submission)
        return report

    def _left(self) -> bool:
        """Return True if this kernel shuts down and leaves the pool to the next one.

        See `Pool.stays`.
        """
        stays = self._status.plan.request.detached or live.is_restarting()
        return stays and live.is_shutting_down()

    def _begin(self, submission: Submission, begin: Callable[[], object]) -> None:
        # Register before checking the ranks, so that a death in between is reported twice rather
        # than never.
        with self._lock:
            self._status.check_ended()
            self._under_way.add(submission)
        unbound = self._resources.engine.unbound(submission.ranks)
        for rank in submission.ranks:
            state = self._resources.agents.ranks[rank]
            exited = state.exited
            if exited is None and rank in unbound:
                exited = wire.RankExited(rank, state.pid or 0, None, False, tail=_UNREGISTERED)
            if exited is not None:
                submission.put(RankDeath(exited))
        begin()

    def shown(self, output: wire.Output) -> None:
        """Show output of a rank whose run another notebook started. Called on a link's thread."""
        with self._lock:
            current = next(
                (submission for submission in self._under_way if output.rank in submission.ranks),
                None,
            )
        if current is None:
            return
        for piece in current.repeated.take(output):
            current.put(OutputArrived(piece))
        following = self._following.get(current)
        if isinstance(output, OutputComplete) and following is not None:
            following.ended(output.rank)

    def rank_died(self, exited: wire.RankExited) -> bool:
        """Report a rank's death to the run that waits for it. Return False if no run does."""
        with self._lock:
            current = next(
                (submission for submission in self._under_way if exited.rank in submission.ranks),
                None,
            )
            if current is not None:
                current.put(RankDeath(exited))
        return current is not None

    def ranks_lost(self, ranks: Iterable[int], reason: str, *, expected: bool = False) -> bool:
        """Report these ranks as unreachable to all runs. Return False without a run in progress."""
        with self._lock:
            under_way = list(self._under_way)
        for current in under_way:
            for rank in {*current.ranks} & {*ranks}:
                exited = wire.RankExited(rank, 0, None, expected, tail=reason)
                current.put(RankDeath(exited))
        return bool(under_way)

    def end(self, reason: str) -> None:
        """Refuse further submissions because the pool has ended by itself."""
        with self._lock:
            self._status.ended = reason

    def close(self, reason: str) -> None:
        """End all submissions with a PoolError and refuse new ones, because the pool ends.

        The end may be here or elsewhere. Without this, runs would wait for outcomes that never
        arrive. The first reason counts; safe to call twice.
        """
        with self._lock:
            if self._status.ended is not None:
                return
            self._status.closed = self._status.closed or reason
            for current in self._under_way:
                current.put(PoolClosed())

    def note(self, text: str) -> bool:
        """Show a line in all runs. Return False without a run in progress.

        Orders that are not runs show nothing.
        """
        with self._lock:
            runs = [current for current in self._under_way if current.number]
            for current in runs:
                current.put(PoolNote(text))
            return bool(runs)
