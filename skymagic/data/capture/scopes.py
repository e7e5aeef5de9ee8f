"""Free names of function bodies: which of a namespace's names they take, by the rules of scopes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from skymagic.data.capture.strings import namespace_item, string_names

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Scope = Function | ast.ClassDef

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass
class Uses:
    """Global names that a function's body takes and makes when it runs."""

    loads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)


def body_uses(function: Function) -> Uses:
    """What a function's body takes from and writes to the global names; not its defaults and decorators."""
    uses = Uses()
    _body(function, frozenset(), uses)
    return uses


def arguments(function: Function) -> list[ast.arg]:
    """All parameters of a function, in order."""
    spec = function.args
    extra = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *extra]


def outer_parts(scope: Scope) -> Iterator[ast.expr]:
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
    if not isinstance(scope, ast.Lambda):
        yield from (arg.annotation for arg in arguments(scope) if arg.annotation is not None)
        if scope.returns is not None:
            yield scope.returns


def type_parameters(scope: ast.AST) -> set[str]:
    """Names of the PEP 695 parameters of a definition."""
    return {parameter.name for parameter in getattr(scope, "type_params", ())}


def _body(function: Function, bound: frozenset[str], uses: Uses) -> None:
    statements: Iterable[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else function.body
    names = _Bindings()
    names.stores.update(arg.arg for arg in arguments(function))
    for statement in statements:
        names.visit(statement)
    local = names.stores - names.globals - names.nonlocals
    uses.stores |= names.stores & names.globals
    inner = _Body((bound - names.globals) | local | type_parameters(function), uses)
    for statement in statements:
        inner.visit(statement)


class _Bindings(ast.NodeVisitor):
    """Names bound in one scope, without the scopes inside it."""

    def __init__(self) -> None:
        self.stores: set[str] = set()
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.stores.add(node.id)

    def visit_Global(self, node: ast.Global) -> None:
        self.globals.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.nonlocals.update(node.names)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.stores.update(import_targets(node))

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.stores.add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.stores.add(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.stores.add(node.rest)
        self.generic_visit(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.stores.add(node.name)
        for part in outer_parts(node):
            self.visit(part)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in outer_parts(node):
            self.visit(part)

    def _comprehension(self, node: Comprehension) -> None:
        targets = comprehension_targets(node)
        inner = _Bindings()
        inner.generic_visit(node)
        self.stores |= inner.stores - targets  # := binds in the scope around

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


class _Body(ast.NodeVisitor):
    """Collects loads of names that are bound nowhere between a body and the global names."""

    def __init__(self, bound: frozenset[str] | set[str], uses: Uses) -> None:
        self.bound = frozenset(bound)
        self.uses = uses

    def visit_Name(self, node: ast.Name) -> None:
        # what is deleted must be there
        if not isinstance(node.ctx, ast.Store) and node.id not in self.bound:
            self.uses.loads.add(node.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self.bound:
            self.uses.loads.add(node.target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # The annotation of a function's local variable is never evaluated.
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call | ast.BinOp | ast.Compare) -> None:
        self.uses.loads |= string_names(node) - self.bound
        self.generic_visit(node)

    visit_BinOp = visit_Compare = visit_Call

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = namespace_item(node)
        if name is not None and isinstance(node.ctx, ast.Load):
            self.uses.loads.add(name)
        self.generic_visit(node)

    def _function(self, node: Function) -> None:
        outer = _Body(self.bound | type_parameters(node), self.uses)
        for part in outer_parts(node):
            outer.visit(part)
        _body(node, self.bound, self.uses)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = _Body(self.bound | type_parameters(node), self.uses)
        for part in outer_parts(node):
            outer.visit(part)
        names = _Bindings()
        for statement in node.body:
            names.visit(statement)
        self.uses.stores |= names.stores & names.globals
        # A class body's names are seen by its statements, and not by the functions in it.
        for statement in node.body:
            own = set() if isinstance(statement, _SCOPES) else names.stores - names.globals
            _Body(outer.bound | own, self.uses).visit(statement)

    def _comprehension(self, node: Comprehension) -> None:
        _Body(self.bound | comprehension_targets(node), self.uses).generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


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
