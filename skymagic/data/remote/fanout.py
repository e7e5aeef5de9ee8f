"""Who gets a value from whom: pure decisions on a chain of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

UPLINK = -1
"""The source of a node that gets a value from the notebook."""
KEPT = -2
"""The source of a node that found a value among those that an earlier pool has left."""


@dataclass
class Spread:
    """Where one value is."""

    here: set[int] = field(default_factory=set)
    """Nodes that have it."""
    coming: dict[int, int] = field(default_factory=dict)
    """Node → the one that it gets it from."""
    failed: dict[int, list[int]] = field(default_factory=dict)
    """Node → those that it could not get it from."""

    def landed(self, node: int) -> None:
        """A node has all of it."""
        self.coming.pop(node, None)
        self.here.add(node)

    def stopped(self, node: int) -> None:
        """A node got no more from its source."""
        source = self.coming.pop(node, None)
        if source is not None:
            self.failed.setdefault(node, []).append(source)

    def lost(self, node: int) -> None:
        """Nobody knows what a node has; those that follow it need another, which is not their mistake."""
        self.here.discard(node)
        for each in [node, *(other for other, source in self.coming.items() if source == node)]:
            self.coming.pop(each, None)

    def origin(self, node: int) -> list[int]:
        """The node, what it follows, what that one follows…"""
        line = [node]
        while (source := self.coming.get(line[-1])) is not None and source >= 0 and source not in line:
            line.append(source)
        return line


def orders(spread: Spread, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(node, source) for each node that neither has a value nor is getting it; whom the notebook serves comes last.

    The nodes form a chain: each follows the one before it, so that the notebook's own connection carries a value once.
    A node whose source has failed follows the first of those that have the value; when all have failed twice, the notebook.

    Args:
        nodes: those that can be reached, in the order of the chain.
    """
    plan = Spread(set(spread.here), dict(spread.coming), spread.failed)
    found: list[tuple[int, int]] = []
    for node in nodes:
        if node not in plan.here and node not in plan.coming:
            source = _source(plan, node, [other for other in nodes if other != node])
            plan.coming[node] = source
            found.append((node, source))
    return sorted(found, key=lambda order: order[1] == UPLINK)


def _source(plan: Spread, node: int, others: list[int]) -> int:
    failed = plan.failed.get(node, [])
    able = [
        other
        for other in others
        if failed.count(other) < 2
        and (other in plan.here or (other in plan.coming and node not in plan.origin(other)))
    ]
    if not able:
        return UPLINK
    if failed:
        return min(able, key=lambda other: (failed.count(other), other not in plan.here, other))
    return max((other for other in able if other < node), default=able[0])


def victims(files: Iterable[tuple[str, int]], room: int, nbytes: int) -> list[str]:
    """Which files to give up, the oldest first, so that a value fits; none where that does not help.

    Args:
        files: key and length of those that may go, the oldest first.
        room: bytes that are free.
        nbytes: bytes that are needed.
    """
    found = []
    for key, length in files:
        if room >= nbytes:
            break
        found.append(key)
        room += length
    return found if room >= nbytes else []
