"""Definite assignment analysis: names that a cell takes from outside, on any path."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from skymagic.data.capture.code import (
    CodeNames,
    body_names,
    call_names,
    compiled_names,
    header_names,
    literal_arguments,
)


class Script(NamedTuple):
    """File that a cell runs with `%run`."""

    path: str
    interactive: bool
    """True if it runs in the cell's namespace (`-i`)."""
    defined: frozenset[str]
    """Names that the cell has defined before."""


class Flow(ast.NodeVisitor):
    """Visitor that tracks the names defined on every path to the current point of a cell.

    Nodes with a separate scope (functions, lambdas, comprehensions, type parameters) are left to
    the compiler.

    Args:
        postponed: True if annotations are not evaluated.
    """

    def __init__(self, *, postponed: bool = False) -> None:
        self.postponed = postponed
        self.defined: set[str] = set()
        # False where no path arrives: after `raise`, `break` or `continue`.
        self.reached = True
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self.scripts: list[Script] = []
        self._waiting: dict[str, set[str]] = {}
        """By function or class: names that count as loaded when it is named."""

    # names

    def load(self, name: str) -> None:
        if self.reached and name not in self.defined:
            self.loads.add(name)
        # Removed before they are loaded, so that functions which name each other end the recursion.
        for inner in self._waiting.pop(name, ()):
            self.load(inner)

    def store(self, name: str) -> None:
        self.stores.add(name)
        if self.reached:
            self.defined.add(name)

    def take(self, names: CodeNames) -> None:
        """Load the names that compiled code loads; its stores may not happen on every path."""
        self.stores |= names.stores
        for name in names.loads:
            self.load(name)

    def define(self, name: str, body: Iterable[str], *, used: bool) -> None:
        """Handle a definition.

        The names in its body count as loaded when it is first named, or now if a decorator uses it
        at once.
        """
        inner = set(body) - {name}
        if used:
            for loaded in inner:
                self.load(loaded)
            self._waiting.pop(name, None)
        else:
            self._waiting.setdefault(name, set()).update(inner)
        self.store(name)

    def finish(self) -> None:
        """Count the bodies of functions that the cell never named: the next cell may call them."""
        self.reached = True
        # A copy, because `load` removes further entries.
        for name in list(self._waiting):
            for inner in self._waiting.pop(name, ()):
                self.load(inner)

    # paths

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def branches(self, *paths: Callable[[], None]) -> None:
        """Visit each path from here; afterwards only names that all of them define are defined."""
        before, reached = self.defined, self.reached
        ends: list[set[str]] = []
        for path in paths:
            self.defined, self.reached = set(before), reached
            path()
            if self.reached:
                ends.append(self.defined)
        self.reached = bool(ends)
        # If no path arrives here, the code that follows is unreachable.
        self.defined = set.intersection(*ends) if ends else before

    def maybe(self, path: Callable[[], None]) -> None:
        """Visit a path that may be skipped, or left at any point."""
        before, reached = set(self.defined), self.reached
        path()
        self.defined, self.reached = before & self.defined, reached

    def loop(self, once: Callable[[], None]) -> None:
        """Visit a path that runs any number of times."""
        before = set(self.defined)
        self.maybe(once)
        if self.defined != before:  # names deleted in one iteration are missing in the next
            self.maybe(once)

    # expressions

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.store(node.id)
            return
        self.load(node.id)
        # `del x` requires x to exist, so it counts as a load too.
        if isinstance(node.ctx, ast.Del):
            self.defined.discard(node.id)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        parts: list[ast.expr] = []
        operand: ast.expr = node
        while isinstance(operand, ast.BinOp):  # a sum of a thousand terms is a thousand levels deep
            parts.append(operand.right)
            operand = operand.left
        self.visit(operand)
        for part in reversed(parts):
            self.visit(part)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        for value in node.values[1:]:
            self.maybe(lambda value=value: self.visit(value))  # type: ignore[misc]

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.branches(lambda: self.visit(node.body), lambda: self.visit(node.orelse))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.store(node.target.id)

    def visit_Call(self, node: ast.Call) -> None:
        for name in call_names(node):
            self.load(name)
        self.generic_visit(node)
        if (file := run_file(node)) is not None:
            self.scripts.append(Script(*file, frozenset(self.defined)))

    def _scope(
        self, node: ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        self.take(compiled_names(node))

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _scope

    # simple statements

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if (
            len(node.targets) == 1
            and isinstance(target, ast.Name)
            and isinstance(node.value, ast.Lambda)
        ):
            self.take(header_names(node.value))
            self.define(target.id, body_names(node.value).loads, used=False)
            return
        self.visit(node.value)
        for assigned in node.targets:
            self.visit(assigned)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.load(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not self.postponed:
            self.visit(node.annotation)
        # `x: int` binds nothing, but `a[i]: int` evaluates `a` and `i`.
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_TypeAlias(self, node: Any) -> None:
        self.take(compiled_names(node))
        self.store(node.name.id)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.store(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            # The names bound by `import *` are unknown.
            if alias.name != "*" and node.module != "__future__":
                self.store(alias.asname or alias.name)

    def _jump(self, node: ast.Raise | ast.Break | ast.Continue) -> None:
        self.generic_visit(node)
        self.reached = False

    visit_Raise = visit_Break = visit_Continue = _jump

    # definitions

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.take(header_names(node, postponed=self.postponed))
        body = body_names(node)
        self.stores |= body.sets
        self.define(node.name, body.loads, used=bool(node.decorator_list))

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.take(header_names(node))
        parameters = {parameter.name for parameter in getattr(node, "type_params", ())}
        inner = _ClassBody(self, parameters)
        inner.block(node.body)
        self.define(
            node.name,
            set().union(*inner._waiting.values()) - parameters,
            used=bool(node.decorator_list),
        )

    # compound statements

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.branches(lambda: self.block(node.body), lambda: self.block(node.orelse))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        def once() -> None:
            self.visit(node.target)
            self.block(node.body)

        self.visit(node.iter)
        self.loop(once)
        # A `break` skips the `else`.
        self.maybe(lambda: self.block(node.orelse))

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.loop(lambda: self.block(node.body))
        self.maybe(lambda: self.block(node.orelse))

    def visit_Try(self, node: Any) -> None:
        def undisturbed() -> None:
            self.block(node.body)
            self.block(node.orelse)

        # `finally` may run after an error at any point, when any name may be missing.
        self.maybe(lambda: self.block(node.finalbody))
        # A handler starts from the names before the `try`: its body may fail at once.
        self.branches(
            undisturbed,
            *(lambda handler=handler: self._handler(handler) for handler in node.handlers),
        )
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def _handler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name:
            self.store(node.name)
        self.block(node.body)
        if node.name:
            # Python deletes the name at the end of the handler.
            self.defined.discard(node.name)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        def inside() -> None:
            for item in node.items:
                self.visit(item)
            self.block(node.body)

        # `contextlib.suppress` may end the block early, at any point.
        self.maybe(inside) if any(
            _suppresses(item.context_expr) for item in node.items
        ) else inside()

    visit_AsyncWith = visit_With

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)

        def case(branch: ast.match_case) -> None:
            for name in _captures(branch.pattern):
                self.store(name)
            self.visit(branch.pattern)
            if branch.guard is not None:
                self.visit(branch.guard)
            self.block(branch.body)

        total = any(branch.guard is None and _irrefutable(branch.pattern) for branch in node.cases)
        # Without an irrefutable case, no case may match.
        nothing: list[Callable[[], None]] = [] if total else [lambda: None]
        self.branches(*(lambda each=branch: case(each) for branch in node.cases), *nothing)


class _ClassBody(Flow):
    """Class body: its own names take precedence, then the cell's; methods do not see its names."""

    def __init__(self, outer: Flow, parameters: set[str]) -> None:
        super().__init__(postponed=outer.postponed)
        self._outer = outer
        self.defined = set(parameters)
        self._globals: set[str] = set()

    def load(self, name: str) -> None:
        # Names that the class body did not define are looked up in the cell.
        if not self.reached or name not in self.defined:
            self._outer.load(name)

    def store(self, name: str) -> None:
        if name in self._globals:
            self._outer.store(name)
        else:
            super().store(name)

    def visit_Global(self, node: ast.Global) -> None:
        self._globals.update(node.names)


def _suppresses(context: ast.expr) -> bool:
    called = context.func if isinstance(context, ast.Call) else None
    return (
        called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    ) == "suppress"


def _captures(pattern: ast.pattern) -> Iterator[str]:
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest


def _irrefutable(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and (
        pattern.pattern is None or _irrefutable(pattern.pattern)
    )


def run_file(call: ast.Call) -> tuple[str, bool] | None:
    """Return the file of a `%run` line, and True if it runs in the notebook's namespace (`-i`).

    Return None for any other call.
    """
    texts = literal_arguments(call)
    if (
        not isinstance(call.func, ast.Attribute)
        or call.func.attr != "run_line_magic"
        or texts[:1] != ["run"]
    ):
        return None
    options, arguments = "", texts[1].split() if len(texts) > 1 else []
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        options += option[1:]
        if option in ("-N", "-l") and arguments:
            arguments.pop(0)
    if not arguments or "m" in options or any(sign in arguments[0] for sign in "{$"):
        return None
    name = arguments[0].strip("'\"")
    return (name if name.endswith((".py", ".ipy", ".ipynb")) else name + ".py"), "i" in options
