"""Names in annotations that are strings: ``typing.get_type_hints`` on a rank looks them up there.

Annotations become strings where they are quoted, and all of them under ``from __future__ import annotations``. Only classes, modules
and what ``typing`` makes travel for their sake: in ``Float[Tensor, "batch"]`` and ``Literal["data"]`` a string is no name.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

_NOT_NAMES = {"Literal"}


def annotated_names(tree: ast.AST, postponed: bool) -> set[str]:
    """Names in the annotations of a piece of code.

    Args:
        postponed: whether all annotations are strings; if not, only names inside of string literals count.
    """
    names: set[str] = set()
    for annotation in _annotations(tree):
        inner = {text for node in _without_literals(annotation) for text in _strings(node)}
        names |= {name for text in inner for name in text_names(text)}
        if postponed:
            names |= {node.id for node in _without_literals(annotation) if isinstance(node, ast.Name)}
    return names


def value_names(value: object, namespace: Mapping[str, object]) -> set[str]:
    """Names in the string annotations of a function or class that stand for types in `namespace`."""
    try:
        annotations = vars(value).get("__annotations__") if isinstance(value, type) else value.__annotations__
    except Exception:  # evaluated on demand, and not possible here (Python 3.14)
        return set()
    texts = {text for each in dict(annotations or ()).values() for text in _forward(each)}
    return {name for text in texts for name in text_names(text) if is_type(namespace.get(name))}


def is_type(value: object) -> bool:
    """Whether a value is used in annotations: a class, a module of classes, or something that ``typing`` made."""
    kinds = (type, types.ModuleType, types.GenericAlias, types.UnionType)
    return isinstance(value, kinds) or type(value).__module__ == "typing"


@lru_cache(maxsize=256)
def text_names(text: str) -> frozenset[str]:
    """Names in one annotation; none if it is not Python."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    nodes = list(_without_literals(tree))
    inner = (text_names(each) for node in nodes for each in _strings(node))
    return frozenset({node.id for node in nodes if isinstance(node, ast.Name)}.union(*inner))


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _without_literals(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but of ``Literal[…]`` the name alone."""
    yield tree
    literal = (
        isinstance(tree, ast.Subscript) and getattr(tree.value, "attr", getattr(tree.value, "id", "")) in _NOT_NAMES
    )
    for child in [tree.value] if isinstance(tree, ast.Subscript) and literal else ast.iter_child_nodes(tree):
        yield from _without_literals(child)


def _strings(node: ast.AST) -> Iterable[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _forward(annotation: object) -> Iterator[str]:
    """The strings in an annotation's value: itself, or inside of ``Optional["Net"]`` and ``list["Net"]``."""
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(text := getattr(annotation, "__forward_arg__", None), str):
        yield text
    elif getattr(annotation, "__origin__", None) is not None or isinstance(annotation, types.UnionType):
        for each in getattr(annotation, "__args__", ()):
            yield from _forward(each)
