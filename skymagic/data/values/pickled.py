"""A pickled value: its stream, its buffers, and what was learned about it on the way."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from skymagic.data.store.base import Buffer
from skymagic.data.store.device import DeviceBytes
from skymagic.data.values.memory import Span

CONTAINERS = (list, dict, set, bytearray)
"""Python's own types whose objects can change."""


class Pickled(NamedTuple):
    """A value ready to be written: the pickle's pieces, then the buffers that it refers to."""

    pieces: tuple[Buffer, ...]
    """The pickle stream; large byte strings by reference."""
    buffers: tuple[memoryview | DeviceBytes, ...]
    """Out-of-band memory, 1-dimensional bytes, in the order of the pickle."""
    modules: frozenset[str] = frozenset()
    """Modules of the notebook's folder that it refers to."""
    packages: frozenset[str] = frozenset()
    """Top-level packages that it refers to."""
    required: frozenset[str] = frozenset()
    """Modules of elsewhere, dotted, without which it cannot be rebuilt and used: no ``try`` is around them."""
    uses: Mapping[str, str] = types.MappingProxyType({})
    """Names of the namespace that its functions use, with the name of a function that does."""
    hints: Mapping[str, str] = types.MappingProxyType({})
    """Types of the namespace that its string annotations name, with the name of an annotated function or class."""
    attributes: frozenset[str] = frozenset()
    """Attribute names in its functions' code."""
    files: frozenset[str] = frozenset()
    """File names of its functions' code."""
    marks: frozenset[int] | None = frozenset()
    """Identities of the changeable objects in it, as long as ``keep`` lives; None where nobody has looked yet."""
    spans: tuple[Span, ...] = ()
    """Memory that it looks at."""
    keep: Any = None
    """Holds everything that the pickle refers to."""
    code: bool = False
    """Whether it holds code that this process has compiled."""
    wrappers: bool = False
    """Whether it holds a wrapper around the process group, on its way to another rank."""
    active: bool = False
    """Whether its rebuilding may run the notebook's code: ``__setstate__``, ``__hash__``, what ``__reduce__`` names."""
    steady: bool = False
    """Whether no class's own code was asked what an object consists of, so that the value looks the same each time."""
    plain: bool = False
    """Whether it is small and consists of Python's own containers, numbers and strings alone."""

    @property
    def header(self) -> bytes:
        """The whole pickle stream in one piece."""
        return b"".join(bytes(piece) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Length of pickle and buffers, in bytes."""
        if self.plain:
            return len(self.pieces[0])
        return sum(map(len, self.pieces)) + sum(map(len, self.buffers))


def groups(pickles: Sequence[Pickled], marks: Sequence[frozenset[int]]) -> list[list[int]]:
    """Indices of pickles whose values share an object or memory, in groups; they must be pickled as one to stay so.

    Args:
        marks: the identities of each one's changeable objects.
    """
    if not any(pickled.spans for pickled in pickles) and len(frozenset().union(*marks)) == sum(map(len, marks)):
        return [[index] for index in range(len(pickles))]  # a thousand small values
    parent = list(range(len(pickles)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    first: dict[int, int] = {}
    for index, numbers in enumerate(marks):
        for mark in numbers:
            other = first.setdefault(mark, index)
            if other != index:
                parent[root(index)] = root(other)
    reach, last = -1, 0
    spans = [(span.start, span.stop, index) for index, pickled in enumerate(pickles) for span in pickled.spans]
    for start, stop, index in sorted(spans):
        if start < reach:
            parent[root(index)] = root(last)
        if stop > reach:
            reach, last = stop, index
    found: dict[int, list[int]] = {}
    for index in range(len(pickles)):
        found.setdefault(root(index), []).append(index)
    return list(found.values())
