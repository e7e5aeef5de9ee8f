"""Registrations in the notebook's cells that do not travel with a class.

For example `OmegaConf.register_new_resolver`. Registrations of a class with a library travel with
the class (`data.values.registrations`). All other calls with a name that starts with `register`
affect only the notebook, and the user is informed.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator, Mapping

from skymagic.data.capture.executed import children

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
        # These set attributes of pandas classes, which `class_attributes` reports.
        "register_dataframe_accessor",
        "register_series_accessor",
        "register_index_accessor",
    )
)
"""Registrations that travel with their classes, or are reported elsewhere."""
_OF_THE_PROCESS = frozenset(("atexit", "signal", "faulthandler", "codecs", "IPython", "skymagic"))
"""Packages whose registrations concern only the notebook's process."""


def registrations(tree: ast.AST, namespace: Mapping[str, object]) -> dict[str, str]:
    """Return a cell's registrations that affect only the notebook.

    Returns:
        Maps each, such as `"OmegaConf.register_new_resolver"`, to the module of its owner.
    """
    modules_by_call = {}
    for call in _calls(tree):
        path = dotted_path(call)
        if len(path) < 2 and not (path and path[0].startswith("register")):
            continue
        if not path[-1].startswith("register") or path[-1] in _KNOWN:
            continue
        module = _module_of(path, namespace)
        if module is not None:
            modules_by_call[".".join(path)] = module
    return modules_by_call


def _calls(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield called expressions and decorators outside of functions, whose bodies may never run."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                yield decorator.func if isinstance(decorator, ast.Call) else decorator
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node.func
        pending.extend(children(node))


def dotted_path(node: ast.expr) -> list[str]:
    """Return `["cls", "method"]` for `cls.method`.

    Return an empty list if the expression does not start with a name.
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _module_of(path: list[str], namespace: Mapping[str, object]) -> str | None:
    """Return the module that owns a registry.

    Return None for an object, whose registrations are part of its value, and for classes that
    travel with theirs.
    """
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
    # Virtual subclasses of an abstract class travel with their class.
    if module.partition(".")[0] in _OF_THE_PROCESS or hasattr(owner, "_abc_impl"):
        return None
    # So do registrations with transformers' Auto classes.
    if module.startswith("transformers.models.auto"):
        return None
    return module if module.partition(".")[0] in sys.modules else None
