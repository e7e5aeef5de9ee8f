"""Chain replication: which node gets a value from which other one; pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NOTEBOOK = -1
"""The source of a node that gets a value over the notebook's own connection."""
LOCAL = -2
"""The source of a node that makes a value of what lies there: what an earlier pool has left, or pieces of other values."""


@dataclass
class Placement:
    """Where one value is, and on its way to."""

    here: set[int] = field(default_factory=set)
    """Nodes that have it."""
    sources: dict[int, int] = field(default_factory=dict)
    """Node that is getting it → the one that it gets it from."""
    failed: dict[int, list[int]] = field(default_factory=dict)
    """Node → those that it could not get it from."""

    def arrived(self, node: int) -> None:
        """A node has all of it."""
        self.sources.pop(node, None)
        self.here.add(node)

    def stopped(self, node: int) -> None:
        """A node got no more from its source."""
        source = self.sources.pop(node, None)
        if source is not None:
            self.failed.setdefault(node, []).append(source)

    def disconnected(self, node: int) -> None:
        """What a node has is unknown; those that follow it need another source, and it counts as no failure of theirs."""
        self.here.discard(node)
        for each in [node, *(other for other, source in self.sources.items() if source == node)]:
            self.sources.pop(each, None)

    def upstream(self, node: int) -> list[int]:
        """The node, its source, the source of that one…"""
        chain = [node]
        while (source := self.sources.get(chain[-1])) is not None and source >= 0 and source not in chain:
            chain.append(source)
        return chain


def assign_sources(placement: Placement, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(node, source) for each node that neither has a value nor is getting it; whom the notebook serves comes last.

    The nodes form a chain: each follows the one before it, so that the notebook's own connection carries a value once.
    A node whose source has failed follows the first of those that have the value; when all have failed twice, the notebook.

    Args:
        nodes: those that can be reached, in the order of the chain.
    """
    plan = Placement(set(placement.here), dict(placement.sources), placement.failed)
    found: list[tuple[int, int]] = []
    for node in nodes:
        if node not in plan.here and node not in plan.sources:
            source = _source(plan, node, [other for other in nodes if other != node])
            plan.sources[node] = source
            found.append((node, source))
    return sorted(found, key=lambda each: each[1] == NOTEBOOK)


def _source(plan: Placement, node: int, others: list[int]) -> int:
    failed = plan.failed.get(node, [])
    able = [
        other
        for other in others
        if failed.count(other) < 2
        # not one that waits, over whatever chain, for this node: they would wait for each other
        and (other in plan.here or (other in plan.sources and node not in plan.upstream(other)))
    ]
    if not able:
        return NOTEBOOK
    if failed:
        return min(able, key=lambda other: (failed.count(other), other not in plan.here, other))
    return max((other for other in able if other < node), default=able[0])
