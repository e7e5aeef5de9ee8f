"""Questions about types: what can change, what is the user's word for it, what Python adds by itself; how types of ctypes travel."""

from __future__ import annotations

import enum
import operator
import pickle
import sys
import types
from functools import lru_cache
from typing import Any

from skymagic.data.values.memory import Reduced

_FIXED = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    tuple,
    frozenset,
    range,
    slice,
    type(None),
    type,
    types.ModuleType,
    types.CodeType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
    types.MappingProxyType,
    property,
    staticmethod,
    classmethod,
    enum.Enum,
    pickle.PickleBuffer,
)

# By name, for their modules need not be imported.
_FIXED_NAMES = {
    *(("datetime", name) for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(("torch", name) for name in ("dtype", "device", "Size", "layout", "memory_format")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("re", "Pattern"),
    ("numpy", "ufunc"),
}


def changeable(kind: type) -> bool:
    """Whether objects of a type can change, so that it matters whether two names hold the same one."""
    if issubclass(kind, _FIXED) or is_a(kind, "numpy", "dtype") or kind.__name__ == "cython_function_or_method":
        return False
    top = kind.__module__.partition(".")[0]
    if top == "pyarrow" or (top == "pandas" and (is_a(kind, top, "Index") or is_a(kind, top, "ExtensionDtype"))):
        return False
    return (kind.__module__, kind.__name__) not in _FIXED_NAMES


def is_a(kind: type, module: str, name: str) -> bool:
    """Whether a type or a base of it has this name, in this module or one inside it; nothing is imported."""
    return any(
        base.__name__ == name and (base.__module__ == module or base.__module__.startswith(f"{module}."))
        for base in kind.__mro__
    )


def type_name(value: object) -> str:
    """A value's type as a user knows it: without ``builtins`` and ``__main__``."""
    return kind_name(type(value))


def kind_name(kind: type) -> str:
    """The same for a type."""
    module = kind.__module__.lstrip("_")
    return kind.__qualname__ if module in ("builtins", "main__") else f"{module}.{kind.__qualname__}"


def made_by_python(name: str, value: object, cls: type) -> bool:
    """Whether a class has this member from its slots, or got it when somebody looked."""
    if isinstance(value, types.MemberDescriptorType):
        return value.__objclass__ is cls
    return name == "__slotnames__" or (name == "__annotations__" and not value)


# -- types of ctypes -------------------------------------------------------------------------------


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
