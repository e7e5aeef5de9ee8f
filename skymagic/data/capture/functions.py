"""Names that a function of the notebook mentions in string literals: its code object does not tell, so its source is read."""

from __future__ import annotations

import ast
import linecache
import types
from functools import lru_cache
from weakref import WeakKeyDictionary

from skymagic.data.capture.bytecode import code_names
from skymagic.data.capture.scopes import Function, body_uses
from skymagic.data.capture.strings import MARKERS, namespace_item, string_names

_known: WeakKeyDictionary[types.CodeType, frozenset[str]] = WeakKeyDictionary()


def mentioned_names(code: types.CodeType) -> frozenset[str]:
    """Global names in string literals of a function, such as ``globals()["x"]``; none where its source is not known."""
    if MARKERS.isdisjoint(code_names(code).attributes):
        return frozenset()
    names = _known.get(code)
    if names is None:
        node = _definition(code)
        names = _known[code] = frozenset() if node is None else _mentioned(node)
    return names


def _mentioned(function: Function) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        found |= string_names(node)
        if isinstance(node, ast.Subscript) and (name := namespace_item(node)) is not None:
            found.add(name)
    return frozenset(found & body_uses(function).loads)


def _definition(code: types.CodeType) -> Function | None:
    """Where the function stands in its cell or file."""
    tree = _parsed("".join(linecache.getlines(code.co_filename)))
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, Function) and _place(node) == (code.co_name, code.co_firstlineno):
            return node
    return None


def _place(node: Function) -> tuple[str, int]:
    """Name and first line as a code object has them: with the decorators."""
    if isinstance(node, ast.Lambda):
        return "<lambda>", node.lineno
    return node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)])


@lru_cache(maxsize=8)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
