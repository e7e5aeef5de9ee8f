"""The order of a cell: which names it takes from outside, path by path."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from skymagic.data.capture.branching import Branching
from skymagic.data.capture.scopes import (
    Comprehension,
    Function,
    body_uses,
    comprehension_targets,
    import_targets,
    outer_parts,
    type_parameters,
)
from skymagic.data.capture.strings import MODULE_LEVEL, namespace_item, run_file, string_names


class Script(NamedTuple):
    """A file that a cell runs with ``%run``."""

    path: str
    interactive: bool
    """Whether it runs among the cell's variables (``-i``)."""
    defined: frozenset[str]
    """Names that the cell has defined before."""


class Flow(Branching):
    """Follows a cell in the order of execution, with the names that are defined on every path."""

    def __init__(self, *, postponed: bool = False) -> None:
        super().__init__()
        self.probes: set[str] = set()
        """Names of which only the presence is asked for."""
        self.scripts: list[Script] = []
        self.postponed = postponed
        """Annotations are not evaluated."""

    # expressions

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
        self._load_strings(node)

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

    def _load_strings(self, node: ast.AST) -> None:
        for name in string_names(node, MODULE_LEVEL):
            self.load(name)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.probes |= {name for name in string_names(node, MODULE_LEVEL) if name not in self.defined}
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._load_strings(node)
        self.generic_visit(node)
        if (file := run_file(node)) is not None:
            self.scripts.append(Script(*file, frozenset(self.defined.names)))
        if isinstance(node.func, ast.Name) and node.func.id == "exec":
            self.stores |= _stored_by(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = namespace_item(node, MODULE_LEVEL)
        self.generic_visit(node)
        if name is not None:
            self.load(name) if isinstance(node.ctx, ast.Load) else self.store(name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in outer_parts(node):
            self.visit(part)
        self._run(node)

    def _run(self, function: Function) -> set[str]:
        uses = body_uses(function)
        self.stores |= uses.stores
        for name in uses.loads:
            self.load(name)
        return uses.loads

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

    # simple statements

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name) and isinstance(node.value, ast.Lambda):
            for part in outer_parts(node.value):
                self.visit(part)
            uses = body_uses(node.value)
            self.stores |= uses.stores
            self.wait(target.id, uses.loads)
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
            for part in _without_annotations(node) if self.postponed else outer_parts(node):
                self.visit(part)
        uses = body_uses(node)
        self.stores |= uses.stores
        if node.decorator_list:  # the decorator may call it at once
            for name in uses.loads - {node.name}:
                self.load(name)
            self._waiting.pop(node.name, None)
        else:
            self.wait(node.name, uses.loads - {node.name})
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


def _without_annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    yield from node.decorator_list
    yield from node.args.defaults
    yield from (default for default in node.args.kw_defaults if default is not None)


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


def _stored_by(call: ast.Call) -> set[str]:
    text = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    flow = Flow()
    try:
        flow.block(ast.parse(text).body if isinstance(text, str) else ())
    except (SyntaxError, ValueError):
        return set()
    return flow.stores
