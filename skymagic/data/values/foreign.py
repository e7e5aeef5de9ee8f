"""How the types of ctypes travel: what Python makes of ``c_int * 5`` or of a Structure's fields is made anew on the other side."""

from __future__ import annotations

import operator
import sys
from functools import lru_cache
from typing import Any

from skymagic.data.values.memory import Reduced

_FIELDS = "_fields_"
_BYTE_ORDERS = ("__ctype_le__", "__ctype_be__")


def is_foreign(cls: type) -> bool:
    """Whether this is a type of ctypes; nothing is imported."""
    bases = _bases() if "_ctypes" in sys.modules else ()
    return issubclass(cls, bases) or cls in map(type, bases)


@lru_cache(maxsize=1)
def _bases() -> tuple[type, ...]:
    import _ctypes as kinds

    return kinds._SimpleCData, kinds.Array, kinds.Structure, kinds.Union, kinds._Pointer


def reduce_type(cls: Any) -> Reduced:
    """Types that ctypes makes of others and knows by itself; NotImplemented for those that have a name or a class statement."""
    import ctypes

    for base in _bases():
        if cls is type(base):  # ctypes has no name for its metaclasses
            return type, (base,)
    if issubclass(cls, ctypes.Array) and hasattr(cls, "_length_") and cls._type_ * cls._length_ is cls:
        return operator.mul, (cls._type_, cls._length_)
    if issubclass(cls, ctypes._Pointer) and hasattr(cls, "_type_") and ctypes.POINTER(cls._type_) is cls:
        return ctypes.POINTER, (cls._type_,)
    if _BYTE_ORDERS[0] in vars(cls):
        swapped, native = sorted(_BYTE_ORDERS, key=lambda order: vars(cls)[order] is not cls)
        other = vars(cls)[native]
        if getattr(ctypes, cls.__name__, None) is not cls and getattr(ctypes, other.__name__, None) is other:
            return getattr, (other, swapped)
    return NotImplemented


def members_of(members: dict[str, Any]) -> dict[str, Any]:
    """A Structure's members without what ctypes made of its fields, which come last: the others say how they lie."""
    ctypes = sys.modules["_ctypes"]
    field = getattr(ctypes, "CField", None) or _field_type()
    plain = {
        name: value for name, value in members.items() if not isinstance(value, field) and name not in _BYTE_ORDERS
    }
    if _FIELDS in plain:
        plain[_FIELDS] = plain.pop(_FIELDS)
    return plain


@lru_cache(maxsize=1)
def _field_type() -> type:
    import ctypes

    class Sample(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int),)

    return type(Sample.x)


def is_final(cls: type, name: str) -> bool:
    """Whether a member can be set only once."""
    return name == _FIELDS and name in vars(cls) and is_foreign(cls)
