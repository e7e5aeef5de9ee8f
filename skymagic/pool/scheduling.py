"""Whose turn it is: runs that share a rank follow each other in the order in which they asked; others go side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterable

AWAKE = 0.5
"""Seconds after which a wait looks up: Python may sleep through an interrupt that comes just before it waits."""


class Turn:
    """One request for some ranks; as a context manager it waits for them and gives them back."""

    def __init__(self, turns: Turns, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        self._turns = turns

    def __enter__(self) -> Turn:
        self._turns.wait(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._turns.leave(self)


class Turns:
    """The line in which runs wait. All ranks of a turn are taken at once, so that no two can wait for each other."""

    def __init__(self) -> None:
        self._taken: list[Turn] = []
        self._line: list[Turn] = []
        self._news = threading.Condition()
        self._last = -1

    def ask(self, ranks: Iterable[int], *, urgent: bool = False) -> Turn:
        """A place at the end of the line, or ahead of it; returns at once."""
        turn = Turn(self, frozenset(ranks))
        with self._news:
            self._line.insert(0 if urgent else len(self._line), turn)
        return turn

    def wait(self, turn: Turn) -> None:
        """Until nobody before it needs one of its ranks. An interrupt while waiting gives the turn up."""
        try:
            with self._news:
                while not self._comes(turn):
                    self._news.wait(AWAKE)
                self._line.remove(turn)
                self._taken.append(turn)
        except BaseException:
            self.leave(turn)
            raise

    def leave(self, turn: Turn) -> None:
        """It is over, or no longer wanted; twice is safe."""
        with self._news:
            for line in (self._line, self._taken):
                if turn in line:
                    line.remove(turn)
            self._news.notify_all()

    def lightest(self, world_size: int, count: int = 1) -> list[int]:
        """The `count` ranks that the fewest turns have or wait for; those that are alike are chosen in turn."""
        with self._news:
            every = [*self._taken, *self._line]
            load = [sum(rank in turn.ranks for turn in every) for rank in range(world_size)]
            chosen = sorted(
                range(world_size), key=lambda rank: (load[rank], (rank - self._last - 1) % world_size)
            )
            self._last = chosen[:count][-1]
            return chosen[:count]

    def _comes(self, turn: Turn) -> bool:
        before = [*self._taken, *self._line[: self._line.index(turn)]]
        return all(other.ranks.isdisjoint(turn.ranks) for other in before)
