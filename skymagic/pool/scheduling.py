"""FIFO scheduling of runs over ranks: those that share a rank follow each other in the order of their requests; others run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from skymagic.run.spec import RunSpec

WAKE_INTERVAL = 0.5
"""Seconds after which a wait wakes up: Python may sleep through an interrupt that comes just before it waits."""


class Reservation:
    """A request for some ranks; as a context manager it waits for them and gives them back.

    Attributes:
        run: what they are wanted for, if it is a cell.
        on_wait: called once, with those that it has to wait for, when that takes long.
        check: called now and then while it waits; what it raises ends that.
    """

    run: RunSpec | None = None
    on_wait: Callable[[Sequence[Reservation]], None] = staticmethod(lambda others: None)
    check: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, scheduler: Scheduler, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        self._scheduler = scheduler

    def __enter__(self) -> Reservation:
        self._scheduler.acquire(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.release(self)


class Scheduler:
    """The queue in which runs wait. All ranks of a reservation are acquired at once, so that no two can deadlock."""

    def __init__(self) -> None:
        self._held: list[Reservation] = []
        self._queue: list[Reservation] = []
        self._changed = threading.Condition()
        self._last_chosen = -1

    def request(self, ranks: Iterable[int], *, urgent: bool = False) -> Reservation:
        """A place at the end of the queue, or at its head; returns at once."""
        reservation = Reservation(self, frozenset(ranks))
        with self._changed:
            self._queue.insert(0 if urgent else len(self._queue), reservation)
        return reservation

    def acquire(self, reservation: Reservation) -> None:
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

    def _take(self, reservation: Reservation) -> bool:
        """Whether it has its ranks now; waits a moment for them."""
        with self._changed:
            if self._before(reservation):
                self._changed.wait(WAKE_INTERVAL)
            if self._before(reservation):
                return False
            self._queue.remove(reservation)
            self._held.append(reservation)
            return True

    def release(self, reservation: Reservation) -> None:
        """It is over, or no longer wanted; twice is safe."""
        with self._changed:
            for reservations in (self._queue, self._held):
                if reservation in reservations:
                    reservations.remove(reservation)
            self._changed.notify_all()

    def least_loaded(self, world_size: int, count: int = 1) -> list[int]:
        """The `count` ranks that the fewest reservations hold or wait for; ties are broken round-robin."""
        with self._changed:
            every = [*self._held, *self._queue]
            load = [sum(rank in reservation.ranks for reservation in every) for rank in range(world_size)]
            chosen = sorted(
                range(world_size), key=lambda rank: (load[rank], (rank - self._last_chosen - 1) % world_size)
            )
            self._last_chosen = chosen[:count][-1]
            return chosen[:count]

    def _before(self, reservation: Reservation) -> list[Reservation]:
        """Those that have, or get first, a rank that it needs."""
        with self._changed:
            before = [*self._held, *self._queue[: self._queue.index(reservation)]]
            return [other for other in before if not other.ranks.isdisjoint(reservation.ranks)]
