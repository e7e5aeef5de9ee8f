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

_LEAVES = (
    ast.Name,
    ast.Constant,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.boolop,
)


def notebook_functions(
    value: object, namespace: Mapping[str, object]
) -> Iterator[types.FunctionType]:
    """Yield the notebook's function that a call runs, and those it wraps by `functools.wraps`."""
    while isinstance(value, types.FunctionType) and value.__globals__ is namespace:
        # Calling a generator function runs nothing.
        if not value.__code__.co_flags & inspect.CO_GENERATOR:
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


def called_bodies(
    node: ast.AST,
    names: Mapping[str, object],
    namespace: Mapping[str, object],
    followed: set[types.CodeType],
) -> Iterator[tuple[ast.AST, Mapping[str, object]]]:
    """Yield the bodies of the notebook's functions that a node calls by name.

    Args:
        names: values of the names where the node stands.
        followed: functions to leave out, because their bodies were yielded before; grows.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for function in notebook_functions(names.get(node.func.id), namespace):
            if function.__code__ not in followed:
                followed.add(function.__code__)
                yield from function_body(function, namespace)


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
    """Yield the nodes of a cell that are not in the body of a function, in source order.

    Leaves, such as names and constants, are left out: see `children`.
    """
    # A stack, because a sum of a thousand terms is a tree deeper than Python's recursion limit.
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(reversed(children(node)))


def inner_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a cell but its leaves, in no particular order."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(children(node))


def children(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes other than leaves, which neither call nor assign anything.

    Leaves are about three quarters of a cell's nodes, and each cell is walked several times.
    """
    nodes = []
    for field in node._fields:
        value = getattr(node, field, None)
        for item in value if type(value) is list else (value,):
            if isinstance(item, ast.AST) and not isinstance(item, _LEAVES):
                nodes.append(item)
    return nodes
