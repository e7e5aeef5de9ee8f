"""Nodes that a cell executes: its statements, and bodies of the notebook's functions it calls.

Only what can be seen in the text is covered.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Container, Iterator, Mapping


def notebook_functions(
    value: object, namespace: Mapping[str, object]
) -> Iterator[types.FunctionType]:
    """Yield the notebook's function that a call runs, and those it wraps by `functools.wraps`."""
    while isinstance(value, types.FunctionType) and value.__globals__ is namespace:
        if (
            not value.__code__.co_flags & inspect.CO_GENERATOR
        ):  # calling a generator function runs nothing
            yield value
        value = vars(value).get("__wrapped__")


def function_body(
    function: types.FunctionType, namespace: Mapping[str, object]
) -> Iterator[tuple[ast.AST, Mapping[str, object]]]:
    """Yield the body of a function of the notebook, with the values of the names in it."""
    code = function.__code__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError, IndexError):
        return  # created by `exec`, or a lambda inside an expression
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    body = ast.Module(definition.body, [])
    # Local names hide the notebook's. Their values are unknown, except for imports.
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    names = {name: value for name, value in namespace.items() if name not in local}
    names.update(_imported_modules(body, local))
    yield body, names


def _imported_modules(body: ast.AST, local: Container[str]) -> Iterator[tuple[str, object]]:
    """Yield the modules that a function's own imports bind to local names."""
    for node in executed(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                if name in local:
                    yield name, sys.modules.get(alias.name if alias.asname else name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = alias.asname or alias.name
                if name in local:
                    parent = sys.modules.get(node.module)
                    yield name, getattr(parent, alias.name, None)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a cell that are not in the body of a function, in source order."""
    # A stack, because a sum of a thousand terms is a tree deeper than Python's recursion limit.
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))
