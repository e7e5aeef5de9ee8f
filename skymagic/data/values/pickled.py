"""A pickled value: its stream in pieces without a copy, its buffers, what was learned about it, and what a later value may refer to.

Most values of a notebook are numbers, strings, and lists and dicts of them: `plainly` is the short way for what Python pickles by itself.
Pickler and unpickler number what they have made in the same order. So the number that an object has on this side finds the object that
the other side has made of it, for as long as the value is pickled in the same way."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import types
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.data.store.base import Buffer
from skymagic.data.store.device import DeviceBytes, behind
from skymagic.data.store.store import LARGE
from skymagic.data.values.kinds import changeable, is_a
from skymagic.data.values.memory import SMALL, LinkedMemory, MemoryBlock, Span


class Buffers:
    """Out-of-band buffers in the order of the pickle; small ones stay in it."""

    def __init__(self) -> None:
        self.kept: list[memoryview | DeviceBytes] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """For the pickler: True for a buffer that stays in the stream."""
        raw = buffer.raw()
        if (data := behind(raw)) is not None:
            self.kept.append(data)
            return False
        if raw.nbytes < SMALL:
            return True
        self.kept.append(raw)
        return False


class StreamPieces:
    """A file for the pickler to write to, which keeps large byte strings as they are."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self.write = self._parts.append

    def clear(self) -> None:
        """Drop what was written."""
        self._parts.clear()

    def pieces(self) -> tuple[Buffer, ...]:
        """What was written; small parts joined."""
        if len(self._parts) == 1:
            return (self._parts[0],)
        joined: list[Buffer] = []
        small: list[Buffer] = []
        for part in self._parts:
            if len(part) >= LARGE:
                joined += [b"".join(small), part]
                small = []
            else:
                small.append(part)
        return tuple(part for part in (*joined, b"".join(small)) if part)


class Rope(io.RawIOBase):
    """Stream over several pieces, without joining them."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while self._pieces and done < view.nbytes:
            part = self._pieces[0][: view.nbytes - done]
            view[done : done + part.nbytes] = part
            done += part.nbytes
            rest = self._pieces[0][part.nbytes :]
            self._pieces[:1] = [rest] if rest else []
        return done

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = sum(piece.nbytes for piece in self._pieces)
        data = bytearray(min(size, sum(piece.nbytes for piece in self._pieces)))
        self.readinto(data)
        return bytes(data)

    def readable(self) -> bool:
        return True


# -- a pickled value -------------------------------------------------------------------------------


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
    if not any(pickled.spans for pickled in pickles) and len(frozenset().union(*marks)) == sum(
        map(len, marks)
    ):
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
    spans = [
        (span.start, span.stop, index)
        for index, pickled in enumerate(pickles)
        for span in pickled.spans
    ]
    for start, stop, index in sorted(spans):
        if start < reach:
            parent[root(index)] = root(last)
        if stop > reach:
            reach, last = stop, index
    found: dict[int, list[int]] = {}
    for index in range(len(pickles)):
        found.setdefault(root(index), []).append(index)
    return list(found.values())


# -- the short way ---------------------------------------------------------------------------------


MANY = 1 << 20
"""Bytes of a pickle above which its objects are not listed one by one to find shared ones."""

_PLAIN = frozenset((*CONTAINERS, int, float, str, bytes, bool, type(None), tuple, frozenset))
_FIXED = _PLAIN - {*CONTAINERS, tuple, frozenset}
_REUSED = 512
"""Bytes of a pickle up to which its pickler serves again: it never gives back the room for its numbers, and clears all of it."""


class _NotPlain(Exception):
    """There is something in the value that Python does not pickle all by itself."""


class PlainPickler(pickle.Pickler):
    """Pickles what Python pickles all by itself; one for each thread, for they are many small values."""

    def __init__(self) -> None:
        self.out = StreamPieces()
        super().__init__(self.out, 5)

    def reducer_override(self, obj: object) -> Any:
        raise _NotPlain


class _Local(threading.local):
    pickler: PlainPickler | None = None


_local = _Local()


def plainly(value: object) -> Pickled | None:
    """A value of Python's own types as a pickle; None when something else is in it."""
    if type(value) not in _PLAIN:
        return None
    pickler = _local.pickler or PlainPickler()
    _local.pickler = None  # in use
    try:
        pickler.dump(value)
    except _NotPlain:
        return None
    pieces = pickler.out.pieces()
    if len(pieces) == 1 and len(pieces[0]) < SMALL:
        _reuse(pickler, len(pieces[0]))
        return Pickled(pieces, (), marks=None, keep=value, plain=True)
    marks = None if sum(map(len, pieces)) < MANY else frozenset((id(value),))
    return Pickled(pieces, (), marks=marks, keep=value)


def _reuse(pickler: PlainPickler, nbytes: int) -> None:
    if nbytes <= _REUSED:
        pickler.out.clear()
        pickler.clear_memo()
        _local.pickler = pickler


def is_flat(value: object) -> bool:
    """Whether a value of Python's own types holds numbers and texts alone; pickling it again would be much slower."""
    return _FIXED.issuperset(map(type, gc.get_referents(value)))


def plain_memo(value: object) -> dict[int, tuple[int, object]]:
    """Identity → number and object, of what a plain value consists of, as `plainly` pickles it."""
    pickler = _local.pickler or PlainPickler()
    _local.pickler = None  # in use
    pickler.dump(value)
    found = pickler.memo.copy()
    _reuse(pickler, sum(map(len, pickler.out.pieces())))
    return found


def containers_in(value: object) -> frozenset[int]:
    """Identities of the lists, dicts and sets in a value of Python's own types."""
    if type(value) in _FIXED:
        return frozenset()
    if is_flat(value):
        return frozenset((id(value),)) if type(value) in CONTAINERS else frozenset()
    return frozenset(
        number for number, (_, each) in plain_memo(value).items() if type(each) in CONTAINERS
    )


def containers_of(value: object, leaves: Container[int]) -> set[int] | None:
    """Identities of the containers that a value consists of, beside numbers, texts and these leaves; None when something else is in it."""
    seen: dict[int, object] = {}
    todo: Sequence[object] = (value,)
    while todo:
        if not _PLAIN.issuperset(map(type, todo)):
            return None
        seen.update((id(each), each) for each in todo)
        inner = gc.get_referents(*todo)
        new = {
            id(each): each for each in inner if type(each) not in _FIXED and id(each) not in leaves
        }
        todo = [new[key] for key in new.keys() - seen.keys()]
    return {key for key, each in seen.items() if type(each) in CONTAINERS}


# -- objects by their number in a pickle -----------------------------------------------------------


LISTED = 4 << 20
"""Bytes of a pickle above which only the value itself has a number, and not each object in it."""
ROOT = -1
"""The number of a value itself; those of several in one pickle are -1, -2, …"""

FIXED_TYPES = (int, float, bool, type(None), complex, str, bytes)
"""Types of which it never matters which object it is."""
_SINGLE = (("logging", "Logger"), ("IPython", "InteractiveShell"))

Ref = tuple[int, int]
"""A table of objects that the other side has kept, and a number in it."""


@dataclass
class PickleLinks:
    """What a pickle refers to instead of copying it."""

    objects: dict[int, Ref] = field(default_factory=dict)
    """Identity → where the other side has it."""
    memory: LinkedMemory = field(default_factory=LinkedMemory)
    """Memory of those objects."""
    used: dict[int, int] = field(default_factory=dict)
    """Identities of those that the pickle does refer to → their places among them."""

    def number(self, obj: object) -> int | None:
        """The place of an object among those referred to; None for one that travels itself."""
        return self.used.setdefault(id(obj), len(self.used)) if id(obj) in self.objects else None


def linkable(kind: type) -> bool:
    """Whether it matters which object of this type it is; not of those that each process has one of."""
    if kind in CONTAINERS:
        return True
    if (
        kind in FIXED_TYPES
        or kind is tuple
        or kind.__module__ == "typing"
        or issubclass(kind, (memoryview, MemoryBlock, types.GenericAlias, types.UnionType))
    ):
        return False
    if any(is_a(kind, *each) for each in _SINGLE):
        return False
    return changeable(kind) or issubclass(kind, types.FunctionType)


def travels(function: types.FunctionType) -> bool:
    """Whether a function travels by itself: not as a name of a module, nor with its class."""
    name = function.__qualname__
    return "<locals>" in name or ("." not in name and function.__module__ in (None, "__main__"))


def linkable_kinds(kinds: Iterable[type]) -> set[type]:
    """The linkable ones among some types."""
    return {kind for kind in set(kinds) if linkable(kind)}
