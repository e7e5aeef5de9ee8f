"""One class on all ranks: what the same cell has defined on each of them is one class where its instances meet.

cloudpickle knows a class that travels by value by a random number, so that the class of each rank would be another one in the notebook,
and equal dataclasses of two ranks would not be equal. Here the number is made of what the class is.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import cloudpickle.cloudpickle as _cloud

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def recognise(cls: type) -> None:
    """Give a class that has no number yet the one that follows from its code and its plain attributes.

    A second class that is the same in all of that, and lives in this process too, has the next number.
    """
    with _cloud._DYNAMIC_CLASS_TRACKER_LOCK:
        if cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            return
        digest = blake2b("\n".join(_facts(cls)).encode(errors="surrogateescape"), digest_size=16).hexdigest()
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
    if isinstance(value, _PLAIN):
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
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)  # sets have no order


def _code(code: types.CodeType) -> str:
    constants = list(map(_constant, code.co_consts))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"
