"""FIFO scheduling of runs over ranks: those that share a rank follow each other in the order of their requests; others run side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterable

WAKE_INTERVAL = 0.5
"""Seconds after which a wait wakes up: Python may sleep through an interrupt that comes just before it waits."""


class Reservation:
    """A request for some ranks; as a context manager it waits for them and gives them back."""

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
        try:
            with self._changed:
                while not self._is_next(reservation):
                    self._changed.wait(WAKE_INTERVAL)
                self._queue.remove(reservation)
                self._held.append(reservation)
        except BaseException:
            self.release(reservation)
            raise

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

    def _is_next(self, reservation: Reservation) -> bool:
        before = [*self._held, *self._queue[: self._queue.index(reservation)]]
        return all(other.ranks.isdisjoint(reservation.ranks) for other in before)
