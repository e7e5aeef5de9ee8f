"""Dispatch orders to ranks.

Holds the queue in front of the ranks, and passes each output, outcome and death of a rank on to the
run that waits for it. A run that another notebook started is continued under the same identity, so
that its output and outcomes take the same path.

Runs that share a rank execute in the order of their requests (FIFO); other runs execute in
parallel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from skymagic.cluster.agents import RequestResult
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
    Submission,
)
from skymagic.wire import agent as wire
from skymagic.wire.order import Order
from skymagic.wire.outcome import Failure, Outcome
from skymagic.wire.output import OutputComplete
from skymagic.wire.typed import read

logger = logging.getLogger(__name__)

WAKE_INTERVAL = 0.5
"""Seconds between wake-ups of a wait.

Python may sleep through an interrupt that arrives just before it starts to wait.
"""
_NOT_SENT = (
    "this rank did not get the cell, because the notebook was killed while sending it: run the "
    "cell again"
)


class RankReservation:
    """Request for some ranks. As a context manager, it waits for them and releases them.

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


UNSENT = Outcome(failure=Failure("CellNotSent", _NOT_SENT, (_NOT_SENT,)))
"""Outcome of a rank that never got the cell."""


def _outcome(message: wire.OrderFinished) -> Outcome:
    """Return a rank's outcome; one that cannot be read counts as a failure of the rank.

    The run must not wait for a rank that has replied.
    """
    try:
        return read(Outcome, message.outcome)
    except ValueError as problem:
        logger.warning("outcome cannot be read: rank=%s request=%s", message.rank, message.request)
        return Outcome(failure=Failure("RankFailed", f"{problem}"))


@dataclass(eq=False, repr=False)
class Dispatch:
    """Submissions in flight, and the events that reach them."""

    _status: SharedStatus
    _resources: PoolResources
    on_late_death: Callable[[wire.RankExited], None] = lambda exited: None
    """Called on the run's thread when a rank has died and no run waits for it any more."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held briefly while the fields below change."""
    _under_way: dict[str, Submission] = field(default_factory=dict)
    """Submissions by the identity of their requests."""

    def send(
        self, submission: Submission, order: Order, source: str, screen: Screen, limits: Limits
    ) -> Report:
        """Send an order to ranks that are reserved for it, and wait for them."""
        execute = self._resources.agents.execute
        return self._run(
            submission,
            lambda: execute(submission.ranks, submission.request, order, source, submission.number),
            screen,
            limits,
        )

    def follow(self, submission: Submission, screen: Screen, limits: Limits) -> Report:
        """Continue a run that another notebook started, from where its display stopped.

        Waits for the run's ranks.
        """
        follow = self._resources.agents.follow
        return self._run(
            submission, lambda: follow(submission.request, submission.ranks), screen, limits
        )

    def _run(
        self, submission: Submission, begin: Callable[[], object], screen: Screen, limits: Limits
    ) -> Report:
        agents = self._resources.agents
        # Only runs can be followed by another notebook: orders are those of this one. Without such
        # a notebook no output is acknowledged, because nobody would ask for the rest.
        is_lasting = submission.number > 0 and self._status.plan.outlives
        acknowledge = partial(agents.acknowledge, submission.request) if is_lasting else None
        try:
            submission.on_read = agents.grant
            self._status.lifetime.begin(id(submission))
            with agents.busy(submission.ranks):
                self._begin(submission, begin)
                is_left = self._left if is_lasting else None
                loop = RunLoop(submission, agents, screen, limits, acknowledge, is_left)
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
                self._under_way.pop(submission.request, None)
            # reads the rest of the output, and thereby grants the agents credit for it
            submission.unread(OutputArrived)
        for death in submission.unread(RankDeath):  # died after reporting the outcome
            self.on_late_death(death.exited)
        for note in submission.unread(PoolNote):
            self._status.note(note.text)
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
            self._under_way[submission.request] = submission
        agents = self._resources.agents
        for rank in submission.ranks:
            if (exited := agents.ranks[rank].exited) is not None:
                is_lost = agents.specs[rank][0] in agents.gone
                submission.put(RankDeath(exited, output_follows=not is_lost))
        begin()

    def received(self, message: RequestResult) -> None:
        """Pass output or an outcome on to its run. Called on a link's thread.

        What belongs to no run here is dropped: after a takeover, it is sent again once the run is
        followed.
        """
        submission = self._under_way.get(message.request)
        if submission is None:
            logger.debug("result of an unknown request: request=%s", message.request)
            if isinstance(message, wire.Output):
                self._resources.agents.grant(message)
            return
        match message:
            case wire.OrderFinished():
                submission.put(RankFinished(message.rank, _outcome(message)))
            case wire.RequestUnknown():
                submission.put(OutputArrived(OutputComplete(message.rank)))
                submission.put(RankFinished(message.rank, UNSENT))
            case _:
                submission.put(OutputArrived(message))

    def rank_died(self, exited: wire.RankExited) -> bool:
        """Report a rank's death to the run that waits for it. Return False if no run does."""
        with self._lock:
            under_way = self._under_way.values()
            current = next((run for run in under_way if exited.rank in run.ranks), None)
            if current is not None:
                current.put(RankDeath(exited))
        return current is not None

    def ranks_lost(self, ranks: Iterable[int], reason: str, *, expected: bool = False) -> bool:
        """Report these ranks as unreachable to all runs. Return False without a run in progress."""
        with self._lock:
            under_way = list(self._under_way.values())
        for current in under_way:
            for rank in {*current.ranks} & {*ranks}:
                exited = wire.RankExited(rank, 0, None, expected, tail=reason)
                current.put(RankDeath(exited, output_follows=False))
        return bool(under_way)

    def end(self, reason: str) -> None:
        """Refuse further submissions because the pool has ended by itself."""
        with self._lock:
            self._status.ended = reason

    def close(self, reason: str) -> None:
        """End all submissions with a PoolError and refuse new ones, because the pool ends.

        This notebook may have ended it, or another process. Without this, runs would wait for
        outcomes that never arrive. The first reason is kept. Safe to call twice.
        """
        with self._lock:
            if self._status.ended is not None:
                return
            self._status.closed = self._status.closed or reason
            for current in self._under_way.values():
                current.put(PoolClosed())

    def note(self, text: str) -> bool:
        """Show a line in all runs. Return False without a run in progress.

        Orders that are not runs show nothing.
        """
        with self._lock:
            runs = [current for current in self._under_way.values() if current.number]
            for current in runs:
                current.put(PoolNote(text))
            return bool(runs)
