"""How objects of Python's own types are taken apart that pickle itself cannot, or does not as they should be; one class on all ranks.

cloudpickle knows a class that travels by value by a random number, so that the class of each rank would be another one in the notebook,
and equal dataclasses of two ranks would not be equal. In `recognise` the number is made of what the class is.
"""

from __future__ import annotations

import array
import copyreg
import ctypes
import enum
import functools
import io
import operator
import pickle
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from cloudpickle import cloudpickle as _cloud

from skymagic.data.values import rebuild
from skymagic.data.values.kinds import is_a
from skymagic.data.values.pickled import FIXED_TYPES


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """What takes objects of this type apart, as ``__reduce__`` does; None for all others."""
    if kind in (type(sys.stdout), type(sys.stderr), type(sys.stdin)):
        return _stream
    return _REDUCERS.get(kind)


def instance_reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """The same for instances of classes that define how they are filled, or asked: their rebuilding may run the notebook's code."""
    if is_a(kind, "argparse", "_AttributeHolder"):
        return _of_argparse
    if is_a(kind, "torch.optim.lr_scheduler", "LRScheduler"):
        return _scheduler
    return _instance if _fills_itself(kind) or _delegates(kind) else None


def _cell(cell: types.CellType) -> Any:
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        return types.CellType, ()
    return types.CellType, (), contents, None, None, rebuild.fill_cell


def _stream(file: Any) -> Any:
    """The standard streams are the other side's own; no other file travels, not even its text."""
    for name in ("stdout", "stderr", "stdin"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"cannot pickle {type(file).__name__!r} object")


def _memoryview(view: memoryview) -> Any:
    """What changes through the view changes the bytearray that it looks at, so that travels as a whole; of others the part."""
    if not view.c_contiguous:
        return NotImplemented
    offset = _offset(view) if type(view.obj) in (bytearray, array.array) else None
    if offset is None:
        return rebuild.view, (pickle.PickleBuffer(view), view.format, view.shape)
    return rebuild.part, (view.obj, offset, view.nbytes, view.format, view.shape, view.readonly)


def _offset(view: memoryview) -> int | None:
    """Where a view begins in the object that it looks at, in bytes; None where that cannot be said."""
    with memoryview(view.obj).cast("B") as whole:
        if view.nbytes == whole.nbytes:
            return 0
        if view.readonly or not view.nbytes:
            return None
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) - ctypes.addressof(
            ctypes.c_char.from_buffer(whole)
        )


def _weak(container: Any) -> Any:
    return rebuild.weak, (
        type(container),
        (list if isinstance(container, weakref.WeakSet) else dict)(container),
    )


def _new_type(kind: Any) -> Any:
    return _by_name(kind) or (
        rebuild.new_type,
        (kind.__qualname__, kind.__supertype__, kind.__module__),
    )


def _by_name(value: Any) -> tuple[Any, ...] | None:
    """How what an importable module holds under its own name is found there; None for others."""
    module, name = sys.modules.get(value.__module__), value.__name__
    found = (
        module is not None and value.__module__ != "__main__" and vars(module).get(name) is value
    )
    return (getattr, (module, name)) if found else None


def _type_parameter(parameter: Any) -> Any:
    """``ParamSpec`` and ``TypeVarTuple``; one is one object also where it travels with several functions."""
    if (known := _by_name(parameter)) is not None:
        return known
    facts = (
        type(parameter),
        parameter.__name__,
        parameter.__module__,
        getattr(parameter, "__bound__", None),
    )
    return rebuild.type_parameter, (_cloud._get_or_create_tracker_id(parameter), *facts)


def reduce_ctype(cls: type) -> Any:
    """Reduce a type of ctypes' arrays, such as ``ctypes.c_int * 4``, to its elements' type and its length.

    Return None for classes that are not made by ctypes.

    Raises:
        pickle.PicklingError: it is a structure, pointer or function type, which ctypes makes from this process's memory.
    """
    if type(cls).__module__ != "_ctypes":
        return None
    if issubclass(cls, ctypes.Array) and cls.__bases__ == (ctypes.Array,):
        return operator.mul, (cls._type_, cls._length_)
    raise pickle.PicklingError(f"cannot pickle {cls.__qualname__!r}, a C type of this process")


# -- collections that fill themselves ----------------------------------------------------------------------------------


def _fills_itself(kind: type) -> bool:
    """Whether items of a dict or list go through code of its class, which may change them once more, or need its attributes."""
    if not issubclass(kind, dict | list) or not _default(kind, "__reduce_ex__", "__reduce__"):
        return False
    return not _default(
        kind, *(("__setitem__",) if issubclass(kind, dict) else ("append", "extend"))
    )


def _default(kind: type, *methods: str) -> bool:
    """Whether no class statement has defined any of these."""
    return not any(isinstance(getattr(kind, name, None), types.FunctionType) for name in methods)


def _delegates(kind: type) -> bool:
    """Whether a class passes on what it is asked for, as tqdm's do: an unpickler asks for ``__setstate__`` before there is anybody."""
    own = _default(kind, "__reduce_ex__", "__reduce__") and not hasattr(kind, "__setstate__")
    return own and not _default(kind, "__getattr__", "__getattribute__")


def _instance(value: Any) -> Any:
    """Put items and attributes in as they are, past the methods of the class."""
    reduced = value.__reduce_ex__(5)
    if isinstance(reduced, str) or len(reduced) > 5:
        return reduced
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    return (
        function,
        args,
        (state, list(items or ()), dict(pairs or ())),
        None,
        None,
        rebuild.fill_instance,
    )


def _scheduler(value: Any) -> Any:
    """One of torch's schedulers has marked its optimizer, to tell whether that has made a step; no pickle of the optimizer has it."""
    function, args, state, *_ = value.__reduce_ex__(5)
    stepped = (
        getattr(value.optimizer, "_opt_called", False) if hasattr(value, "optimizer") else None
    )
    return function, args, (state, stepped), None, None, rebuild.fill_scheduler


# -- sentinels ---------------------------------------------------------------------------------------------------------

_SENTINEL = re.compile(
    "sentinel|missing|undefined|unset|nothing|not_?given|no_?value|no_?default", re.IGNORECASE
)
"""Names of classes whose objects say that there is nothing."""
_places: weakref.WeakKeyDictionary[type, tuple[int, dict[int, tuple[types.ModuleType, str]]]]
_places = weakref.WeakKeyDictionary()
"""By class: the count of modules, and its objects that have names in them."""


def may_be_sentinel(kind: type) -> bool:
    """Whether objects of a type have neither contents nor a way to travel of their own, so that only which one it is can matter."""
    if kind is object:
        return True
    plain = (
        _default(kind, "__reduce_ex__", "__reduce__", "__getstate__")
        and kind not in copyreg.dispatch_table
    )
    known = (
        "__reduce_ex__" in vars(base) or "__reduce__" in vars(base) for base in kind.__mro__[:-1]
    )
    return plain and kind.__module__ != "__main__" and not any(known)


def reduce_sentinel(value: Any) -> Any:
    """An object of an importable module by its name there, where that is all there is to it; NotImplemented for all others."""
    kind = type(value)
    if getattr(value, "__dict__", None) and not _SENTINEL.search(kind.__name__):
        return NotImplemented
    module: types.ModuleType | None
    module, name = _named(kind).get(id(value), (None, ""))
    if module is None or vars(module).get(name) is not value:
        return NotImplemented
    reduced = value.__reduce_ex__(
        5
    )  # raises for a lock, and all else that C gives contents which nobody can read
    state = reduced[2] if len(reduced) > 2 else None
    texts = isinstance(state, dict) and all(isinstance(each, str | None) for each in state.values())
    return (getattr, (module, name)) if not state or texts else reduced


def _named(kind: type) -> dict[int, tuple[types.ModuleType, str]]:
    """The objects of a type that are global names of modules of its package; of ``object`` itself, of all modules."""
    count, found = _places.get(kind, (0, {}))
    if count == len(sys.modules):
        return found
    package = "" if kind is object else kind.__module__.partition(".")[0]
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and isinstance(module, types.ModuleType)
        and package in ("", name.partition(".")[0])
    ]
    found = {}
    for module in sorted(modules, key=lambda module: module.__name__ != kind.__module__):
        for name, value in list(vars(module).items()):
            if type(value) is kind:
                found.setdefault(id(value), (module, name))
    _places[kind] = len(sys.modules), found
    return found


class _Suppress:
    """Stands for argparse's text that is told by its identity."""

    def __reduce__(self) -> Any:
        return getattr, (sys.modules["argparse"], "SUPPRESS")


_suppress = _Suppress()


def _of_argparse(value: Any) -> Any:
    """Parsers and their actions ask whether a default *is* ``argparse.SUPPRESS``: a text that is equal is none."""
    sentinel = sys.modules["argparse"].SUPPRESS
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {name: _suppress if each is sentinel else each for name, each in reduced[2].items()}
    return *reduced[:2], state, *reduced[3:]


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.CellType: _cell,
    functools.cached_property: lambda prop: (rebuild.cached_property, (prop.func, prop.attrname)),
    io.TextIOWrapper: _stream,
    memoryview: _memoryview,
    weakref.WeakKeyDictionary: _weak,
    weakref.WeakValueDictionary: _weak,
    weakref.WeakSet: _weak,
    typing.NewType: _new_type,
    typing.ParamSpec: _type_parameter,
    typing.TypeVarTuple: _type_parameter,
}


# -- one class on all ranks ------------------------------------------------------------------------


def recognise(cls: type) -> None:
    """Give a class that has no number yet the one that follows from its code and its plain attributes.

    A second class that is the same in all of that, and lives in this process too, has the next number.
    """
    with _cloud._DYNAMIC_CLASS_TRACKER_LOCK:
        if cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            return
        digest = blake2b(
            "\n".join(_facts(cls)).encode(errors="surrogateescape"), digest_size=16
        ).hexdigest()
        number = 0
        while f"{digest}-{number}" in _cloud._DYNAMIC_CLASS_TRACKER_BY_ID:
            number += 1
        _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = f"{digest}-{number}"
        _cloud._DYNAMIC_CLASS_TRACKER_BY_ID[f"{digest}-{number}"] = cls


def _facts(cls: type) -> Iterator[str]:
    yield f"{cls.__module__} {cls.__qualname__} {type(cls).__qualname__}"
    yield from (f"base {base.__module__} {base.__qualname__}" for base in cls.__bases__)
    for name, value in sorted(vars(cls).items()):
        yield f"{name} {_described(value)}"


def _described(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _described(value._value_)
    if isinstance(value, FIXED_TYPES):
        return repr(value)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return " ".join(_described(part) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, types.FunctionType):
        return _code(value.__code__)
    return type(value).__qualname__


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    return (
        str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
    )  # sets have no order


def _code(code: types.CodeType) -> str:
    constants = list(map(_constant, code.co_consts))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"
