"""Registrations in the notebook's cells that no class takes along: `OmegaConf.register_new_resolver`, a resolver of a library's registry.

What a library knows of a class travels with the class (`data.values.registrations`). All other calls whose name begins with ``register``
stay in the notebook, and the user is told so.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator, Mapping

_KNOWN = frozenset(
    (
        "register_pytree_node_class",
        "register_pytree_with_keys_class",
        "register_pytree_node",
        "register_pytree_with_keys",
        "register_dataclass",
        "register_static",
        "register_constant",
        "register_keras_serializable",
        # attributes of pandas' classes: `class_attributes` names them
        "register_dataframe_accessor",
        "register_series_accessor",
        "register_index_accessor",
    )
)
"""Registrations that travel with their classes, or are named otherwise."""
_OF_THE_PROCESS = frozenset(("atexit", "signal", "faulthandler", "codecs", "IPython", "skymagic"))
"""Packages whose registrations concern the notebook's process alone, or are none of a cell's business."""


def registrations(tree: ast.AST, namespace: Mapping[str, object]) -> dict[str, str]:
    """Return the registrations in a cell that stay in the notebook: ``"OmegaConf.register_new_resolver"`` → the module of its owner."""
    found = {}
    for call in _calls(tree):
        path = dotted_path(call)
        if len(path) < 2 and not (path and path[0].startswith("register")):
            continue
        if not path[-1].startswith("register") or path[-1] in _KNOWN:
            continue
        module = _module_of(path, namespace)
        if module is not None:
            found[".".join(path)] = module
    return found


def _calls(tree: ast.AST) -> Iterator[ast.expr]:
    """What a cell calls outside of functions, which may never run, and what decorates."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for each in node.decorator_list:
                yield each.func if isinstance(each, ast.Call) else each
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node.func
        todo.extend(ast.iter_child_nodes(node))


def dotted_path(node: ast.expr) -> list[str]:
    """Return ``["cls", "method"]`` for ``cls.method``; nothing for what does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _module_of(path: list[str], namespace: Mapping[str, object]) -> str | None:
    """Return the module that owns a registry; None for an object, whose registrations are part of its value, and for classes
    that take theirs along."""
    owner = namespace.get(path[0])
    for name in path[1:-1]:
        owner = getattr(owner, name, None)
    if isinstance(owner, types.ModuleType):
        module: object = owner.__name__
    elif isinstance(owner, type | types.FunctionType | types.BuiltinFunctionType):
        module = owner.__module__
    else:
        return None
    if not isinstance(module, str) or module in ("__main__", "builtins"):
        return None
    if module.partition(".")[0] in _OF_THE_PROCESS or hasattr(owner, "_abc_impl"):
        return None
    if module.startswith("transformers.models.auto"):
        return None
    return module if module.partition(".")[0] in sys.modules else None
