"""Memory that values refer to: find shared memory, which travels as one block."""

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
"""A storage is cut to the used part if the tensors in a value use less than this share of it."""


class Span(NamedTuple):
    """Range of addresses that a value uses, with its owner."""

    start: int
    stop: int
    owner: int
    """Identity of the array, or handle of the storage."""
    base: tuple[int, int] | None = None
    """Full range of the torch storage, or None for an array."""


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """Memory viewed by several objects of one value: it travels once, and they remain views."""

    start: int
    stop: int
    owner: int
    """Address of the first span, or the handle of a storage on a device."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Torch storage that consists of a block."""

    block: MemoryBlock


@dataclass
class Layout:
    """Plan of the memory of a value that must travel as common blocks."""

    blocks: Sequence[MemoryBlock]
    storages: dict[int, Storage] = field(default_factory=dict)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [block.start for block in self.blocks]

    def find(self, start: int, stop: int) -> MemoryBlock | None:
        """Return the block that covers these addresses, or None."""
        index = bisect_right(self.starts, start) - 1
        # Blocks are sorted and do not overlap: only the last one that starts there can cover them.
        block = self.blocks[index] if index >= 0 else None
        return block if block is not None and stop <= block.stop else None


def layout(spans: Iterable[Span], apart: frozenset[int] | set[int] = frozenset()) -> Layout | None:
    """Plan blocks for overlapping memory, and for storages that are mostly unused.

    Return None if no blocks are needed.

    Args:
        apart: owners that are left unchanged.
    """
    spans = list(spans)
    if _separate(spans):
        return None  # the common case, for example ten thousand small tensors
    owners: dict[int, Span] = {}
    for span in spans:
        if span.owner in apart:
            continue
        # Join all spans of one owner.
        merged = owners.get(span.owner, span)
        owners[span.owner] = Span(
            min(merged.start, span.start), max(merged.stop, span.stop), span.owner, span.base
        )
    blocks = []
    for cluster in clusters(list(owners.values())):
        # Round down, so that the views keep their alignment within the block. The bytes before the
        # span are on the same page, so they can be read.
        start, stop = cluster[0].start // _ALIGN * _ALIGN, max(span.stop for span in cluster)
        if len(cluster) > 1 or _wasteful(cluster[0], stop - start):
            blocks.append(MemoryBlock(start, stop, cluster[0].owner))
    return Layout(blocks) if blocks else None


def _separate(spans: Sequence[Span]) -> bool:
    """Return True if spans have distinct owners and no overlap, and no storage needs cutting."""
    if len({span.owner for span in spans}) != len(spans):
        return False
    if overlap(spans):
        return False
    # Cutting a small storage would not pay off.
    large = (
        span for span in spans if span.base is not None and span.base[1] - span.base[0] > SMALL
    )
    return not any(_wasteful(span, span.stop - span.start // _ALIGN * _ALIGN) for span in large)


def overlap(spans: Iterable[Span]) -> bool:
    """Return True if any of these spans share an address; their owners must be different."""
    # Neighbours suffice: if two spans overlap, so do the first of them and its successor. With
    # different owners, sorting never compares the bases, which may be None.
    return any(after.start < before.stop for before, after in pairwise(sorted(spans)))


def clusters(spans: list[Span]) -> list[list[Span]]:
    """Group overlapping spans, sorted by address."""
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
    if span.base is None:
        return False
    total = span.base[1] - span.base[0]
    return total - used > SMALL and used < total * _WASTE


def memory(start: int, stop: int) -> pickle.PickleBuffer:
    """Return raw memory by address; the caller must keep its owner alive."""
    return pickle.PickleBuffer((ctypes.c_ubyte * (stop - start)).from_address(start))


def writable(buffer: Any) -> memoryview:
    """Return the buffer itself, or a copy if it is read-only."""
    view = memoryview(buffer)
    return memoryview(bytearray(view)) if view.readonly else view


class MemoryRegion(NamedTuple):
    """Memory of an object in a pickle: an array, a torch storage, or the travelling part of one."""

    stands: Any
    start: int
    stop: int


@dataclass
class LinkedMemory:
    """Memory that the other side already has."""

    storages: dict[int, MemoryRegion] = field(default_factory=dict)
    """By the handles of torch storages."""
    arrays: list[MemoryRegion] = field(default_factory=list)

    def array(self, start: int, stop: int) -> Any:
        """Return the array that contains these addresses, or None."""
        return next(
            (
                region.stands
                for region in self.arrays
                if region.start <= start and stop <= region.stop
            ),
            None,
        )


Leaf = tuple[int, int, tuple[Any, ...]]
"""Start and end address of a small array's or tensor's elements, and the part of its content hash
that precedes them.
"""


class Tracker:
    """Record of memory seen in one pickling pass, with the layout that the pass follows.

    Args:
        follow: the layout, planned from an earlier pass.
        between_ranks: True if memory of a device goes to the other rank's device rather than its
            CPU.
        leaves_only: True to refuse tensors that are part of a computation; otherwise they are
            detached.
        linked: memory that the other side already has.
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
        """Shapes, strides and dtype names, each as one object, so that the pickle holds it once."""
        self.leaves: dict[int, Leaf] = {}
        """By identity: small contiguous arrays and tensors without gradients."""
        self.versions: dict[int, list[int | None]] = {}
        """By storage handle: torch's version counters of the tensors in the storage."""


Reduced = tuple[Any, ...] | Any
"""Result of a reducer: a reduce tuple, or NotImplemented."""
