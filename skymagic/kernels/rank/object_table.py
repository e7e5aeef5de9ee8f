"""Track objects from the notebook's values that a rank still holds, and names its code reads.

The rank reports both after each cell. Later values refer to those objects. Listing an object here
does not keep it alive: objects that the rank releases are gone, and the next report includes them.
A cell that may run a function needs the notebook's values of the global names that the function
reads. A function comes from the notebook, from a cell, from ``exec`` or ``%run``, and is stored in
a variable, a hook, a registry or an instance. So code is listed when it is compiled, rebuilt or
bound, by weak references: code that can no longer run reads nothing.
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
from skymagic.data.namespace import Namespace
from skymagic.data.values.pickled import FIXED_TYPES, Ref, linkable_kinds
from skymagic.wire.outcome import NamesRead
from skymagic.wire.values import PackedBundle

GONE = object()
"""Sentinel: the rank has released the object."""
_WRAPPERS = 3
"""Maximum number of wrapper modules: ``DistributedDataParallel(torch.compile(model))``."""
_probe = {0: [0]}
_ALONE = sys.getrefcount(_probe[0])
"""Reference count of an object that only a dict holds."""


class _Weak(weakref.ref[Any]):
    """Reference to an object of a table."""

    __slots__ = ("place",)
    place: Ref


@dataclass
class _Table:
    """Objects created by one pickle."""

    weak: dict[int, _Weak] = field(default_factory=dict)
    strong: dict[int, Any] = field(default_factory=dict)
    """Objects without weak references, lists and dicts, kept while something else holds them."""
    users: set[str] = field(default_factory=set)
    """Names bound to its objects, or to objects that refer to them."""

    def sweep(self) -> list[int]:
        """Drop objects that nothing else holds, and then the objects inside them."""
        lost: list[int] = []
        # a bound value is listed by its number in the pickle and as a root
        listed = Counter(map(id, self.strong.values()))
        while unused := [
            number
            for number in self.strong
            if sys.getrefcount(self.strong[number]) < _ALONE + listed[id(self.strong[number])]
        ]:
            for number in unused:
                del self.strong[number]
            lost += unused
        return lost


class ObjectTable:
    """Objects of the notebook's values that a rank holds."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._roots: dict[str, weakref.ref[Any] | int] = {}
        """Name → weak reference to the value sent under it, or its identity."""
        # a deque is safe without a lock: objects may die on any thread, at any line
        self._died: deque[Ref] = deque()
        self._in_cell = False
        gc.callbacks.append(functools.partial(_sweep_before_collection, weakref.ref(self)))

    def begin_cell(self) -> None:
        """Make full garbage collections also free objects that only these tables hold."""
        self._in_cell = True

    def end_cell(self) -> None:
        """Leave the tables alone until the next cell."""
        self._in_cell = False

    def before_collection(self) -> None:
        """Drop lists and dicts that nothing else holds.

        ``gc.collect()`` in a cell then frees their contents.
        """
        if self._in_cell:
            self.settle()

    def find(self, ref: Sequence[int]) -> object:
        """Return the object of a reference, `GONE` if it was released."""
        table, number = ref
        entry = self._tables.get(table, _Table())
        if number in entry.strong:
            return entry.strong[number]
        weak = entry.weak.get(number)
        target = weak() if weak is not None else None
        return GONE if target is None else target

    def keep(
        self, bundle: PackedBundle, values: Mapping[str, object], memo: dict[int, object]
    ) -> None:
        """List the objects of a bundle.

        Args:
            values: by the names that the bundle binds.
            memo: all its objects, by their numbers.
        """
        for table in self._tables.values():
            table.users.difference_update(values)
        for link in bundle.links:
            if link.table in self._tables:
                self._tables[link.table].users.update(values)
        if bundle.table is not None:
            self._roots.update(
                {
                    name: weakref.ref(value) if type(value).__weakrefoffset__ else id(value)
                    for name, value in values.items()
                    if type(value) not in FIXED_TYPES
                }
            )
            memo.update({-1 - index: value for index, value in enumerate(values.values())})
            self._tables[bundle.table] = self._build_table(bundle.table, memo, set(values))
        self._forget_unused()

    def settle(self) -> None:
        """Drop objects that were needed only while the values were created."""
        for number, table in self._tables.items():
            self._died.extend((number, index) for index in table.sweep())

    def report(
        self, variables: Mapping[str, object]
    ) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
        """Return names that no longer hold the sent value, and references of released objects.

        Both since the last report.
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
            number, index = self._died.popleft()
            if number in self._tables:
                lost.append((number, index))
        return tuple(unlinked), tuple(lost)

    def _build_table(self, number: int, memo: dict[int, object], users: set[str]) -> _Table:
        table = _Table(users=users)
        kinds_of = list(map(type, memo.values()))
        kinds = linkable_kinds(kinds_of)
        # most objects of a pickle are tuples and strings: filter them without a Python loop
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
    """Return the ids of dicts that hold the parts of torch modules.

    Holding them would hold a part that was replaced.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return set()
    modules = [item for item in objects if isinstance(item, torch.nn.Module)]
    return {id(item) for module in modules for item in vars(module).values() if type(item) is dict}


def _sweep_before_collection(
    held: weakref.ref[ObjectTable], phase: str, info: Mapping[str, int]
) -> None:
    objects = held()
    if objects is not None and phase == "start" and info["generation"] == _FULL_COLLECTION:
        objects.before_collection()


_FULL_COLLECTION = 2


def _is_held(value: object, root: weakref.ref[Any] | int) -> bool:
    """Return True if a name's value is still the sent value, or a module around it."""
    if isinstance(root, int):
        return id(value) == root
    sent = root()
    return sent is not None and refers_to(value, sent)


def refers_to(value: object, root: object, depth: int = _WRAPPERS) -> bool:
    """Return True if a name's value is the sent value, or a module around it."""
    if value is root:
        return True
    parts = getattr(value, "_modules", None)
    return (
        depth > 0
        and isinstance(parts, dict)
        and any(refers_to(part, root, depth - 1) for part in parts.values())
    )


class CodeReads:
    """List of one rank's code and the global names that it reads."""

    def __init__(self, variables: Namespace) -> None:
        self._variables = variables
        self._codes: dict[int, tuple[weakref.ref[types.CodeType], str, frozenset[str]]] = {}
        self._report: tuple[str, dict[str, tuple[str, ...]]] | None = None

    def add_compiled(self, code: object) -> None:
        """Add the functions and classes inside a compiled cell."""
        for inner in getattr(code, "co_consts", ()):
            if isinstance(inner, types.CodeType):
                self.add(inner)

    def add(self, code: types.CodeType) -> None:
        """Add the code of a function, and of functions inside, which may outlive it."""
        if id(code) not in self._codes:
            code_names_found = code_names(code)
            # Names that it binds count too: unless the rank has the notebook's latest value,
            # assigning the object that the rank already has looks like no assignment.
            names = code_names_found.loads | code_names_found.sets
            on_free = functools.partial(self._forget, id(code))
            self._codes[id(code)] = (
                weakref.ref(code, on_free),
                code.co_qualname.partition(".")[0],
                names,
            )
            self._report = None
            self.add_compiled(code)

    def bound(self, values: Iterable[object]) -> None:
        """Add functions among newly bound values, which may come from ``exec`` or ``%run``."""
        for value in values:
            for function in _functions(value):
                if function.__globals__ is self._variables:
                    self.add(function.__code__)

    def report(self, known_names: Iterable[str]) -> NamesRead:
        """Return the names that code reads; they are left out if `known_names` has the digest."""
        if self._report is None:
            reads: dict[str, set[str]] = {}
            # a copy, because code that is freed during the loop is removed
            for _, function, names in list(self._codes.values()):
                reads.setdefault(function, set()).update(names)
            listed = {
                function: tuple(sorted(names)) for function, names in sorted(reads.items()) if names
            }
            # import nothing here: the cell may have broken imports
            self._report = hashlib.sha256(repr(listed).encode()).hexdigest(), listed
        mark, listing = self._report
        return NamesRead(mark, None if mark in known_names else listing)

    def _forget(self, key: int, _: object) -> None:
        self._codes.pop(key, None)
        self._report = None


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield functions that a variable's value is, wraps or, for a class, contains."""
    for _ in range(_WRAPPED):
        kind = type(value)
        if kind is types.FunctionType:
            yield value  # type: ignore[misc]
        elif issubclass(kind, type) and vars(value).get("__module__") == "__main__":
            for member in vars(value).values():
                if not issubclass(type(member), type):
                    yield from _functions(member)
        value = _unwrap(value)


def _unwrap(value: object) -> object:
    """Return the object that a value wraps, without running the user's code.

    ``getattr`` would import lazily loaded attributes of a module.
    """
    if isinstance(value, types.ModuleType):
        return None
    for name in ("__func__", "func", "fget"):
        if type(vars(type(value)).get(name)) in _MEMBERS:
            return getattr(value, name)
    try:
        own = object.__getattribute__(value, "__dict__")
        return next((own[name] for name in ("__wrapped__", "func") if name in own), None)
    except Exception:  # it has no ``__dict__``, or that is a property
        return None


_MEMBERS = {types.MemberDescriptorType, types.GetSetDescriptorType}
"""Types of C attributes, as methods, partials and properties have them."""


_WRAPPED = 8
"""Maximum number of decorators around one function."""
