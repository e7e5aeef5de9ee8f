"""Memory that values look at: which of it is shared, and travels as one."""

from __future__ import annotations

import ctypes
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

SMALL = 16 << 10
"""Buffers below this many bytes stay in the pickle."""

_ALIGN = 16
_WASTE = 0.9
"""A storage of which the tensors in a value use less than this part is cut to the part in use."""


class Span(NamedTuple):
    """Memory that a value uses: addresses, and what owns them."""

    start: int
    stop: int
    owner: int
    """Identity of the array, or the storage's handle."""
    whole: tuple[int, int] | None = None
    """A torch storage's full range; None for an array."""


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """Memory that several objects of one value look at; it travels once and they stay views of it."""

    start: int
    stop: int
    owner: int
    """Address of its first span; the handle of the storage when it lies on a device."""


@dataclass(frozen=True, eq=False)
class Storage:
    """A torch storage that consists of a block."""

    block: MemoryBlock


@dataclass
class Layout:
    """Which memory of a value must travel as common blocks."""

    blocks: Sequence[MemoryBlock]
    storages: dict[int, Storage] = field(default_factory=dict)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [block.start for block in self.blocks]

    def find(self, start: int, stop: int) -> MemoryBlock | None:
        """The block that covers these addresses."""
        index = bisect_right(self.starts, start) - 1
        block = self.blocks[index] if index >= 0 else None
        return block if block is not None and stop <= block.stop else None


def layout(spans: Iterable[Span], apart: frozenset[int] | set[int] = frozenset()) -> Layout | None:
    """Blocks for memory that overlaps, and for storages of which little is used; None when there are none.

    Args:
        apart: owners that stay as they are.
    """
    spans = list(spans)
    if _separate(spans):
        return None  # ten thousand small tensors, most often
    owners: dict[int, Span] = {}
    for span in spans:
        if span.owner in apart:
            continue
        known = owners.get(span.owner, span)
        owners[span.owner] = Span(
            min(known.start, span.start), max(known.stop, span.stop), span.owner, span.whole
        )
    blocks = []
    for cluster in clusters(list(owners.values())):
        start, stop = cluster[0].start // _ALIGN * _ALIGN, max(span.stop for span in cluster)
        if len(cluster) > 1 or _wasteful(cluster[0], stop - start):
            blocks.append(MemoryBlock(start, stop, cluster[0].owner))
    return Layout(blocks) if blocks else None


def _separate(spans: Sequence[Span]) -> bool:
    """Whether each span has an owner of its own, none overlap, and no storage is worth being cut."""
    if len({span.owner for span in spans}) != len(spans):
        return False
    if overlap(spans):
        return False
    large = (
        span for span in spans if span.whole is not None and span.whole[1] - span.whole[0] > SMALL
    )
    return not any(_wasteful(span, span.stop - span.start // _ALIGN * _ALIGN) for span in large)


def overlap(spans: Iterable[Span]) -> bool:
    """Whether any of these spans, each with an owner of its own, share an address."""
    return any(after.start < before.stop for before, after in pairwise(sorted(spans)))


def clusters(spans: list[Span]) -> list[list[Span]]:
    """Spans that overlap, together; sorted by address."""
    groups: list[list[Span]] = []
    reach = -1
    for span in sorted(spans, key=lambda span: span.start):
        if span.start < reach:
            groups[-1].append(span)
        else:
            groups.append([span])
        reach = max(reach, span.stop)
    return groups


def _wasteful(span: Span, used: int) -> bool:
    if span.whole is None:
        return False
    whole = span.whole[1] - span.whole[0]
    return whole - used > SMALL and used < whole * _WASTE


def memory(start: int, stop: int) -> pickle.PickleBuffer:
    """Raw memory by address; its owner must be kept alive by the caller."""
    return pickle.PickleBuffer((ctypes.c_ubyte * (stop - start)).from_address(start))


def writable(buffer: Any) -> memoryview:
    """The buffer itself, or a copy of one that cannot be written."""
    view = memoryview(buffer)
    return memoryview(bytearray(view)) if view.readonly else view


class MemoryRegion(NamedTuple):
    """Memory of something that stands in a pickle: an array, a torch storage, or the part of one that travels."""

    stands: Any
    start: int
    stop: int


@dataclass
class LinkedMemory:
    """Memory that the other side has already."""

    storages: dict[int, MemoryRegion] = field(default_factory=dict)
    """By the handles of torch storages."""
    arrays: list[MemoryRegion] = field(default_factory=list)

    def array(self, start: int, stop: int) -> Any:
        """The array that has these addresses; None when there is none."""
        return next(
            (each.stands for each in self.arrays if each.start <= start and stop <= each.stop), None
        )


Leaf = tuple[int, int, tuple[Any, ...]]
"""First and last address of a small array's or tensor's elements, and what its contents are called beside them."""


class Tracker:
    """What one pickling pass has learned about memory, and the layout that it follows.

    Args:
        between_ranks: memory of a device goes to the other rank's device, and not to its CPU.
        leaves_only: whether a tensor that is part of a computation is refused; otherwise its numbers travel.
        linked: memory that the other side has.
    """

    def __init__(
        self,
        follow: Layout | None = None,
        *,
        between_ranks: bool = False,
        leaves_only: bool = False,
        linked: LinkedMemory | None = None,
    ) -> None:
        self.layout = follow
        self.between_ranks = between_ranks
        self.leaves_only = leaves_only
        self.linked = linked or LinkedMemory()
        self.spans: list[Span] = []
        self.private: set[int] = set()
        self.whole: set[int] = set()
        self.storages: dict[int, Any] = {}
        self.facts: dict[Any, Any] = {}
        """Shapes, strides and names of dtypes, each as one object: the pickle has it once."""
        self.leaves: dict[
            int, Leaf
        ] = {}  # by identity: small arrays and tensors without gaps and gradients
        self.versions: dict[int, list[int | None]] = {}
        """By the handle of a storage: torch's version counters of the tensors in it."""


Reduced = tuple[Any, ...] | Any
"""What a reducer returns: a reduce tuple, or NotImplemented."""
