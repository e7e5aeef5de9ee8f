"""The global names that the functions and classes of a rank read: a cell that may run one needs the notebook's values of them.

A function comes from the notebook, from a cell, from ``exec`` or ``%run``, and ends up in a variable, a hook, a registry or an
instance. So code is listed as it is compiled, rebuilt or bound, by weak references: what nothing can run any more reads nothing.
"""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from skymagic.data.capture.code import code_names


class Reads:
    """Lists the code of one rank.

    Args:
        variables: the rank's global names.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._codes: dict[int, tuple[weakref.ref[types.CodeType], str, frozenset[str]]] = {}
        self._report: tuple[str, dict[str, list[str]]] | None = None

    def compiled(self, code: object) -> None:
        """A cell was compiled: the functions and classes in it may be made."""
        for inner in getattr(code, "co_consts", ()):
            if isinstance(inner, types.CodeType):
                self.add(inner)

    def add(self, code: types.CodeType) -> None:
        """There is a function of this code; functions in it may outlive it."""
        if id(code) not in self._codes:
            names = code_names(code).loads
            gone = functools.partial(self._forget, id(code))
            self._codes[id(code)] = weakref.ref(code, gone), code.co_qualname.partition(".")[0], names
            self._report = None
            self.compiled(code)

    def bound(self, values: Iterable[object]) -> None:
        """Variables hold these now: the functions among them may come from ``exec`` or ``%run``."""
        for value in values:
            for function in _functions(value):
                if function.__globals__ is self._variables:
                    self.add(function.__code__)

    def report(self, known: Iterable[str]) -> dict[str, Any]:
        """What is read: ``{"digest": …, "names": {function or class: [names]}}``; no names where the notebook knows the digest."""
        if self._report is None:
            found: dict[str, set[str]] = {}
            for _, function, names in list(self._codes.values()):
                found.setdefault(function, set()).update(names)
            listed = {function: sorted(names) for function, names in sorted(found.items()) if names}
            # nothing is imported here: the cell may have broken that
            self._report = hashlib.sha256(repr(listed).encode()).hexdigest(), listed
        mark, listing = self._report
        return {"digest": mark, "names": None if mark in known else listing}

    def _forget(self, key: int, _: object) -> None:
        self._codes.pop(key, None)
        self._report = None


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Functions that a variable's value is, wraps or, for a class, has."""
    for _ in range(_WRAPPED):
        kind = type(value)
        if kind is types.FunctionType:
            yield value  # type: ignore[misc]
        elif issubclass(kind, type) and vars(value).get("__module__") == "__main__":
            for member in vars(value).values():
                if not issubclass(type(member), type):
                    yield from _functions(member)
        value = _wrapped(value)


def _wrapped(value: object) -> object:
    """What a variable's value wraps. Nothing of the user's runs for it: ``getattr`` would import what a module loads on use."""
    if isinstance(value, types.ModuleType):
        return None
    for name in ("__func__", "func", "fget"):
        if type(vars(type(value)).get(name)) in _MEMBERS:
            return getattr(value, name)
    try:
        own = object.__getattribute__(value, "__dict__")
        return next((own[name] for name in ("__wrapped__", "func") if name in own), None)
    except Exception:  # there is none, or it is a property
        return None


_MEMBERS = {types.MemberDescriptorType, types.GetSetDescriptorType}
"""Of methods, partials and properties: attributes that are C's."""


_WRAPPED = 8
"""Decorators around one function that are looked through."""
