"""Snapshot of a rank's names at the start of a cell, without keeping their objects alive.

After the cell the rank compares: a name with another object was rebound. Holding the old objects
meanwhile would keep ``del model; gc.collect()`` from freeing anything before the cell ends, and
``model = None; model = Net()`` would hold two models.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

from skymagic.data.values.pickled import FIXED_TYPES

_SMALL = 1 << 10
"""Maximum length of a text that the snapshot holds itself."""


class NameSnapshot:
    """The object of each name, by weak reference if the object allows one.

    Small constants are held, because their memory does not matter. Lists, dicts, and other objects
    without weak references are known by their identity. If one of them is freed during the cell and
    the name's next object gets the same address, the two cannot be distinguished.
    """

    def __init__(self, variables: Mapping[str, object] | None = None) -> None:
        self._marks: dict[str, object] = {}
        self._identities: dict[str, int] = {}
        for name, value in (variables or {}).items():
            kind = type(value)
            if kind in FIXED_TYPES and not (
                kind in (str, bytes) and len(value) > _SMALL  # type: ignore[arg-type]
            ):
                self._marks[name] = value
            elif kind.__weakrefoffset__:
                self._marks[name] = weakref.ref(value)
            else:
                self._identities[name] = id(value)

    def __contains__(self, name: str) -> bool:
        return name in self._marks or name in self._identities

    def __iter__(self) -> Iterator[str]:
        yield from self._marks
        yield from self._identities

    def has(self, name: str, value: object) -> bool:
        """Return True if the name had this very object."""
        if name in self._identities:
            return self._identities[name] == id(value)
        mark = self._marks.get(name, _NOTHING)
        if type(mark) is weakref.ReferenceType:
            return mark() is value
        return mark is value


_NOTHING = object()
