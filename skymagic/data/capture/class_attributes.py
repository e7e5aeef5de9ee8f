"""Attributes that cells set on classes of packages: `torch.Tensor.hello = …`, pandas accessors.

The ranks import the class, so these attributes are missing there. An instance of the class does not
show that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from skymagic.data.capture.executed import inner_nodes
from skymagic.data.capture.registrations import dotted_path

_ACCESSOR = re.compile("register_(dataframe|series|index)_accessor")
_ACCESSOR_OWNERS = {"dataframe": "DataFrame", "series": "Series", "index": "Index"}


class ClassAttribute(NamedTuple):
    """Attribute that was set on a class of a package."""

    owner: str
    """The class with its module: `"torch.Tensor"`."""
    name: str

    @property
    def package(self) -> str:
        """Top-level package of the class."""
        return self.owner.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def class_attributes(tree: ast.AST, namespace: Mapping[str, object]) -> set[ClassAttribute]:
    """Return the attributes that code sets on classes which it did not define itself."""
    attributes = set()
    for node in inner_nodes(tree):
        for target, name in _set_by(node):
            owner = _value_of(target, namespace)
            if isinstance(owner, type) and owner.__module__ not in ("__main__", "builtins"):
                attributes.add(ClassAttribute(f"{owner.__module__}.{owner.__qualname__}", name))
        if isinstance(node, ast.Call) and (accessor := _accessor(node)):
            attributes.add(accessor)
    return attributes


def _set_by(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the attribute that a node sets, with the expression of its owner."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        # `setattr` with a literal name counts as an assignment.
        if node.func.id != "setattr" or len(node.args) != 3:
            return
        owner, name, _ = node.args
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield owner, name.value


def _value_of(node: ast.expr, namespace: Mapping[str, object]) -> Any:
    """Return the value of a dotted name, using only attribute lookups in modules and classes."""
    path = dotted_path(node)
    value: Any = namespace.get(path[0]) if path else None
    for name in path[1:]:
        value = getattr(value, "__dict__", {}).get(name)
    return value


def _accessor(call: ast.Call) -> ClassAttribute | None:
    """Return the attribute that a pandas accessor decorator sets, or None."""
    func = call.func
    called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    kind = _ACCESSOR.fullmatch(called)
    if kind is None or not call.args or not isinstance(call.args[0], ast.Constant):
        return None
    return ClassAttribute(f"pandas.{_ACCESSOR_OWNERS[kind[1]]}", str(call.args[0].value))
