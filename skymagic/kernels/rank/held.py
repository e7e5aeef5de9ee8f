"""The objects that a rank has made of the notebook's values, so that values which come later can refer to them.

Nothing is kept alive by being listed here: what the rank lets go of is gone, and the notebook is told with the next report.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.data.values.pickled import FIXED_TYPES, Ref, linkable_kinds

GONE = object()
"""In the place of an object that the rank has let go of."""
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
    """Of types that know no weak references: lists and dicts; as long as something else holds them."""
    users: set[str] = field(default_factory=set)
    """Names that were bound with it, or with something that refers to it."""

    def sweep(self) -> list[int]:
        """Let go of what nothing else holds, and then of what was in that."""
        lost: list[int] = []
        while gone := [number for number in self.strong if sys.getrefcount(self.strong[number]) <= _ALONE]:
            for number in gone:
                del self.strong[number]
            lost += gone
        return lost


class Held:
    """What a rank holds of the notebook's values."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._roots: dict[str, object] = {}
        self._died: deque[Ref] = deque()

    def find(self, ref: Sequence[int]) -> object:
        """The object at a place; `GONE` where it is gone."""
        table, number = ref
        known = self._tables.get(table, _Table())
        if number in known.strong:
            return known.strong[number]
        weak = known.weak.get(number)
        found = weak() if weak is not None else None
        return GONE if found is None else found

    def keep(self, bundle: Mapping[str, Any], values: Mapping[str, object], memo: dict[int, object]) -> None:
        """List what a bundle has made.

        Args:
            values: the names that it binds.
            memo: the objects by their numbers.
        """
        for table in self._tables.values():
            table.users.difference_update(values)
        for number, *_ in bundle["links"]:
            if number in self._tables:
                self._tables[number].users.update(values)
        if bundle["table"] is not None:
            self._roots.update({name: value for name, value in values.items() if type(value) not in FIXED_TYPES})
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
        unlinked = [name for name, root in self._roots.items() if not holds(variables.get(name), root)]
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
        kinds = linkable_kinds(memo)
        inner = _inner_dicts(memo.values())
        for index, value in memo.items():
            kind = type(value)
            if kind not in kinds or id(value) in inner:
                continue
            if kind.__weakrefoffset__:
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


def holds(value: object, root: object, depth: int = _WRAPPERS) -> bool:
    """Whether a name's value is what was sent, or a module around it."""
    if value is root:
        return True
    parts = getattr(value, "_modules", None)
    return depth > 0 and isinstance(parts, dict) and any(holds(each, root, depth - 1) for each in parts.values())
