"""Definite assignment: the names that are defined on every path to a place in a cell."""

from __future__ import annotations


class Definitions:
    """Names that are defined on every path to a place, with a way back to where a path began."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.reached = True
        """False where no path arrives: after ``raise``, ``break`` or ``continue``."""
        self._changes: list[tuple[str, bool]] = []

    def __contains__(self, name: str) -> bool:
        return not self.reached or name in self.names

    def put(self, name: str, defined: bool) -> None:
        """Note that a name is defined now, or is not."""
        if self.reached and (name in self.names) != defined:
            (self.names.add if defined else self.names.discard)(name)
            self._changes.append((name, defined))

    def mark(self) -> tuple[int, bool]:
        """This place, to come back to."""
        return len(self._changes), self.reached

    def since(self, mark: tuple[int, bool]) -> dict[str, bool]:
        """Names that have changed since a place, and whether they are defined."""
        return {name: name in self.names for name, _ in self._changes[mark[0] :]}

    def back(self, mark: tuple[int, bool]) -> None:
        """Undo what has changed since a place."""
        count, self.reached = mark
        while len(self._changes) > count:
            name, defined = self._changes.pop()
            (self.names.discard if defined else self.names.add)(name)
