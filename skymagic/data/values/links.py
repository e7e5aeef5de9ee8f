"""Objects of a value by their number in its pickle: how another value, sent later, refers to them instead of copying them.

Pickler and unpickler number what they have made in the same order. So the number that an object has on this side finds the
object that the other side has made of it, for as long as the value is pickled in the same way.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field

from skymagic.data.values.kinds import changeable, is_a
from skymagic.data.values.memory import LinkedMemory, MemoryBlock
from skymagic.data.values.pickled import CONTAINERS

LISTED = 4 << 20
"""Bytes of a pickle above which only the value itself has a number, and not each object in it."""
ROOT = -1
"""The number of a value itself; those of several in one pickle are -1, -2, …"""

FIXED_TYPES = (int, float, bool, type(None), complex, str, bytes)
"""Of which it never matters which object it is."""
_SINGLE = (("logging", "Logger"), ("IPython", "InteractiveShell"))

Ref = tuple[int, int]
"""A table of objects that the other side has kept, and a number in it."""


@dataclass
class PickleLinks:
    """What a pickle refers to instead of copying it."""

    objects: dict[int, Ref] = field(default_factory=dict)
    """Identity → where the other side has it."""
    memory: LinkedMemory = field(default_factory=LinkedMemory)
    """Memory of those objects."""
    used: dict[int, int] = field(default_factory=dict)
    """Identities of those that the pickle does refer to → their places among them."""

    def number(self, obj: object) -> int | None:
        """The place of an object among those referred to; None for one that travels itself."""
        return self.used.setdefault(id(obj), len(self.used)) if id(obj) in self.objects else None


def linkable(kind: type) -> bool:
    """Whether it matters which object of this type it is; not of those that each process has one of."""
    if kind in CONTAINERS:
        return True
    if (
        kind in FIXED_TYPES
        or kind is tuple
        or kind.__module__ == "typing"
        or issubclass(kind, (memoryview, MemoryBlock, types.GenericAlias, types.UnionType))
    ):
        return False
    if any(is_a(kind, *each) for each in _SINGLE):
        return False
    return changeable(kind) or issubclass(kind, types.FunctionType)


def travels(function: types.FunctionType) -> bool:
    """Whether a function travels by itself: not as a name of a module, nor with its class."""
    name = function.__qualname__
    return "<locals>" in name or ("." not in name and function.__module__ in (None, "__main__"))


def linkable_kinds(objects: Mapping[int, object]) -> set[type]:
    """Those types of some objects that are linkable."""
    return {kind for kind in set(map(type, objects.values())) if linkable(kind)}
