"""Pickle exceptions with their fields, attributes, notes and causes, but without tracebacks.

Pickles refer to the functions in this module by name.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from skymagic.data.values.memory import Reduced

State = tuple[tuple[Any, ...], dict[str, object], dict[str, object]]
"""`args`, fields that are not in `__dict__` (`errno`, `name`, slots), and `__dict__`."""
Chain = tuple[BaseException | None, BaseException | None, bool]
"""Cause, context, and True if the context is suppressed."""


def reduce_exception(problem: BaseException) -> Reduced:
    """Reduce an exception so that it is rebuilt without a call of its `__init__`.

    The arguments of `__init__` may differ from `args`. An exception class's own `__reduce__` takes
    precedence.
    """
    kind = type(problem)
    if _reduces_itself(kind):
        reduced = problem.__reduce_ex__(5)
        extras = (
            {"__notes__": problem.__notes__} if hasattr(problem, "__notes__") else {},
            chain_of(problem),
        )
        # With items or a setter there is no place for notes and causes.
        if (
            isinstance(reduced, tuple)
            and len(reduced) in (2, 3)
            and extras != ({}, (None, None, False))
        ):
            own = reduced[2] if len(reduced) == 3 else None
            return (*reduced[:2], (own, *extras), None, None, fill_own)
        return reduced
    try:
        bare(kind, members(problem))
    except TypeError:  # only its package knows its memory layout
        return NotImplemented
    return bare, (kind, members(problem)), (state_of(problem), chain_of(problem)), None, None, fill


def _reduces_itself(kind: type[BaseException]) -> bool:
    methods = (kind.__reduce__, kind.__reduce_ex__, getattr(kind, "__setstate__", None))
    # Python's own implementations are method descriptors.
    return kind in copyreg.dispatch_table or not all(
        isinstance(method, types.MethodDescriptorType) for method in methods
    )


def bare(kind: type[BaseException], group: tuple[Any, ...] = ()) -> BaseException:
    """Create an exception without initializing it.

    Args:
        group: message and exceptions of an exception group, which can only be set at creation.
    """
    # If several bases are built-in exceptions, the one that defines the memory layout creates it.
    inner = max(
        (base for base in kind.__mro__ if base.__module__ == "builtins"),
        key=lambda base: base.__basicsize__,
    )
    created: BaseException = inner.__new__(kind, *group)
    return created


def members(problem: BaseException) -> tuple[Any, ...]:
    """Return the message and exceptions of a group, or an empty tuple for other exceptions."""
    return (
        (problem.message, list(problem.exceptions))
        if isinstance(problem, BaseExceptionGroup)
        else ()
    )


def state_of(problem: BaseException) -> State:
    """Return the state of an exception, without its type and its causes."""
    fields: dict[str, object] = {}
    for kind in type(problem).__mro__:
        for name, member in vars(kind).items():
            if not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            # The object of an AttributeError may be a model, or a module that is missing on the
            # other side. Python does not pickle it either.
            if name.startswith("__") or (kind is AttributeError and name == "obj"):
                continue
            with suppress(AttributeError):
                fields.setdefault(name, member.__get__(problem))
    attributes = {name: value for name, value in vars(problem).items() if name not in fields}
    plain = {name: value for name, value in fields.items() if value is not None and name != "args"}
    return problem.args, plain, attributes


def chain_of(problem: BaseException) -> Chain:
    """Return the cause and the context of an exception."""
    return problem.__cause__, problem.__context__, problem.__suppress_context__


def fill(problem: BaseException, state: tuple[State, Chain | None]) -> None:
    """Set an exception's state, in a second step because its attributes may refer to it."""
    (args, fields, attributes), chain = state
    put = object.__setattr__  # works for frozen dataclasses too
    put(problem, "args", args)
    for name, value in fields.items():
        with suppress(AttributeError, TypeError):  # read-only: a group's exceptions
            put(problem, name, value)
    vars(problem).update(attributes)
    if chain is not None:
        _set_chain(problem, chain)


def fill_own(problem: Any, state: tuple[Any, dict[str, object], Chain]) -> None:
    """Set the state of an exception with its own `__reduce__`."""
    own, notes, chain = state
    if own is not None:
        problem.__setstate__(own)
    if isinstance(problem, BaseException):
        vars(problem).update(notes)
        _set_chain(problem, chain)


def _set_chain(problem: BaseException, chain: Chain) -> None:
    # In this order: setting a cause suppresses the context.
    for name, value in zip(
        ("__cause__", "__context__", "__suppress_context__"), chain, strict=True
    ):
        object.__setattr__(problem, name, value)


def without_locals(problem: BaseException, travels: Callable[[object], bool]) -> BaseException:
    """Return a copy that can be pickled, leaving out attributes and causes that cannot.

    Args:
        travels: returns True if a part can be pickled.
    """
    copies: dict[int, BaseException] = {}

    def part(value: object) -> object:
        return value if travels(value) else f"<{type(value).__name__}, which cannot travel>"

    def copied(original: BaseException | None) -> BaseException | None:
        # Chains of causes and contexts may be cyclic.
        if original is None or id(original) in copies:
            return copies.get(id(original))
        inner = members(original)
        group = (inner[0], [copied(member) for member in inner[1]]) if inner else ()
        copy = copies[id(original)] = bare(type(original), group)
        args, fields, attributes = state_of(original)
        filtered = tuple(
            {name: value for name, value in mapping.items() if travels(value)}
            for mapping in (fields, attributes)
        )
        chain = (
            copied(original.__cause__),
            copied(original.__context__),
            original.__suppress_context__,
        )
        fill(copy, ((tuple(map(part, args)), filtered[0], filtered[1]), chain))
        return copy

    return copied(problem) or problem
