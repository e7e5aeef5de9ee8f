"""The short way for the values that notebooks have most of: numbers, strings, and lists and dicts of them."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

from skymagic.data.values.memory import SMALL
from skymagic.data.values.pickled import CONTAINERS, Pickled
from skymagic.data.values.rope import StreamPieces

_MANY = 1 << 20
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
    marks = None if sum(map(len, pieces)) < _MANY else frozenset((id(value),))
    return Pickled(pieces, (), marks=marks, keep=value)


def _reuse(pickler: PlainPickler, nbytes: int) -> None:
    if nbytes <= _REUSED:
        pickler.out.clear()
        pickler.clear_memo()
        _local.pickler = pickler


def flat(value: object) -> bool:
    """Whether a value of Python's own types holds numbers and texts alone; pickling it again would be much slower."""
    return _FIXED.issuperset(map(type, gc.get_referents(value)))


def memo(value: object) -> dict[int, tuple[int, object]]:
    """Identity → number and object, of what a plain value consists of, as `plainly` pickles it."""
    pickler = _local.pickler or PlainPickler()
    _local.pickler = None  # in use
    pickler.dump(value)
    found = pickler.memo.copy()
    _reuse(pickler, sum(map(len, pickler.out.pieces())))
    return found


def containers(value: object) -> frozenset[int]:
    """Identities of the lists, dicts and sets in a value of Python's own types."""
    if type(value) in _FIXED:
        return frozenset()
    if flat(value):
        return frozenset((id(value),)) if type(value) in CONTAINERS else frozenset()
    return frozenset(number for number, (_, each) in memo(value).items() if type(each) in CONTAINERS)
