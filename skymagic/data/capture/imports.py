"""Module names in source code: all that it may import, and those that it requires."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

_IMPORTERS = frozenset({"import_module", "__import__"})
"""Functions that import the module named by their first argument."""
_RESOURCE_READERS = frozenset({"get_data", "read_text", "read_binary", "open_text", "open_binary"})
"""Functions that read a file of the package named by their first argument, such as
`pkgutil.get_data`; the second argument names the file.
"""
_RESOURCE_MODULES = frozenset({"resources", "importlib_resources"})
"""Last parts of the names of modules whose `files("a")` opens the package `a`."""
_GUARDS = frozenset({"TYPE_CHECKING", "find_spec", "version_info", "platform", "suppress"})
"""Names in the condition of an `if` or `with` that show that an import is optional."""


class ModulesNeeded(Exception):
    """Raised if a run needs modules that may be missing on the nodes.

    Attributes:
        names: dotted names.
        own: names of the notebook's own modules, which are sent to the ranks as source.
    """

    def __init__(self, names: frozenset[str], own: frozenset[str]) -> None:
        super().__init__(names, own)
        self.names, self.own = names, own


def imported_names(tree: ast.AST, package: str = "") -> frozenset[str]:
    """Return dotted names that code may import; `from a import b` counts as `a` and `a.b`.

    Args:
        package: package that relative imports start from.
    """
    return _names(ast.walk(tree), package, None)


def required_names(tree: ast.AST, package: str = "", *, functions: bool = True) -> frozenset[str]:
    """Return dotted names of the imports that code requires.

    Imports in a `try`, or behind a check, are not required.

    Args:
        functions: True to include imports that functions make when they are called.
    """
    return _names(_unguarded(tree, functions), package, _RESOURCE_MODULES | _aliases(tree))


def _aliases(tree: ast.AST) -> frozenset[str]:
    """Return the names under which code imports `importlib.resources`, as in `import … as`."""
    return frozenset(
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.name.rpartition(".")[2] in _RESOURCE_MODULES
    )


def _names(
    nodes: Iterable[ast.AST], package: str, resource_modules: Collection[str] | None
) -> frozenset[str]:
    """Return the module names in these nodes.

    Args:
        resource_modules: names of the objects whose method `files` opens a package; None for all.
    """
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                # One leading dot stands for the package itself, each further dot for a parent.
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base:
                names.add(base)
                # The imported name may be a submodule.
                names.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node, resource_modules)):
            names.add(name)
    return frozenset(names)


def _unguarded(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """Yield this node, and the descendants that run no matter which packages are installed."""
    yield node
    for child in _unguarded_children(node):
        if functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _unguarded(child, functions)


def _unguarded_children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Try | ast.TryStar) and node.handlers:
        # The `try` body may fail without harm; `finally` always runs.
        yield from node.finalbody
        return
    conditions = [node.test] if isinstance(node, ast.If) else []
    conditions += [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    if not any(map(_guards_import, conditions)):
        yield from ast.iter_child_nodes(node)


def _guards_import(test: ast.AST) -> bool:
    names = (getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(test))
    return not _GUARDS.isdisjoint(name for name in names if isinstance(name, str))


def _imported_by_call(call: ast.Call, resource_modules: Collection[str] | None) -> str:
    """Return the module that a call imports by a literal name, or "".

    For example `import_module("a.b")` or `importlib.resources.files("a")`.
    """
    function = call.func
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return ""
    if isinstance(function, ast.Attribute):
        name = function.attr
        owner = getattr(function.value, "attr", None) or getattr(function.value, "id", "")
    else:
        name, owner = getattr(function, "id", ""), None
    if not (
        name in _IMPORTERS
        # with one argument it reads something else: Path("a").read_text("utf8")
        or (name in _RESOURCE_READERS and len(call.args) > 1)
        or (
            name == "files"
            and (owner is None or resource_modules is None or owner in resource_modules)
        )
    ):
        return ""
    return first.value if all(part.isidentifier() for part in first.value.split(".")) else ""
