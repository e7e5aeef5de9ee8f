"""Orders on their way to ranks: the queue in which runs wait for their ranks, who waits for which order, so that a rank's death reaches the
run that waits for it, and how the ranks of a run end that another notebook began.

Runs that share a rank follow each other in the order of their requests (FIFO); others run side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skymagic.cluster.agents import Agents
from skymagic.display import live
from skymagic.display.screen import Screen
from skymagic.errors import PoolError, RunInterrupted
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import SharedStatus, now
from skymagic.run.report import Limits, Report, RunSpec
from skymagic.run.run import RunLoop
from skymagic.run.submission import Repeated, Submission
from skymagic.wire import agent as wire
from skymagic.wire.order import Order

WAKE_INTERVAL = 0.5
"""Seconds after which a wait wakes up: Python may sleep through an interrupt that comes just before it waits."""
OUTCOME_TIMEOUT = 10.0
"""Seconds in which a rank that has ended tells how."""
LOOK_INTERVAL = 5.0
"""Seconds after which an order of a notebook that was killed is not on its way to a rank any more; and between further looks."""
_UNREGISTERED = "it did not register with the controller: %sky_restart starts it again"
_NOT_SENT = "this rank did not get the cell, for its notebook was killed while it sent it: run the cell again"


class RankReservation:
    """A request for some ranks; as a context manager it waits for them and gives them back.

    Attributes:
        run: what they are wanted for, if it is a cell.
        on_wait: called once, with those that it has to wait for, when that takes long.
        check: called now and then while it waits; what it raises ends that.
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
    """The queue in which runs wait. All ranks of a reservation are acquired at once, so that no two can deadlock."""

    def __init__(self) -> None:
        self._held: list[RankReservation] = []
        self._queue: list[RankReservation] = []
        self._changed = threading.Condition()
        self._last_chosen = -1

    def request(self, ranks: Iterable[int], *, urgent: bool = False) -> RankReservation:
        """A place at the end of the queue, or at its head; returns at once."""
        reservation = RankReservation(self, frozenset(ranks))
        with self._changed:
            self._queue.insert(0 if urgent else len(self._queue), reservation)
        return reservation

    def acquire(self, reservation: RankReservation) -> None:
        """Wait until nobody before it needs one of its ranks. An interrupt while waiting gives the reservation up."""
        told = False
        try:
            while not self._take(reservation):
                reservation.check()
                if not told:
                    told = True
                    reservation.on_wait(self._before(reservation))
        except BaseException:
            self.release(reservation)
            raise

    def _take(self, reservation: RankReservation) -> bool:
        """Whether it has its ranks now; waits a moment for them."""
        with self._changed:
            if self._before(reservation):
                self._changed.wait(WAKE_INTERVAL)
            if self._before(reservation):
                return False
            self._queue.remove(reservation)
            self._held.append(reservation)
            return True

    def release(self, reservation: RankReservation) -> None:
        """Give a reservation up, over or not; twice is safe."""
        with self._changed:
            for reservations in (self._queue, self._held):
                if reservation in reservations:
                    reservations.remove(reservation)
            self._changed.notify_all()

    def runs(self) -> list[RunSpec]:
        """Runs that hold their ranks, then those that wait for them."""
        with self._changed:
            reservations = [*self._held, *self._queue]
        return [reservation.run for reservation in reservations if reservation.run is not None]

    def least_loaded(self, world_size: int, count: int = 1) -> list[int]:
        """The `count` ranks that the fewest reservations hold or wait for; ties are broken round-robin."""
        with self._changed:
            every = [*self._held, *self._queue]
            load = [
                sum(rank in reservation.ranks for reservation in every)
                for rank in range(world_size)
            ]
            chosen = sorted(
                range(world_size),
                key=lambda rank: (load[rank], (rank - self._last_chosen - 1) % world_size),
            )
            self._last_chosen = chosen[:count][-1]
            return chosen[:count]

    def _before(self, reservation: RankReservation) -> list[RankReservation]:
        """Reservations that hold, or get first, a rank that this one needs."""
        with self._changed:
            before = [*self._held, *self._queue[: self._queue.index(reservation)]]
            return [other for other in before if not other.ranks.isdisjoint(reservation.ranks)]


def _not_kept(rank: int, seq: int) -> None:
    """Keep nothing of how far an order was shown that is no run."""


UNSENT = {"status": "error", "ename": "CellNotSent", "evalue": _NOT_SENT, "traceback": [_NOT_SENT]}


@dataclass(eq=False, repr=False)
class Following:
    """Asks ranks for their outcomes, on a thread of its own, while the run is waited for (`with`).

    Those whose last output has come are asked at once. All others are asked every few seconds: ranks to which their notebook was killed
    before it sent the cell, and any whose last output is lost.
    """

    _submission: Submission
    _agents: Agents
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: set[int] = field(default_factory=set)
    """Ranks whose last output has come, and that were not asked yet how they have ended."""
    _over: bool = False

    def __enter__(self) -> Following:
        threading.Thread(target=self._ask, name="skymagic-follow", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def ended(self, rank: int) -> None:
        """A rank's last output has come."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify()

    def _ask(self) -> None:
        untold = {*self._submission.ranks}
        look = time.monotonic() + LOOK_INTERVAL
        while (ended := self._wait(look)) is not None:
            if ended & untold:
                untold -= self._told(ended & untold, OUTCOME_TIMEOUT)
            if time.monotonic() >= look:
                # a rank that does not answer holds up the others' ends no longer than this
                untold -= self._told(untold, LOOK_INTERVAL, unsent=True)
                look = time.monotonic() + LOOK_INTERVAL

    def _wait(self, until: float) -> set[int] | None:
        """Wait for ranks' last output, or until this time of `time.monotonic`; which it was of, None when the run is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._ended, max(0.0, until - time.monotonic())
            )
            ended, self._ended = self._ended, set()
            return None if self._over else ended

    def _told(self, ranks: set[int], timeout: float, *, unsent: bool = False) -> set[int]:
        """Ask these ranks, and tell the run how those have ended that have; which.

        Args:
            unsent: one that has not got the cell by now never will.
        """
        run, told = self._submission, set[int]()
        for rank, kept in self._agents.ask(ranks, "recall", timeout).items():
            number = kept["order"]["run"] if kept and kept["order"] else 0
            if kept is None or number > run.number or (number and kept["outcome"] is None):
                continue  # it is at work
            if number < run.number:
                if not unsent:
                    continue
                run.put("output", rank, {"kind": "end"})
            run.put("outcome", rank, kept["outcome"] if number == run.number else UNSENT)
            told.add(rank)
        return told


@dataclass(eq=False, repr=False)
class Dispatch:
    """Submissions under way, and the events that reach them."""

    _status: SharedStatus
    _resources: PoolResources
    on_late_death: Callable[[wire.RankExited], None] = lambda exited: None
    """Called when a rank died that nobody waits for any more, on the run's thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for moments, while what follows is changed."""
    _under_way: set[Submission] = field(default_factory=set)
    _following: dict[Submission, Following] = field(default_factory=dict)
    """Submissions of runs that another notebook began."""

    def send(
        self, submission: Submission, order: Order, source: str, screen: Screen, limits: Limits
    ) -> Report:
        """Have an order carried out by ranks that are reserved for it; waits for them."""
        engine = self._resources.engine
        return self._run(
            submission, lambda: engine.submit(submission, order, source), screen, limits
        )

    def follow(self, submission: Submission, screen: Screen, limits: Limits) -> Report:
        """Go on with a run that another notebook began, from where that has shown it; waits for its ranks."""
        shown = self._status.shown.read(submission.number)
        submission.repeated = Repeated({rank: begun for rank, (_, begun) in shown.items()})
        agents = self._resources.agents
        places = {rank: max(0, shown.get(rank, (0, 0))[0]) for rank in submission.ranks}
        with Following(submission, agents) as following:
            self._following[submission] = following
            try:
                return self._run(submission, lambda: agents.follow(places), screen, limits)
            finally:
                del self._following[submission]

    def _run(
        self, submission: Submission, begin: Callable[[], object], screen: Screen, limits: Limits
    ) -> Report:
        agents = self._resources.agents
        shown, number = self._status.shown, submission.number
        begun = partial(shown.begin, number) if number else _not_kept
        marked = partial(shown.mark, number) if number else _not_kept
        try:
            self._status.lifetime.begin(id(submission))
            with agents.busy(submission.ranks):
                self._begin(submission, begin)
                left = self._left if number and self._status.plan.outlives else None
                loop = RunLoop(submission, agents, screen, limits, begun, marked, left)
                report = loop.wait()
            if report.closed and self._status.closed is not None:
                raise PoolError(self._status.closed)
            if report.left:
                name = self._status.name
                raise RunInterrupted(
                    f"the kernel was shut down, and the ranks keep running: %sky_attach {name} continues with this cell"
                )
        finally:
            self._status.lifetime.end(id(submission), now())
            with self._lock:
                self._under_way.discard(submission)
        for event in submission.unread("died"):  # after its outcome
            self.on_late_death(event.content["exited"])
        for event in submission.unread("note"):
            self._status.note(event.content["text"])
        self._resources.engine.purge(submission)
        return report

    def _left(self) -> bool:
        """Whether this kernel ends, and leaves the pool to the next one (`Pool.stays`)."""
        stays = self._status.plan.request.detached or live.restarting()
        return stays and live.shutting_down()

    def _begin(self, submission: Submission, begin: Callable[[], object]) -> None:
        # Registered before the ranks are looked at, so that a death in between is reported twice rather than never.
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
                submission.put("died", rank, {"exited": exited})
        begin()

    def shown(self, rank: int, content: Mapping[str, Any]) -> None:
        """A rank of a run that another notebook began shows something, on a link's thread."""
        with self._lock:
            current = next((each for each in self._under_way if rank in each.ranks), None)
        if current is None:
            return
        for one in current.repeated.take(rank, content):
            current.put("output", rank, one)
        following = self._following.get(current)
        if content["kind"] == "end" and following is not None:
            following.ended(rank)

    def rank_died(self, exited: wire.RankExited) -> bool:
        """Report a rank's death to the run that waits for it; False if there is none."""
        with self._lock:
            current = next((each for each in self._under_way if exited.rank in each.ranks), None)
            if current is not None:
                current.put("died", exited.rank, {"exited": exited})
        return current is not None

    def ranks_lost(self, ranks: Iterable[int], reason: str, *, expected: bool = False) -> bool:
        """Report to all runs that these ranks are out of reach; False if there are no runs."""
        with self._lock:
            under_way = list(self._under_way)
        for current in under_way:
            for rank in {*current.ranks} & {*ranks}:
                current.put(
                    "died", rank, {"exited": wire.RankExited(rank, 0, None, expected, tail=reason)}
                )
        return bool(under_way)

    def end(self, reason: str) -> None:
        """Refuse submissions from now on: the pool has ended by itself."""
        with self._lock:
            self._status.ended = reason

    def close(self, reason: str) -> None:
        """End all submissions with a PoolError and refuse new ones, because the pool is ended, here or elsewhere; twice is safe.

        Whoever waits for a submission would otherwise wait for outcomes that nobody sends any more. The first reason counts.
        """
        with self._lock:
            if self._status.ended is not None:
                return
            self._status.closed = self._status.closed or reason
            for current in self._under_way:
                current.put("closed", -1)

    def note(self, text: str) -> bool:
        """Have all runs show a line; whether there is one. Orders that are no runs show nothing."""
        with self._lock:
            runs = [current for current in self._under_way if current.number]
            for current in runs:
                current.put("note", -1, {"text": text})
            return bool(runs)
