"""Predicates about types: mutability, names that users recognize, members added by Python."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import pickle
import types

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
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)

# By name, so that their modules are not imported.
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
_PANDAS_SCALARS = (
    "Index",
    "ExtensionDtype",
    "NaTType",
    "Timestamp",
    "Timedelta",
    "Period",
    "Interval",
    "BaseOffset",
)


def changeable(kind: type) -> bool:
    """Return True if objects of a type can change, so that sharing them between names matters."""
    if (
        issubclass(kind, _FIXED)
        or is_a(kind, "numpy", "dtype")
        # A void scalar is a view of a record in an array, and can be assigned to.
        or (is_a(kind, "numpy", "generic") and not is_a(kind, "numpy", "void"))
        or kind.__name__ == "cython_function_or_method"
    ):
        return False
    top = kind.__module__.partition(".")[0]
    # Arrow data is immutable.
    if top == "pyarrow" or (
        top == "pandas" and any(is_a(kind, top, name) for name in _PANDAS_SCALARS)
    ):
        return False
    # Time zones do not change, except perhaps those of a class written in the notebook.
    if issubclass(kind, datetime.tzinfo) and top != "__main__":
        return False
    return (kind.__module__, kind.__name__) not in _FIXED_NAMES


def is_a(kind: type, module: str, name: str) -> bool:
    """Return True if a type or one of its bases has this name in this module or a submodule.

    Nothing is imported.
    """
    return any(
        base.__name__ == name
        and (base.__module__ == module or base.__module__.startswith(f"{module}."))
        for base in kind.__mro__
    )


def type_name(value: object) -> str:
    """Return the name of a value's type as users know it, without `builtins` and `__main__`."""
    return kind_name(type(value))


def kind_name(kind: type) -> str:
    """Return the name of a type as users know it, without `builtins` and `__main__`."""
    module = kind.__module__.lstrip("_")
    return (
        kind.__qualname__ if module in ("builtins", "main__") else f"{module}.{kind.__qualname__}"
    )


def is_slot_or_cache(name: str, value: object, cls: type) -> bool:
    """Return True if a class has this member from its slots, or as a cache of an earlier lookup."""
    if isinstance(value, types.MemberDescriptorType):
        return value.__objclass__ is cls
    return name in ("__slotnames__", "__annotations_cache__") or (
        name == "__annotations__" and not value
    )
