"""Pickle enumerations by value: the class unchanged, and each member as one object.

An enumeration cannot be rebuilt from its members' values. The notebook's `__new__` and `__init__`
may set attributes or count, and may not be repeatable; aliases and composite flags have no values
that would recreate them. So the class is created empty, its members are created bare, and both then
get all attributes that they had where they were defined.

Pickles refer to the functions in this module by name.
"""

from __future__ import annotations

import abc
import enum
import types
from typing import Any

from cloudpickle import cloudpickle as _cloud

from skymagic.data.values import rebuild
from skymagic.data.values.memory import Reduced

_NOT_SENT = ("__dict__", "__weakref__", "_abc_impl", "_abc_cache", "__annotate_func__")
_REPEATED = "_repeated_"
"""Key in a class's state: names that the class repeats unchanged from a base."""


# -- reducing --------------------------------------------------------------------------------------


def class_arguments(cls: type[enum.Enum], tracker: str) -> tuple[Any, ...]:
    """Return the arguments of `new_enum` that create this class without its contents."""
    first = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return tracker, type(cls), cls.__name__, cls.__bases__, first


def class_state(cls: type[enum.Enum]) -> tuple[dict[str, object], list[Any]]:
    """Return a class's own attributes, and each member's attributes for `fill_enum`."""
    attributes: dict[str, object] = {}
    repeated: list[str] = []
    for name, value in sorted(vars(cls).items()):
        if name in _NOT_SENT or isinstance(value, types.MemberDescriptorType):
            continue
        # EnumType copies parts of Enum into the class; some of them cannot be pickled.
        if _inherited(cls, name) is value:
            repeated.append(name)
        else:
            attributes[name] = value
    attributes[_REPEATED] = tuple(repeated)
    # An alias is another name of a member, which is listed once.
    members = list(dict.fromkeys(map(_Identity, cls._member_map_.values())))
    member_ids = {id(entry.member) for entry in members}
    # Flag's operators add composite members on first use, which does not change the enumeration.
    attributes["_value2member_map_"] = {
        value: member
        for value, member in cls._value2member_map_.items()
        if id(member) in member_ids
    }
    if isinstance(cls, abc.ABCMeta):
        # Virtual subclasses are in no attribute that could be copied.
        registered, *_ = abc._get_dump(cls)
        attributes["_abc_impl"] = [reference() for reference in registered]
    return attributes, [(entry.member, member_state(entry.member)) for entry in members]


_ABSENT = object()


def _inherited(cls: type, name: str) -> Any:
    """Return the value that a class would inherit for a name if it did not define it itself."""
    return next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), _ABSENT)


class _Identity:
    """Wrapper that compares members by identity: their own `__hash__` may be user code."""

    def __init__(self, member: enum.Enum) -> None:
        self.member = member

    def __hash__(self) -> int:
        return id(self.member)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.member is self.member


def reduce_member(member: enum.Enum) -> Reduced:
    """Reduce a member to its class and name, or a composite flag to its value."""
    cls = type(member)
    name = vars(member).get("_name_")
    base, args = _bare(member)
    if isinstance(name, str) and cls._member_map_.get(name) is member:
        return new_member, (cls, name, base, args)
    # By identity: a member's own `__eq__` may be user code.
    is_registered = next(
        (True for registered in cls._value2member_map_.values() if registered is member), False
    )
    return composite_member, (cls, is_registered, base, args, member_state(member))


def reduce_property(prop: enum.property) -> Reduced:
    """Reduce the descriptor that looks up a member, or an attribute of members."""
    parts = (prop.fget, prop.fset, prop.fdel, prop.__doc__)
    return new_property, (type(prop), parts), vars(prop), None, None, fill_property


def member_state(member: enum.Enum) -> dict[str, object]:
    """Return the attributes of a member, without those cached by its operators."""
    state = dict(vars(member))
    state.pop("_inverted_", None)  # set by the first ``~``; the class has None
    # Members may also keep attributes in slots.
    for kind in type(member).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(member, name):
                state.setdefault(name, slot.__get__(member))
    return state


def _bare(member: enum.Enum) -> tuple[type, tuple[Any, ...]]:
    """Return the type that defines a member's memory layout, and the arguments that create it."""
    # The built-in type whose `__new__` is implemented in C.
    base: Any = next(
        kind
        for kind in type(member).__mro__
        if isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    )
    if base is object:
        return base, ()
    if hasattr(base, "__getnewargs__"):  # int, str, float, tuple, …
        return base, base.__getnewargs__(member)
    reduced = base.__reduce__(member)  # datetime.date, decimal.Decimal, …
    if isinstance(reduced, tuple) and reduced[0] is type(member):
        return base, reduced[1]
    return base, (member.value,)


# -- rebuilding ------------------------------------------------------------------------------------


def new_enum(
    tracker: str, meta: type, name: str, bases: tuple[type, ...], first: dict[str, object]
) -> type:
    """Return the class with this identity, creating it without members if it does not exist.

    The metaclass's `__new__` and the notebook's `__init_subclass__` ran where the class was
    defined.
    """
    existing = rebuild.known_class(tracker)
    if existing is not None:
        return existing
    # Filled by `new_member` and `composite_member` before the state of the class arrives.
    space = {**first, "_member_map_": {}, "_value2member_map_": {}}
    with rebuild.quiet(bases):
        cls: type = type.__new__(meta, name, bases, space)
    if isinstance(cls, abc.ABCMeta):
        # `ABCMeta.__new__` would have done this, but was bypassed.
        abc._abc_init(cls)  # type: ignore[attr-defined]
    return rebuild.track(_cloud._lookup_class_or_track(tracker, cls))


def fill_enum(cls: type[enum.Enum], state: tuple[dict[str, object], list[Any]]) -> None:
    """Set the attributes of an enumeration and its members."""
    rebuild.fill_class(cls, state, _set_state)


def _set_state(cls: type[enum.Enum], state: tuple[dict[str, object], list[Any]]) -> None:
    attributes, members = state
    for member, inner in members:
        _fill_member(member, inner)
    named: Any = attributes["_member_map_"]
    composite = {
        value: member
        for value, member in cls._value2member_map_.items()
        if member not in named.values()
    }
    value: Any
    for name, value in attributes.items():
        if name == "_abc_impl":
            for item in value:
                cls.register(item)  # type: ignore[attr-defined]
        elif name == _REPEATED:
            for item in value:
                type.__setattr__(cls, item, _inherited(cls, item))
        else:  # bypass the metaclass, which protects members from assignment
            type.__setattr__(cls, name, value)
    # Composite members that were created in this process stay registered.
    for value, member in composite.items():
        cls._value2member_map_.setdefault(value, member)


def new_member(cls: type[enum.Enum], name: str, base: Any, args: tuple[Any, ...]) -> enum.Enum:
    """Return the member with this name, creating it without attributes if necessary."""
    member = cls._member_map_.get(name)
    if member is None:
        member = base.__new__(cls, *args)
        object.__setattr__(member, "_name_", name)  # a member's hash is that of its name
        cls._member_map_[name] = member
    return member


def composite_member(
    cls: type[enum.Enum],
    is_registered: bool,
    base: Any,
    args: tuple[Any, ...],
    state: dict[str, object],
) -> enum.Enum:
    """Return the unnamed member with this value, creating it if necessary.

    Args:
        is_registered: True if its class can look it up by value.
    """
    value = state["_value_"]
    member = cls._value2member_map_.get(value) if is_registered else None
    if member is None:
        member = base.__new__(cls, *args)
        _fill_member(member, state)
        if is_registered:
            cls._value2member_map_[value] = member
    return member


def _fill_member(member: enum.Enum, state: dict[str, object]) -> None:
    for name, value in state.items():
        object.__setattr__(member, name, value)  # works for frozen dataclasses too


def new_property(kind: type, parts: tuple[Any, ...]) -> Any:
    """Create the descriptor without its attributes."""
    return kind(*parts)


def fill_property(prop: Any, state: dict[str, object]) -> None:
    """Set the attributes of a descriptor."""
    vars(prop).update(state)
