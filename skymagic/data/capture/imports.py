"""Names of modules in a piece of source: all that it may import, and those that it cannot do without."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_LOADERS = {
    "import_module",
    "__import__",
    "files",
    "get_data",
    "read_text",
    "read_binary",
    "open_text",
    "open_binary",
}
_GUARDS = frozenset({"TYPE_CHECKING", "find_spec", "version_info", "platform", "suppress"})
"""What an ``if``, or a ``with``, names that asks whether to import at all."""


class ModulesNeeded(Exception):
    """A run needs modules of which it is not known that the nodes have them.

    Attributes:
        names: dotted. own: names of the notebook's own modules, which travel.
    """

    def __init__(self, names: frozenset[str], own: frozenset[str]) -> None:
        super().__init__(names, own)
        self.names, self.own = names, own


def imported_names(tree: ast.AST, package: str = "") -> frozenset[str]:
    """Dotted names that a piece of code may import; ``from a import b`` counts as ``a`` and ``a.b``.

    Args:
        package: the package that relative imports start from.
    """
    return _names(ast.walk(tree), package)


def required_names(tree: ast.AST, package: str = "", *, functions: bool = True) -> frozenset[str]:
    """Dotted names of imports that the code does not do without: not in a ``try``, and not where it asks first.

    Args:
        functions: whether what its functions import when they are called counts too.
    """
    return _names(_unguarded(tree, functions), package)


def _names(nodes: Iterable[ast.AST], package: str) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base:
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            names.add(name)
    return frozenset(names)


def _unguarded(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """The nodes below that are reached whatever is installed."""
    yield node
    for child in _unguarded_children(node):
        if functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _unguarded(child, functions)


def _unguarded_children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Try | ast.TryStar) and node.handlers:
        yield from node.finalbody
        return
    asked = [node.test] if isinstance(node, ast.If) else []
    asked += [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    if not any(map(_asks, asked)):
        yield from ast.iter_child_nodes(node)


def _asks(test: ast.AST) -> bool:
    words = (getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(test))
    return not _GUARDS.isdisjoint(word for word in words if isinstance(word, str))


def _imported_by_call(call: ast.Call) -> str:
    """The module that a call imports by a literal name: ``import_module("a.b")``, ``importlib.resources.files("a")``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    if (
        name not in _LOADERS
        or not isinstance(first, ast.Constant)
        or not isinstance(first.value, str)
    ):
        return ""
    return first.value if all(part.isidentifier() for part in first.value.split(".")) else ""
