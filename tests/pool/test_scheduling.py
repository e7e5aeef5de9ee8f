"""Turns: runs that share a rank follow each other, others go side by side, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from skymagic.pool.scheduling import Turn, Turns


class Waiting:
    """A thread that waits for a turn; `came` is set when it has it."""

    def __init__(self, turns: Turns, turn: Turn) -> None:
        self.came, self._over = threading.Event(), threading.Event()
        self._turn = turn
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._turn:
            self.came.set()
            self._over.wait(10)

    def end(self) -> None:
        self._over.set()
        self._thread.join(10)


def test_turns_on_different_ranks_go_side_by_side() -> None:
    turns = Turns()
    with turns.ask([0]), turns.ask([1, 2]), turns.ask([3]):
        pass


def test_a_turn_waits_for_those_before_it_that_share_a_rank() -> None:
    turns = Turns()
    with turns.ask([0, 1]):
        second = Waiting(turns, turns.ask([1, 2]))
        third = Waiting(turns, turns.ask([2]))  # free, but asked for before by one that waits
        with turns.ask([3]):
            assert not second.came.is_set()
            assert not third.came.is_set()
    assert second.came.wait(10)
    assert not third.came.is_set()
    second.end()
    assert third.came.wait(10)
    third.end()


def test_an_urgent_turn_goes_before_those_that_wait() -> None:
    turns = Turns()
    with turns.ask([0]):
        late = Waiting(turns, turns.ask([0]))
        urgent = Waiting(turns, turns.ask([0, 1], urgent=True))
    assert urgent.came.wait(10)
    assert not late.came.is_set()
    urgent.end()
    assert late.came.wait(10)
    late.end()


def test_a_turn_that_is_given_up_is_in_nobodys_way() -> None:
    turns = Turns()
    first = turns.ask([0])
    first.__enter__()
    turns.leave(turns.ask([0]))
    turns.leave(first)
    turns.leave(first)
    with turns.ask([0]):
        pass


def test_an_interrupt_while_waiting_gives_the_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    def pressed(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with turns.ask([0]):
        waiting = turns.ask([0])
        with monkeypatch.context() as patch:
            patch.setattr(turns._news, "wait", pressed)
            with pytest.raises(KeyboardInterrupt):
                turns.wait(waiting)
    with turns.ask([0]):
        pass


def test_the_lightest_ranks_come_in_turn() -> None:
    turns = Turns()
    assert [turns.lightest(3)[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_ranks_that_work_come_last() -> None:
    turns = Turns()
    with turns.ask([1, 2]):
        turns.ask([2])
        assert turns.lightest(4, 4)[2:] == [1, 2]
        assert sorted(turns.lightest(4, 2)) == [0, 3]
