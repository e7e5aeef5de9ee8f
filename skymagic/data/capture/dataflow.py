"""The order of a cell: which names it takes from outside, path by path."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from skymagic.data.capture.branching import Branching
from skymagic.data.capture.code import body_names, call_names, literal_arguments

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Script(NamedTuple):
    """A file that a cell runs with ``%run``."""

    path: str
    interactive: bool
    """Whether it runs among the cell's variables (``-i``)."""
    defined: frozenset[str]
    """Names that the cell has defined before."""


class Expressions(Branching):
    """Follows expressions in the order of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[Script] = []

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.load(node.id)
        elif isinstance(node.ctx, ast.Store):
            self.store(node.id)
        else:
            self.load(node.id)
            self.defined.put(node.id, False)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        parts: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):  # a sum of a thousand terms is a thousand levels deep
            parts.append(left.right)
            left = left.left
        self.visit(left)
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
        # := inside a comprehension binds in the cell, and perhaps not at all.
        self.stores.add(node.target.id)
        if not self._hidden:
            self.store(node.target.id)

    def visit_Call(self, node: ast.Call) -> None:
        for name in call_names(node):
            self.load(name)
        self.generic_visit(node)
        if (file := run_file(node)) is not None:
            self.scripts.append(Script(*file, frozenset(self.defined.names)))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in outer_parts(node):
            self.visit(part)
        body = body_names(node)
        self.stores |= body.sets
        for name in body.loads:
            self.load(name)

    def _comprehension(self, node: Comprehension) -> None:
        first = node.generators[0]
        self.visit(first.iter)
        with self.hiding(comprehension_targets(node)):
            before = self.defined.mark()
            for index, part in enumerate(node.generators):
                if index:
                    self.visit(part.iter)
                for condition in part.ifs:
                    self.visit(condition)
            for element in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self.visit(element)
            self.defined.back(before)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


class Flow(Expressions):
    """Follows a cell in the order of execution, with the names that are defined on every path.

    Args:
        postponed: annotations are not evaluated.
    """

    def __init__(self, *, postponed: bool = False) -> None:
        super().__init__()
        self.postponed = postponed

    # simple statements

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name) and isinstance(node.value, ast.Lambda):
            for part in outer_parts(node.value):
                self.visit(part)
            body = body_names(node.value)
            self.stores |= body.sets
            self.wait(target.id, body.loads)
            self.store(target.id)
            return
        self.visit(node.value)
        for each in node.targets:
            self.visit(each)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.load(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not self.postponed:
            self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_TypeAlias(self, node: Any) -> None:
        with self.hiding(type_parameters(node)):
            self.visit(node.value)
        self.store(node.name.id)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return
        for name in import_targets(node):
            self.store(name)

    visit_ImportFrom = visit_Import

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self.defined.reached = False

    def _jump(self, node: ast.Break | ast.Continue | ast.Return) -> None:
        self.generic_visit(node)
        self.defined.reached = False

    visit_Break = visit_Continue = visit_Return = _jump

    # definitions

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        with self.hiding(type_parameters(node)):
            for part in outer_parts(node, annotations=not self.postponed):
                self.visit(part)
        body = body_names(node)
        self.stores |= body.sets
        if node.decorator_list:  # the decorator may call it at once
            for name in body.loads - {node.name}:
                self.load(name)
            self._waiting.pop(node.name, None)
        else:
            self.wait(node.name, body.loads - {node.name})
        self.store(node.name)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        with self.hiding(type_parameters(node)):
            for part in outer_parts(node):
                self.visit(part)
            inner = _ClassBody(self)
            inner.block(node.body)
        waiting = set().union(*inner._waiting.values()) - {node.name}
        if node.decorator_list:
            for name in waiting:
                self.load(name)
        else:
            self.wait(node.name, waiting)
        self.store(node.name)

    # compound statements

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.branches(lambda: self.block(node.body), lambda: self.block(node.orelse))

    def _loop(self, head: Callable[[], None], node: ast.For | ast.AsyncFor | ast.While) -> None:
        def once() -> None:
            head()
            self.block(node.body)

        self.maybe(once)
        self.maybe(lambda: self.block(node.orelse))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop(lambda: self.visit(node.target), node)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._loop(lambda: None, node)

    def visit_Try(self, node: Any) -> None:
        def undisturbed() -> None:
            self.block(node.body)
            self.block(node.orelse)

        self.maybe(lambda: self.block(node.finalbody))  # on its way out, when anything may be missing
        self.branches(undisturbed, *(lambda each=each: self._handler(each) for each in node.handlers))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def _handler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name:
            self.store(node.name)
        self.block(node.body)
        if node.name:
            self.defined.put(node.name, False)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        def inside() -> None:
            for item in node.items:
                self.visit(item)
            self.block(node.body)

        self.maybe(inside) if any(_suppresses(item.context_expr) for item in node.items) else inside()

    visit_AsyncWith = visit_With

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)

        def case(each: ast.match_case) -> None:
            for name in _captures(each.pattern):
                self.store(name)
            self.visit(each.pattern)
            if each.guard is not None:
                self.visit(each.guard)
            self.block(each.body)

        total = any(each.guard is None and _irrefutable(each.pattern) for each in node.cases)
        nothing: list[Callable[[], None]] = [] if total else [lambda: None]
        self.branches(*(lambda each=each: case(each) for each in node.cases), *nothing)


class _ClassBody(Flow):
    """A class body: its own names come first, then the cell's; methods do not see its names."""

    def __init__(self, outer: Flow) -> None:
        super().__init__(postponed=outer.postponed)
        self._outer = outer
        self._globals: set[str] = set()

    def load(self, name: str) -> None:
        if any(name in names for names in self._hidden):
            return
        if not self.defined.reached or name not in self.defined:
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
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "suppress"


def _captures(pattern: ast.pattern) -> Iterator[str]:
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest


def _irrefutable(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and (pattern.pattern is None or _irrefutable(pattern.pattern))


def outer_parts(
    scope: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef, *, annotations: bool = True
) -> Iterator[ast.expr]:
    """Expressions of a definition that are evaluated where it stands, in order."""
    if not isinstance(scope, ast.Lambda):
        yield from scope.decorator_list
        for parameter in getattr(scope, "type_params", ()):
            parts = (getattr(parameter, name, None) for name in ("bound", "default_value"))
            yield from (part for part in parts if part is not None)
    if isinstance(scope, ast.ClassDef):
        yield from scope.bases
        yield from (keyword.value for keyword in scope.keywords)
        return
    yield from scope.args.defaults
    yield from (default for default in scope.args.kw_defaults if default is not None)
    if annotations and not isinstance(scope, ast.Lambda):
        given = (each.annotation for each in ast.walk(scope.args) if isinstance(each, ast.arg))
        yield from (annotation for annotation in (*given, scope.returns) if annotation is not None)


def type_parameters(scope: ast.AST) -> set[str]:
    """Names of the PEP 695 parameters of a definition."""
    return {parameter.name for parameter in getattr(scope, "type_params", ())}


def comprehension_targets(node: Comprehension) -> set[str]:
    """Names that are local to a comprehension."""
    return {
        name.id
        for part in node.generators
        for name in ast.walk(part.target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def import_targets(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Names that an import statement binds; a star binds none that could be known."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {alias.asname or alias.name for alias in node.names if alias.name != "*"}


def run_file(call: ast.Call) -> tuple[str, bool] | None:
    """File of a ``%run`` line, and whether it runs among the notebook's variables (``-i``); None for any other call."""
    texts = literal_arguments(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "run_line_magic" or texts[:1] != ["run"]:
        return None
    options, words = "", texts[1].split() if len(texts) > 1 else []
    while words and words[0].startswith("-"):
        option = words.pop(0)
        options += option[1:]
        if option in ("-N", "-l") and words:
            words.pop(0)
    if not words or "m" in options or any(sign in words[0] for sign in "{$"):
        return None
    name = words[0].strip("'\"")
    return (name if name.endswith((".py", ".ipy", ".ipynb")) else name + ".py"), "i" in options
