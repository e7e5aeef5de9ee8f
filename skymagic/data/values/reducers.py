"""How objects of Python's own types are taken apart that pickle itself cannot, or does not as they should be."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from skymagic.data.values import rebuild


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """What takes objects of this type apart, as ``__reduce__`` does; None for all others."""
    if kind in (type(sys.stdout), type(sys.stderr), type(sys.stdin)):
        return _stream
    return _REDUCERS.get(kind)


def _cell(cell: types.CellType) -> Any:
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        return types.CellType, ()
    return types.CellType, (), contents, None, None, rebuild.fill_cell


def _cached_property(prop: Any) -> Any:
    return rebuild.cached_property, (prop.func, prop.attrname)


def _stream(file: Any) -> Any:
    """The standard streams are the other side's own; no other file travels, not even its text."""
    for name in ("stdout", "stderr", "stdin"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"cannot pickle {type(file).__name__!r} object")


def _memoryview(view: memoryview) -> Any:
    if not view.c_contiguous:
        return NotImplemented
    return rebuild.view, (pickle.PickleBuffer(view), view.format, view.shape)


def _weak_keys(mapping: Any) -> Any:
    return weakref.WeakKeyDictionary, (dict(mapping),)


def _weak_values(mapping: Any) -> Any:
    return weakref.WeakValueDictionary, (dict(mapping),)


def _weak_set(members: Any) -> Any:
    return weakref.WeakSet, (list(members),)


def _new_type(kind: Any) -> Any:
    return typing.NewType, (kind.__name__, kind.__supertype__)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.CellType: _cell,
    functools.cached_property: _cached_property,
    io.TextIOWrapper: _stream,
    memoryview: _memoryview,
    weakref.WeakKeyDictionary: _weak_keys,
    weakref.WeakValueDictionary: _weak_values,
    weakref.WeakSet: _weak_set,
    typing.NewType: _new_type,
}
