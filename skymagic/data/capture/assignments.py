"""Which names the notebook's cells assign: a statement that runs again is a change, even where it makes an equal value.

A name counts as assigned where it has another object after the cell, or where the cell binds it on every path to its end: small
numbers, True and None are one object each, however often they are assigned. Ranks find in the same way what their cells bind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from skymagic.data.capture.names import CellNames, cell_names, interactive, is_output


class Assignments:
    """Counts the assignments to the global names of one notebook.

    Values are compared by identity and never held: what a cell deletes is free at once.

    Args:
        namespace: the notebook's global names.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.watched = False
        """Whether somebody asks; nothing is read before."""
        self.now = 0
        """The number of the last assignment."""
        self._last: dict[str, int] = {}
        self._typed: dict[str, int] = {}
        self._before: dict[str, int] | None = None
        self._looked = False

    def last(self, name: str) -> int:
        """The number of the last assignment to a name; 0 where there was none."""
        return self._last.get(name, 0)

    def typed_since(self, name: str, number: int) -> bool:
        """Whether a later cell has assigned the name without reading it: ``n = 3``, not ``n = n[0]``."""
        return self._typed.get(name, 0) > number

    def begin(self) -> None:
        """A cell of the notebook begins."""
        self._before = {name: id(value) for name, value in list(self.namespace.items())}
        self._looked = False

    def look(self) -> None:
        """Something is about to run on ranks in the middle of a cell: what the cell has assigned so far comes before it."""
        self._looked = True
        self._note(self._rebound(), CellNames())

    def end(self, source: Callable[[], str], *, completed: bool) -> None:
        """The cell is over.

        Args:
            source: makes the cell's plain Python.
            completed: whether it came to its end.
        """
        if self.watched and self._before is not None:
            try:
                names = cell_names(source())
            except SyntaxError:
                names = CellNames()
            rebound = self._rebound()
            # of these nobody can say whether they came before what has run on the ranks meanwhile, or after it
            certain = names.certain if completed and not self._looked else frozenset()
            self._note({*rebound, *(certain & self.namespace.keys())}, names)
        self._before = None

    def brought(self, names: Iterable[str]) -> None:
        """These names have just been bound to values of the ranks: the cell itself has not assigned them."""
        if self._before is not None:
            self._before.update({name: id(self.namespace[name]) for name in names if name in self.namespace})

    def _rebound(self) -> list[str]:
        """Names that have other objects than at the last look."""
        before, now = self._before, {name: id(value) for name, value in list(self.namespace.items())}
        if before is None:
            return []
        self._before = now
        return [name for name, identity in now.items() if before.get(name) != identity]

    def _note(self, assigned: Iterable[str], names: CellNames) -> None:
        for name in assigned:
            if not is_output(name) and not interactive(name, self.namespace[name]):
                self.now += 1
                self._last[name] = self.now
                if name in names.certain and name not in names.loads:
                    self._typed[name] = self.now


_watched: dict[int, Assignments] = {}
"""By the identity of the namespace."""


def watch(namespace: dict[str, Any]) -> Assignments:
    """The assignments of a notebook whose cells are reported; twice is safe."""
    return _watched.setdefault(id(namespace), Assignments(namespace))


def of(namespace: dict[str, Any]) -> Assignments:
    """The assignments to these names; none are counted where no cells are reported."""
    found = _watched.get(id(namespace))
    if found is None or found.namespace is not namespace:
        return Assignments(namespace)
    found.watched = True
    return found
