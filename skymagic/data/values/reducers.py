"""Reducers for built-in types that pickle cannot handle, and class identity across ranks.

cloudpickle identifies a class that travels by value by a random number. So the notebook would see a
different class from each rank, and equal dataclasses of two ranks would not be equal. `recognise`
derives the number from the definition of the class instead.
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
    """Return the reducer for objects of this type, or None.

    A reducer returns the same as `__reduce__`.
    """
    # A kernel replaces the standard streams by objects of other classes.
    if kind in (type(sys.stdout), type(sys.stderr), type(sys.stdin)):
        return _stream
    return _REDUCERS.get(kind)


def instance_reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer for classes that control how they are filled or looked up, or None.

    Rebuilding their instances may run the notebook's code.
    """
    if is_a(kind, "argparse", "_AttributeHolder"):
        return _of_argparse
    if is_a(kind, "torch.optim.lr_scheduler", "LRScheduler"):
        return _scheduler
    return _instance if _fills_itself(kind) or _delegates(kind) else None


def _cell(cell: types.CellType) -> Any:
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        # The cell is empty: its variable was not assigned yet.
        return types.CellType, ()
    # In a tuple, because pickle ignores a state of None.
    return types.CellType, (), contents, None, None, rebuild.fill_cell


def _stream(file: Any) -> Any:
    """Reduce a standard stream to the other side's stream of that name.

    No other file travels, not even its text.
    """
    for name in ("stdout", "stderr", "stdin"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"cannot pickle {type(file).__name__!r} object")


def _memoryview(view: memoryview) -> Any:
    """Reduce a memoryview.

    Changes through the view change the bytearray behind it, so the bytearray travels as a whole. Of
    any other object only the viewed part travels.
    """
    if not view.c_contiguous:
        return NotImplemented
    offset = _offset(view) if type(view.obj) in (bytearray, array.array) else None
    if offset is None:
        return rebuild.view, (pickle.PickleBuffer(view), view.format, view.shape)
    return rebuild.part, (view.obj, offset, view.nbytes, view.format, view.shape, view.readonly)


def _offset(view: memoryview) -> int | None:
    """Return where a view begins in the object behind it, in bytes, or None if unknown."""
    with memoryview(view.obj).cast("B") as underlying:
        if view.nbytes == underlying.nbytes:
            return 0
        # `from_buffer` requires a writable view that is not empty.
        if view.readonly or not view.nbytes:
            return None
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) - ctypes.addressof(
            ctypes.c_char.from_buffer(underlying)
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
    """Reduce an object that an importable module holds under its own name, or return None."""
    module, name = sys.modules.get(value.__module__), value.__name__
    is_importable = (
        module is not None and value.__module__ != "__main__" and vars(module).get(name) is value
    )
    return (getattr, (module, name)) if is_importable else None


def _type_parameter(parameter: Any) -> Any:
    """Reduce a `ParamSpec` or `TypeVarTuple`.

    It remains one object even if it travels with several functions.
    """
    if (reference := _by_name(parameter)) is not None:
        return reference
    facts = (
        type(parameter),
        parameter.__name__,
        parameter.__module__,
        getattr(parameter, "__bound__", None),
    )
    return rebuild.type_parameter, (_cloud._get_or_create_tracker_id(parameter), *facts)


def reduce_ctype(cls: type) -> Any:
    """Reduce a ctypes array type, such as `ctypes.c_int * 4`, to its element type and length.

    Return None for classes that are not made by ctypes.

    Raises:
        pickle.PicklingError: the class is a structure, pointer or function type, which ctypes
            builds from this process's memory.
    """
    if type(cls).__module__ != "_ctypes":
        return None
    if issubclass(cls, ctypes.Array) and cls.__bases__ == (ctypes.Array,):
        return operator.mul, (cls._type_, cls._length_)
    raise pickle.PicklingError(f"cannot pickle {cls.__qualname__!r}, a C type of this process")


# -- collections that fill themselves --------------------------------------------------------------


def _fills_itself(kind: type) -> bool:
    """Return True if a dict or list class adds items through its own methods.

    They may change the items a second time, or need attributes that are not set yet.
    """
    if not issubclass(kind, dict | list) or not _default(kind, "__reduce_ex__", "__reduce__"):
        return False
    return not _default(
        kind, *(("__setitem__",) if issubclass(kind, dict) else ("append", "extend"))
    )


def _default(kind: type, *methods: str) -> bool:
    """Return True if no class statement defines any of these methods."""
    return not any(isinstance(getattr(kind, name, None), types.FunctionType) for name in methods)


def _delegates(kind: type) -> bool:
    """Return True if a class forwards attribute access, as tqdm's classes do.

    The unpickler looks up `__setstate__` before the object that answers it exists.
    """
    own = _default(kind, "__reduce_ex__", "__reduce__") and not hasattr(kind, "__setstate__")
    return own and not _default(kind, "__getattr__", "__getattribute__")


def _instance(value: Any) -> Any:
    """Reduce an object so that its items and attributes are set without its class's methods."""
    reduced = value.__reduce_ex__(5)
    # A sixth entry is a function that sets the state in the class's own way.
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
    """Reduce a torch LR scheduler.

    The scheduler has marked its optimizer to find out whether it has stepped, and the optimizer's
    own pickle does not include the mark.
    """
    function, args, state, *_ = value.__reduce_ex__(5)
    stepped = (
        getattr(value.optimizer, "_opt_called", False) if hasattr(value, "optimizer") else None
    )
    return function, args, (state, stepped), None, None, rebuild.fill_scheduler


# -- sentinels -------------------------------------------------------------------------------------

_SENTINEL = re.compile(
    "sentinel|missing|undefined|unset|nothing|not_?given|no_?value|no_?default", re.IGNORECASE
)
"""Matches names of classes whose instances stand for "no value"."""
_global_instances: weakref.WeakKeyDictionary[
    type, tuple[int, dict[int, tuple[types.ModuleType, str]]]
]
_global_instances = weakref.WeakKeyDictionary()
"""Per class: the number of loaded modules, and its instances with the global names they have."""


def may_be_sentinel(kind: type) -> bool:
    """Return True if only the identity of a type's objects can matter.

    Such objects have no contents, and their class defines no reduction.
    """
    if kind is object:
        return True
    plain = (
        _default(kind, "__reduce_ex__", "__reduce__", "__getstate__")
        and kind not in copyreg.dispatch_table
    )
    # `_default` sees methods of class statements only; those of C types are found here.
    reduces_itself = (
        "__reduce_ex__" in vars(base) or "__reduce__" in vars(base) for base in kind.__mro__[:-1]
    )
    return plain and kind.__module__ != "__main__" and not any(reduces_itself)


def reduce_sentinel(value: Any) -> Any:
    """Reduce an object to its global name in an importable module if it has no other state.

    Return NotImplemented for all other objects.
    """
    kind = type(value)
    if getattr(value, "__dict__", None) and not _SENTINEL.search(kind.__name__):
        return NotImplemented
    module: types.ModuleType | None
    module, name = _named_instances(kind).get(id(value), (None, ""))
    if module is None or vars(module).get(name) is not value:
        return NotImplemented
    # Raises for locks and other C types with contents that cannot be read.
    reduced = value.__reduce_ex__(5)
    state = reduced[2] if len(reduced) > 2 else None
    texts = isinstance(state, dict) and all(isinstance(item, str | None) for item in state.values())
    return (getattr, (module, name)) if not state or texts else reduced


def _named_instances(kind: type) -> dict[int, tuple[types.ModuleType, str]]:
    """Return a type's instances that are global names in modules of its package.

    For `object` itself, search all modules.
    """
    count, names_by_id = _global_instances.get(kind, (0, {}))
    # Valid until another module is imported.
    if count == len(sys.modules):
        return names_by_id
    package = "" if kind is object else kind.__module__.partition(".")[0]
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and isinstance(module, types.ModuleType)
        and package in ("", name.partition(".")[0])
    ]
    names_by_id = {}
    # Names in the module that defines the type take precedence.
    for module in sorted(modules, key=lambda module: module.__name__ != kind.__module__):
        for name, value in list(vars(module).items()):
            if type(value) is kind:
                names_by_id.setdefault(id(value), (module, name))
    _global_instances[kind] = len(sys.modules), names_by_id
    return names_by_id


class _Suppress:
    """Stand-in for `argparse.SUPPRESS`, a string that argparse compares by identity."""

    def __reduce__(self) -> Any:
        return getattr, (sys.modules["argparse"], "SUPPRESS")


_suppress = _Suppress()


def _of_argparse(value: Any) -> Any:
    """Reduce a parser or an action.

    They check whether a default *is* `argparse.SUPPRESS`, so an equal string would not do.
    """
    sentinel = sys.modules["argparse"].SUPPRESS
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {
        name: _suppress if attribute is sentinel else attribute
        for name, attribute in reduced[2].items()
    }
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
    """Give a class without a number the one that follows from its code and its plain attributes.

    A second, identical class in the same process gets the next number.
    """
    # cloudpickle's own lock, which guards both dicts against its own use on other threads.
    with _cloud._DYNAMIC_CLASS_TRACKER_LOCK:
        if cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            return
        digest = blake2b(
            "\n".join(_facts(cls)).encode(errors="surrogateescape"), digest_size=16
        ).hexdigest()
        number = 0
        # Identical classes of one process are numbered in the order of their first use.
        while f"{digest}-{number}" in _cloud._DYNAMIC_CLASS_TRACKER_BY_ID:
            number += 1
        _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls] = f"{digest}-{number}"
        _cloud._DYNAMIC_CLASS_TRACKER_BY_ID[f"{digest}-{number}"] = cls


def _facts(cls: type) -> Iterator[str]:
    yield f"{cls.__module__} {cls.__qualname__} {type(cls).__qualname__}"
    yield from (f"base {base.__module__} {base.__qualname__}" for base in cls.__bases__)
    for name, value in sorted(vars(cls).items()):
        yield f"{name} {_description(value)}"


def _description(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _description(value._value_)
    if isinstance(value, FIXED_TYPES):
        return repr(value)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return " ".join(_description(part) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, types.FunctionType):
        return _code(value.__code__)
    # Only its type: a `repr` may contain an address, which differs between ranks.
    return type(value).__qualname__


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    # Sets have no order.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _code(code: types.CodeType) -> str:
    constants = list(map(_constant, code.co_consts))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"
