"""Equal lines of many ranks as one: "ranks 0–63: epoch 3"; pure, the caller brings the time.

A line waits for the same line of other ranks: a moment, and somewhat longer for one that has come and stands behind another line
of its rank. A rank's own lines stay in their order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MANY = 8
"""Ranks that are shown from which equal lines are one; those of fewer have a line each, as soon as it has ended."""
WAIT, LONGEST_WAIT = 0.3, 1.0
"""Seconds that a line waits for those that have not come, and for those that have."""

NEVER, ANY = float("-inf"), float("inf")

Stream = tuple[int, str]
"""A rank and the name of its stream."""
Line = tuple[str, str]
"""The name of a stream, and a line of it."""


@dataclass(frozen=True)
class Folded:
    """A line, and the ranks that have written it, in order."""

    name: str
    ranks: tuple[int, ...]
    text: str


@dataclass
class _Group:
    """Ranks whose next line is the same."""

    ranks: list[int] = field(default_factory=list)
    since: float = float("inf")
    """When the first of them came."""


class Folding:
    """Lines of several ranks, of which equal ones leave together.

    Args:
        ranks: those that are shown; a line that all of them have written waits no longer.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = len(ranks)
        self._waiting: dict[Stream, deque[tuple[str, float]]] = {}
        self._come: dict[Line, Counter[int]] = {}
        """Who has such a line waiting, how often."""
        self._groups: dict[Line, _Group] = {}
        """By the next line of each stream."""

    def add(self, stream: Stream, lines: Sequence[str], now: float) -> list[Folded]:
        """Lines of a stream have ended; what all ranks have written by now."""
        rank, name = stream
        waiting = self._waiting.setdefault(stream, deque())
        first = not waiting
        waiting.extend((line, now) for line in lines)
        for line in lines:
            self._come.setdefault((name, line), Counter())[rank] += 1
        return self._leave([self._next(stream)], NEVER, NEVER) if first and waiting else []

    def due(self, now: float) -> list[Folded]:
        """What has waited long enough."""
        return self._leave(list(self._groups), now - WAIT, now - LONGEST_WAIT)

    def all(self) -> list[Folded]:
        """What waits, now that something else follows."""
        left = self._leave(list(self._groups), ANY, NEVER)
        while self._groups:  # they wait for each other
            left += self._leave([next(iter(self._groups))], ANY, ANY)
            left += self._leave(list(self._groups), ANY, NEVER)
        return left

    def _next(self, stream: Stream) -> Line:
        """Put a stream's next line to those that are the same."""
        rank, name = stream
        text, since = self._waiting[stream][0]
        group = self._groups.setdefault((name, text), _Group())
        group.ranks.append(rank)
        group.since = min(group.since, since)
        return name, text

    def _leave(self, lines: Collection[Line], alone: float, before: float) -> list[Folded]:
        """Those of these lines that all ranks have, and of those that are next then.

        Args:
            alone: and what came before this time, where nobody else has it waiting. before: where somebody has.
        """
        todo, left = deque(lines), list[Folded]()
        while todo:
            group = self._groups.get(line := todo.popleft())
            if group is None:
                continue
            more = len(self._come[line]) > len(group.ranks)
            if len(group.ranks) == self._ranks or group.since <= (before if more else alone):
                del self._groups[line]
                left.append(Folded(line[0], tuple(sorted(group.ranks)), line[1]))
                todo.extend(self._after(line, group.ranks))
        return left

    def _after(self, line: Line, ranks: Collection[int]) -> list[Line]:
        """The next lines of streams whose last one leaves."""
        come = self._come[line]
        for rank in ranks:
            self._waiting[rank, line[0]].popleft()
            come[rank] -= 1
            if not come[rank]:
                del come[rank]
        if not come:
            del self._come[line]
        return [self._next((rank, line[0])) for rank in ranks if self._waiting[rank, line[0]]]
