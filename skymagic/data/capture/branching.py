"""The paths through a cell: names that are read, and those that are defined on every path to a place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Branching(ast.NodeVisitor):
    """Counts names as they are met, path by path."""

    def __init__(self) -> None:
        self.defined = Definitions()
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self._waiting: dict[str, set[str]] = {}
        self._hidden: list[set[str]] = []

    # names

    def load(self, name: str) -> None:
        if any(name in names for names in self._hidden):
            return
        if name not in self.defined:
            self.loads.add(name)
        for inner in self._waiting.pop(name, ()):
            self.load(inner)

    def store(self, name: str) -> None:
        if self._hidden and name in self._hidden[-1]:
            return
        self.stores.add(name)
        self.defined.put(name, True)

    def finish(self) -> None:
        """Count the bodies of functions that the cell has not named: the next cell may call them."""
        self.defined.reached = True
        for name in list(self._waiting):
            for inner in self._waiting.pop(name, ()):
                self.load(inner)

    def wait(self, name: str, names: Iterable[str]) -> None:
        """Let names count as loaded when ``name`` is."""
        self._waiting.setdefault(name, set()).update(names)

    # paths

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def branches(self, *paths: Callable[[], None]) -> None:
        """Run each path from here; afterwards only what all of them define is defined."""
        before = self.defined.mark()
        after: list[dict[str, bool]] = []
        for path in paths:
            path()
            if self.defined.reached:
                after.append(self.defined.since(before))
            self.defined.back(before)
        self.defined.reached = bool(after)
        for name in set().union(*after):
            self.defined.put(name, all(each.get(name, name in self.defined.names) for each in after))

    def maybe(self, path: Callable[[], None]) -> None:
        """Run a path that may be left out, or left at any point."""
        before = self.defined.mark()
        path()
        self.defined.back(before)

    @contextmanager
    def hiding(self, names: set[str]) -> Iterator[None]:
        self._hidden.append(names)
        try:
            yield
        finally:
            self._hidden.pop()


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
