"""Scheduling: runs that share a rank follow each other, others go side by side, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from skymagic.pool.dispatch import RankReservation, Scheduler


class Waiting:
    """A thread that waits for a reservation; `came` is set when it has it."""

    def __init__(self, scheduler: Scheduler, reservation: RankReservation) -> None:
        self.came, self._over = threading.Event(), threading.Event()
        self._reservation = reservation
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._reservation:
            self.came.set()
            self._over.wait(10)

    def end(self) -> None:
        self._over.set()
        self._thread.join(10)


def test_reservations_of_different_ranks_go_side_by_side() -> None:
    scheduler = Scheduler()
    with scheduler.request([0]), scheduler.request([1, 2]), scheduler.request([3]):
        pass


def test_reservation_waits_for_earlier_ones_of_its_ranks() -> None:
    scheduler = Scheduler()
    with scheduler.request([0, 1]):
        second = Waiting(scheduler, scheduler.request([1, 2]))
        third = Waiting(
            scheduler, scheduler.request([2])
        )  # free, but asked for before by one that waits
        with scheduler.request([3]):
            assert not second.came.is_set()
            assert not third.came.is_set()
    assert second.came.wait(10)
    assert not third.came.is_set()
    second.end()
    assert third.came.wait(10)
    third.end()


def test_urgent_reservation_precedes_waiting_ones() -> None:
    scheduler = Scheduler()
    with scheduler.request([0]):
        late = Waiting(scheduler, scheduler.request([0]))
        urgent = Waiting(scheduler, scheduler.request([0, 1], urgent=True))
    assert urgent.came.wait(10)
    assert not late.came.is_set()
    urgent.end()
    assert late.came.wait(10)
    late.end()


def test_a_reservation_that_is_given_up_is_in_nobodys_way() -> None:
    scheduler = Scheduler()
    first = scheduler.request([0])
    first.__enter__()
    scheduler.release(scheduler.request([0]))
    scheduler.release(first)
    scheduler.release(first)
    with scheduler.request([0]):
        pass


def test_an_interrupt_while_waiting_gives_the_reservation_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler()

    def pressed(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with scheduler.request([0]):
        waiting = scheduler.request([0])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler._changed, "wait", pressed)
            with pytest.raises(KeyboardInterrupt):
                scheduler.acquire(waiting)
    with scheduler.request([0]):
        pass


def test_least_loaded_ranks_are_chosen_round_robin() -> None:
    scheduler = Scheduler()
    assert [scheduler.least_loaded(3)[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_busy_ranks_are_chosen_last() -> None:
    scheduler = Scheduler()
    with scheduler.request([1, 2]):
        scheduler.request([2])
        assert scheduler.least_loaded(4, 4)[2:] == [1, 2]
        assert sorted(scheduler.least_loaded(4, 2)) == [0, 3]
