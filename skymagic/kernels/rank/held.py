"""What a rank tells of its values after each cell: which objects it still holds of what the notebook sent, and which global names its code reads.

Values that come later refer to those objects. Nothing is kept alive by being listed here: what the rank lets go of is gone, and the notebook
is told with the next report. A cell that may run a function needs the values of the notebook for the names that the function reads. A
function comes from the notebook, from a cell, from ``exec`` or ``%run``, and ends up in a variable, a hook, a registry or an instance. So
code is listed as it is compiled, rebuilt or bound, by weak references: what nothing can run any more reads nothing.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from skymagic.data.capture.code import code_names
from skymagic.data.values.pickled import FIXED_TYPES, Ref, linkable_kinds

GONE = object()
"""Sentinel: the rank has let go of the object."""
_WRAPPERS = 3
"""Modules around a module that are looked through: ``DistributedDataParallel(torch.compile(model))``."""
_probe = {0: [0]}
_ALONE = sys.getrefcount(_probe[0])
"""References to an object that nothing but a dict holds."""


class _Weak(weakref.ref[Any]):
    """A reference to an object of a table."""

    __slots__ = ("place",)
    place: Ref


@dataclass
class _Table:
    """What one pickle has made."""

    weak: dict[int, _Weak] = field(default_factory=dict)
    strong: dict[int, Any] = field(default_factory=dict)
    """Objects of types without weak references, lists and dicts; as long as something else holds them."""
    users: set[str] = field(default_factory=set)
    """Names that were bound with it, or with something that refers to it."""

    def sweep(self) -> list[int]:
        """Let go of what nothing else holds, and then of what was in that."""
        lost: list[int] = []
        # a value that was bound is listed by its place in the pickle and as a root
        listed = Counter(map(id, self.strong.values()))
        while gone := [
            number
            for number in self.strong
            if sys.getrefcount(self.strong[number]) < _ALONE + listed[id(self.strong[number])]
        ]:
            for number in gone:
                del self.strong[number]
            lost += gone
        return lost


class HeldObjects:
    """What a rank holds of the notebook's values."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._roots: dict[str, weakref.ref[Any] | int] = {}
        """Name → what was sent under it, or its identity where it has no weak references."""
        self._died: deque[Ref] = deque()
        self._in_cell = False
        gc.callbacks.append(functools.partial(_sweep_before_collection, weakref.ref(self)))

    def begin_cell(self) -> None:
        """From now on a full garbage collection also frees what only these tables hold."""
        self._in_cell = True

    def end_cell(self) -> None:
        """Leave the tables alone again until the next cell."""
        self._in_cell = False

    def before_collection(self) -> None:
        """Let go of lists and dicts that nothing else holds, so that ``gc.collect()`` in a cell frees what is in them."""
        if self._in_cell:
            self.settle()

    def find(self, ref: Sequence[int]) -> object:
        """The object at a place; `GONE` where it is gone."""
        table, number = ref
        known = self._tables.get(table, _Table())
        if number in known.strong:
            return known.strong[number]
        weak = known.weak.get(number)
        found = weak() if weak is not None else None
        return GONE if found is None else found

    def keep(
        self, bundle: Mapping[str, Any], values: Mapping[str, object], memo: dict[int, object]
    ) -> None:
        """List what a bundle has made: `values` by the names that it binds, and in `memo` all objects by their numbers."""
        for table in self._tables.values():
            table.users.difference_update(values)
        for number, *_ in bundle["links"]:
            if number in self._tables:
                self._tables[number].users.update(values)
        if bundle["table"] is not None:
            self._roots.update(
                {
                    name: weakref.ref(value) if type(value).__weakrefoffset__ else id(value)
                    for name, value in values.items()
                    if type(value) not in FIXED_TYPES
                }
            )
            memo.update({-1 - index: value for index, value in enumerate(values.values())})
            self._tables[bundle["table"]] = self._listed(bundle["table"], memo, set(values))
        self._forget_unused()

    def settle(self) -> None:
        """Let go of what was of use only while the values were made."""
        for number, table in self._tables.items():
            self._died.extend((number, each) for each in table.sweep())

    def report(self, variables: Mapping[str, object]) -> dict[str, Any]:
        """What has gone since the last report.

        Returns:
            ``{"unlinked": names that no longer hold what was sent, "lost": places of objects that are gone}``.
        """
        unlinked = [
            name for name, root in self._roots.items() if not _is_held(variables.get(name), root)
        ]
        for name in unlinked:
            del self._roots[name]
            for table in self._tables.values():
                table.users.discard(name)
        self._forget_unused()
        self.settle()
        lost = []
        while self._died:
            number, each = self._died.popleft()
            if number in self._tables:
                lost.append([number, each])
        return {"unlinked": unlinked, "lost": lost}

    def _listed(self, number: int, memo: dict[int, object], users: set[str]) -> _Table:
        table = _Table(users=users)
        kinds_of = list(map(type, memo.values()))
        kinds = linkable_kinds(kinds_of)
        # most of what a pickle makes is tuples and strings: they go without a loop of Python's
        linked = list(compress(memo.items(), map(kinds.__contains__, kinds_of)))
        inner = _inner_dicts(value for _, value in linked)
        for index, value in linked:
            if id(value) in inner:
                continue
            if type(value).__weakrefoffset__:
                ref = table.weak[index] = _Weak(value, self._forget)
                ref.place = number, index
            else:
                table.strong[index] = value
        return table

    def _forget(self, ref: weakref.ref[Any]) -> None:
        assert isinstance(ref, _Weak)
        self._died.append(ref.place)

    def _forget_unused(self) -> None:
        for number in [number for number, table in self._tables.items() if not table.users]:
            del self._tables[number]


def _inner_dicts(objects: Any) -> set[int]:
    """The dicts in which torch's modules keep their parts: holding them would hold a part that was replaced."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return set()
    modules = [each for each in objects if isinstance(each, torch.nn.Module)]
    return {id(each) for module in modules for each in vars(module).values() if type(each) is dict}


def _sweep_before_collection(
    held: weakref.ref[HeldObjects], phase: str, info: Mapping[str, int]
) -> None:
    objects = held()
    if objects is not None and phase == "start" and info["generation"] == _FULL_COLLECTION:
        objects.before_collection()


_FULL_COLLECTION = 2


def _is_held(value: object, root: weakref.ref[Any] | int) -> bool:
    """Return True if a name's value is still what was sent, or a module around it."""
    if isinstance(root, int):
        return id(value) == root
    sent = root()
    return sent is not None and holds(value, sent)


def holds(value: object, root: object, depth: int = _WRAPPERS) -> bool:
    """Whether a name's value is what was sent, or a module around it."""
    if value is root:
        return True
    parts = getattr(value, "_modules", None)
    return (
        depth > 0
        and isinstance(parts, dict)
        and any(holds(each, root, depth - 1) for each in parts.values())
    )


class CodeReads:
    """Lists the code of one rank."""

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
            found = code_names(code)
            # A name that it binds as well: unless the rank has the notebook's latest value, an assignment of the object
            # that the rank has already could not be told from no assignment.
            names = found.loads | found.sets
            gone = functools.partial(self._forget, id(code))
            self._codes[id(code)] = (
                weakref.ref(code, gone),
                code.co_qualname.partition(".")[0],
                names,
            )
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
"""Types of C attributes, as methods, partials and properties have them."""


_WRAPPED = 8
"""Decorators around one function that are looked through."""
