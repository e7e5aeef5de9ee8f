"""The result of pickling, the fast path for plain values, and numbered objects in a pickle.

A `Pickled` holds the stream in pieces without a copy, its buffers, and facts collected on the way.
Most values in a notebook are numbers, strings, and lists and dicts of them: `pickle_plain` is the
fast path for values that Python can pickle alone. Pickler and unpickler number the objects they
create in the same order. So the number of an object on this side identifies its copy on the other
side, for as long as the value is pickled in the same way.
"""

from __future__ import annotations

import gc
import io
import pickle
import threading
import types
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.content.base import Buffer
from skymagic.content.device import DeviceBytes, device_bytes_of
from skymagic.content.store import LARGE
from skymagic.data.values.kinds import changeable, is_a
from skymagic.data.values.memory import SMALL, LinkedMemory, MemoryBlock, Span


class Buffers:
    """Out-of-band buffers in the order of the pickle; small ones stay in the stream."""

    def __init__(self) -> None:
        self.kept: list[memoryview | DeviceBytes] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if the buffer stays in the stream; called by the pickler."""
        raw = buffer.raw()
        # A stand-in for bytes on a device, which are copied only when they are written.
        if (data := device_bytes_of(raw)) is not None:
            self.kept.append(data)
            return False
        if raw.nbytes < SMALL:
            return True
        self.kept.append(raw)
        return False


class StreamPieces:
    """File for the pickler to write to that keeps large byte strings without copying them."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        # The pickler passes large byte strings to `write` as they are.
        self.write = self._parts.append

    def clear(self) -> None:
        """Drop everything written so far."""
        self._parts.clear()

    def pieces(self) -> tuple[Buffer, ...]:
        """Return everything written, with small parts joined."""
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
    """Readable stream over several pieces, without joining them."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while self._pieces and done < view.nbytes:
            part = self._pieces[0][: view.nbytes - done]
            view[done : done + part.nbytes] = part
            done += part.nbytes
            remaining = self._pieces[0][part.nbytes :]
            self._pieces[:1] = [remaining] if remaining else []
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
"""Mutable built-in types."""


class Pickled(NamedTuple):
    """Value ready to be written: the pieces of the pickle, then the buffers that it refers to."""

    pieces: tuple[Buffer, ...]
    """The pickle stream; large byte strings by reference."""
    buffers: tuple[memoryview | DeviceBytes, ...]
    """Out-of-band memory as 1-dimensional bytes, in the order of the pickle."""
    modules: frozenset[str] = frozenset()
    """Modules in the notebook's folder that it refers to."""
    packages: frozenset[str] = frozenset()
    """Top-level packages that it refers to."""
    required: frozenset[str] = frozenset()
    """Dotted names of other modules needed to rebuild and use it: their imports are in no `try`."""
    uses: Mapping[str, str] = types.MappingProxyType({})
    """Names of the namespace that its functions use, each with the name of one such function."""
    hints: Mapping[str, str] = types.MappingProxyType({})
    """Types of the namespace that its string annotations name, each with the name of one annotated
    function or class.
    """
    attributes: frozenset[str] = frozenset()
    """Attribute names in its functions' code."""
    files: frozenset[str] = frozenset()
    """File names of its functions' code."""
    marks: frozenset[int] | None = frozenset()
    """Identities of its mutable objects, valid while `keep` lives; None if not computed yet."""
    spans: tuple[Span, ...] = ()
    """Memory that it refers to."""
    keep: Any = None
    """Keeps alive everything that the pickle refers to."""
    code: bool = False
    """True if it holds code that was compiled by this process."""
    wrappers: bool = False
    """True if it holds a wrapper around the process group, for another rank."""
    active: bool = False
    """True if rebuilding may run the notebook's code: `__setstate__`, `__hash__`, functions named
    by `__reduce__`.
    """
    steady: bool = False
    """True if no class's own code decided what to pickle, so that repeated pickling gives the same
    result.
    """
    plain: bool = False
    """True if it is small and consists only of built-in containers, numbers and strings."""

    @property
    def header(self) -> bytes:
        """The whole pickle stream in one piece."""
        return b"".join(bytes(piece) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Size of pickle and buffers in bytes."""
        if self.plain:
            return len(self.pieces[0])
        return sum(map(len, self.pieces)) + sum(map(len, self.buffers))


def groups(pickles: Sequence[Pickled], marks: Sequence[frozenset[int]]) -> list[list[int]]:
    """Group pickles whose values share an object or memory, by index.

    The values of a group must be pickled as one to keep sharing it.

    Args:
        marks: for each pickle, the identities of its mutable objects.
    """
    # Fast path, for example for a thousand small values: none refers to memory, and no mark occurs
    # twice.
    if not any(pickled.spans for pickled in pickles) and len(frozenset().union(*marks)) == sum(
        map(len, marks)
    ):
        return [[index] for index in range(len(pickles))]
    parent = list(range(len(pickles)))

    def root(index: int) -> int:
        while parent[index] != index:
            # Union-find with path halving.
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
    # Sweep over the spans in the order of their addresses, and join those that overlap.
    for start, stop, index in sorted(spans):
        if start < reach:
            parent[root(index)] = root(last)
        if stop > reach:
            reach, last = stop, index
    indices_by_root: dict[int, list[int]] = {}
    for index in range(len(pickles)):
        indices_by_root.setdefault(root(index), []).append(index)
    return list(indices_by_root.values())


# -- plain values ----------------------------------------------------------------------------------


MANY = 1 << 20
"""Pickle size in bytes above which objects are not listed to find shared ones."""

_PLAIN = frozenset((*CONTAINERS, int, float, str, bytes, bool, type(None), tuple, frozenset))
_FIXED = _PLAIN - {*CONTAINERS, tuple, frozenset}
_REUSED = 512
"""Largest pickle size in bytes after which a pickler is reused.

A pickler never shrinks its memo, and clears all of it each time.
"""


class _NotPlain(Exception):
    """Raised inside a pickler by an object that Python does not pickle by itself."""


class PlainPickler(pickle.Pickler):
    """Pickler for built-in types only; one per thread is reused for the many small values."""

    def __init__(self) -> None:
        self.out = StreamPieces()
        super().__init__(self.out, 5)

    def reducer_override(self, obj: object) -> Any:
        # Not called for numbers, strings and built-in containers, which the C pickler saves itself.
        raise _NotPlain


class _Local(threading.local):
    pickler: PlainPickler | None = None


_local = _Local()


def pickle_plain(value: object) -> Pickled | None:
    """Pickle a value of built-in types, or return None if it holds anything else."""
    if type(value) not in _PLAIN:
        return None
    pickler = _local.pickler or PlainPickler()
    _local.pickler = None  # in use
    try:
        pickler.dump(value)
    # The pickler is not reused: its memo and its stream hold parts of this value.
    except _NotPlain:
        return None
    pieces = pickler.out.pieces()
    if len(pieces) == 1 and len(pieces[0]) < SMALL:
        _reuse(pickler, len(pieces[0]))
        return Pickled(pieces, (), marks=None, keep=value, plain=True)
    # None: the objects are listed only on demand.
    marks = None if sum(map(len, pieces)) < MANY else frozenset((id(value),))
    return Pickled(pieces, (), marks=marks, keep=value)


def _reuse(pickler: PlainPickler, nbytes: int) -> None:
    if nbytes <= _REUSED:
        pickler.out.clear()
        pickler.clear_memo()
        _local.pickler = pickler


def is_flat(value: object) -> bool:
    """Return True if a value of built-in types holds only numbers and texts.

    Pickling it again would be much slower than this check.
    """
    return _FIXED.issuperset(map(type, gc.get_referents(value)))


def plain_memo(value: object) -> dict[int, tuple[int, object]]:
    """Return number and object by identity for the parts of a plain value.

    The numbers are those in the pickle from `pickle_plain`.
    """
    pickler = _local.pickler or PlainPickler()
    _local.pickler = None  # in use
    pickler.dump(value)
    memo = pickler.memo.copy()
    _reuse(pickler, sum(map(len, pickler.out.pieces())))
    return memo


def containers_in(value: object) -> frozenset[int]:
    """Return the identities of the lists, dicts and sets in a value of built-in types."""
    if type(value) in _FIXED:
        return frozenset()
    if is_flat(value):
        return frozenset((id(value),)) if type(value) in CONTAINERS else frozenset()
    return frozenset(
        number for number, (_, obj) in plain_memo(value).items() if type(obj) in CONTAINERS
    )


def containers_of(value: object, leaves: Container[int]) -> set[int] | None:
    """Return the identities of the containers in a value, ignoring atoms and `leaves`.

    Return None if the value holds anything else.
    """
    visited: dict[int, object] = {}
    pending: Sequence[object] = (value,)
    while pending:
        if not _PLAIN.issuperset(map(type, pending)):
            return None
        visited.update((id(obj), obj) for obj in pending)
        inner = gc.get_referents(*pending)
        new = {id(obj): obj for obj in inner if type(obj) not in _FIXED and id(obj) not in leaves}
        pending = [new[key] for key in new.keys() - visited.keys()]
    return {key for key, obj in visited.items() if type(obj) in CONTAINERS}


# -- objects by their number in a pickle -----------------------------------------------------------


LISTED = 4 << 20
"""Pickle size in bytes above which only the value itself is numbered, not the objects in it."""
ROOT = -1
"""Number of a value itself; several values in one pickle have the numbers -1, -2, …"""

FIXED_TYPES = (int, float, bool, type(None), complex, str, bytes)
"""Types whose objects are interchangeable if they are equal."""
_SINGLE = (("logging", "Logger"), ("IPython", "InteractiveShell"))

Ref = tuple[int, int]
"""Table of objects held by the other side, and a number in that table."""


@dataclass
class PickleLinks:
    """Objects that a pickle refers to instead of copying them."""

    objects: dict[int, Ref] = field(default_factory=dict)
    """By identity: where the other side has the object."""
    memory: LinkedMemory = field(default_factory=LinkedMemory)
    """Memory of these objects."""
    used: dict[int, int] = field(default_factory=dict)
    """By identity: index of each object that the pickle does refer to."""

    def number(self, obj: object) -> int | None:
        """Return the index of an object that is referred to, or None if it must be pickled."""
        return self.used.setdefault(id(obj), len(self.used)) if id(obj) in self.objects else None


def linkable(kind: type) -> bool:
    """Return True if the identity of this type's objects matters.

    It does not matter for singletons that every process has.
    """
    if kind in CONTAINERS:
        return True
    if (
        kind in FIXED_TYPES
        or kind is tuple
        or kind.__module__ == "typing"
        or issubclass(kind, (memoryview, MemoryBlock, types.GenericAlias, types.UnionType))
    ):
        return False
    if any(is_a(kind, *type_path) for type_path in _SINGLE):
        return False
    return changeable(kind) or issubclass(kind, types.FunctionType)


def travels_by_value(function: types.FunctionType) -> bool:
    """Return True if a function travels on its own, not by name or with its class."""
    name = function.__qualname__
    return "<locals>" in name or ("." not in name and function.__module__ in (None, "__main__"))


def linkable_kinds(kinds: Iterable[type]) -> set[type]:
    """Return the linkable types among the given ones."""
    return {kind for kind in set(kinds) if linkable(kind)}
