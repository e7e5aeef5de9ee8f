"""How exceptions travel: whole, with their fields, attributes, notes and what they follow from; tracebacks stay where they are.

The names in here stand in pickles.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from skymagic.data.values.memory import Reduced

State = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""args, fields that are not in ``__dict__`` (``errno``, ``name``, slots), and ``__dict__``."""
Chain = tuple[BaseException | None, BaseException | None, bool]
"""Cause, context, and whether the context is not shown."""


def reduce_exception(problem: BaseException) -> Reduced:
    """Without ``__init__``, whose arguments need not be the exception's ``args``; its own ``__reduce__`` comes first."""
    kind = type(problem)
    if _reduces_itself(kind):
        reduced = problem.__reduce_ex__(5)
        more = (
            {"__notes__": problem.__notes__} if hasattr(problem, "__notes__") else {},
            chain_of(problem),
        )
        if (
            isinstance(reduced, tuple)
            and len(reduced) in (2, 3)
            and more != ({}, (None, None, False))
        ):
            own = reduced[2] if len(reduced) == 3 else None
            return (*reduced[:2], (own, *more), None, None, fill_own)
        return reduced
    try:
        bare(kind, members(problem))
    except TypeError:  # it lies in memory as only its package knows
        return NotImplemented
    return bare, (kind, members(problem)), (state_of(problem), chain_of(problem)), None, None, fill


def _reduces_itself(kind: type[BaseException]) -> bool:
    own = (kind.__reduce__, kind.__reduce_ex__, getattr(kind, "__setstate__", None))
    return kind in copyreg.dispatch_table or not all(
        isinstance(each, types.MethodDescriptorType) for each in own
    )


def bare(kind: type[BaseException], group: tuple[Any, ...] = ()) -> BaseException:
    """An exception that was not initialized.

    Args:
        group: message and exceptions, which a group can be given only now.
    """
    # of a class with several of Python's own as bases, the one that says how it lies in memory makes it
    inner = max(
        (each for each in kind.__mro__ if each.__module__ == "builtins"),
        key=lambda each: each.__basicsize__,
    )
    made: BaseException = inner.__new__(kind, *group)
    return made


def members(problem: BaseException) -> tuple[Any, ...]:
    """Message and exceptions of a group; nothing of others."""
    return (
        (problem.message, list(problem.exceptions))
        if isinstance(problem, BaseExceptionGroup)
        else ()
    )


def state_of(problem: BaseException) -> State:
    """What an exception is made of, beside its type and what it follows from."""
    fields: dict[str, Any] = {}
    for kind in type(problem).__mro__:
        for name, member in vars(kind).items():
            if not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            # an AttributeError's object may be a model, or a module that is not there: Python does not pickle it either
            if name.startswith("__") or (kind is AttributeError and name == "obj"):
                continue
            with suppress(AttributeError):
                fields.setdefault(name, member.__get__(problem))
    attributes = {name: value for name, value in vars(problem).items() if name not in fields}
    plain = {name: value for name, value in fields.items() if value is not None and name != "args"}
    return problem.args, plain, attributes


def chain_of(problem: BaseException) -> Chain:
    """What an exception follows from."""
    return problem.__cause__, problem.__context__, problem.__suppress_context__


def fill(problem: BaseException, state: tuple[State, Chain | None]) -> None:
    """Set an exception's state; separate, so that what it holds may hold it."""
    (args, fields, attributes), chain = state
    put = object.__setattr__  # of a frozen dataclass too
    put(problem, "args", args)
    for name, value in fields.items():
        with suppress(AttributeError, TypeError):  # read-only: a group's exceptions
            put(problem, name, value)
    vars(problem).update(attributes)
    if chain is not None:
        _set_chain(problem, chain)


def fill_own(problem: Any, state: tuple[Any, dict[str, Any], Chain]) -> None:
    """Fields of an exception with its own ``__reduce__``."""
    own, notes, chain = state
    if own is not None:
        problem.__setstate__(own)
    if isinstance(problem, BaseException):
        vars(problem).update(notes)
        _set_chain(problem, chain)


def _set_chain(problem: BaseException, chain: Chain) -> None:
    for name, value in zip(
        ("__cause__", "__context__", "__suppress_context__"), chain, strict=True
    ):
        object.__setattr__(problem, name, value)  # in this order: a cause hides the context


def without_locals(problem: BaseException, travels: Callable[[object], bool]) -> BaseException:
    """A copy that can travel: what cannot is left out, of its attributes and of what it follows from.

    Args:
        travels: whether a part can be pickled.
    """
    copies: dict[int, BaseException] = {}

    def part(value: object) -> object:
        return value if travels(value) else f"<{type(value).__name__}, which cannot travel>"

    def copied(original: BaseException | None) -> BaseException | None:
        if original is None or id(original) in copies:
            return copies.get(id(original))
        inner = members(original)
        group = (inner[0], [copied(each) for each in inner[1]]) if inner else ()
        made = copies[id(original)] = bare(type(original), group)
        args, fields, attributes = state_of(original)
        kept = tuple(
            {name: value for name, value in each.items() if travels(value)}
            for each in (fields, attributes)
        )
        chain = (
            copied(original.__cause__),
            copied(original.__context__),
            original.__suppress_context__,
        )
        fill(made, ((tuple(map(part, args)), kept[0], kept[1]), chain))
        return made

    return copied(problem) or problem
