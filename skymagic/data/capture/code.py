"""Names in code: globals, modules and attributes in compiled code, in strings, and in annotations.

Three kinds of strings mention variables: text that IPython expands (`!echo {x} $y`, the line of a
magic, the body of `%%time`), pandas queries (`"a > @x"`), and annotations. Annotations are strings
if they are quoted, and all of them under `from __future__ import annotations`:
`typing.get_type_hints` on a rank looks up their names. Only classes, modules and objects created by
`typing` travel for annotations: the strings in `Float[Tensor, "batch"]` and `Literal["data"]` are
no names.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import re
import string
import sys
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

_GLOBAL_STORES = {"STORE_NAME", "STORE_GLOBAL"}
# `del` of a global name requires that it exists, so it counts as a load.
_GLOBAL_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL"}
_OWN = {"__name__", "__module__", "__qualname__"}


@dataclass(frozen=True)
class CodeNames:
    """Names in a code object and in the code nested in it."""

    loads: frozenset[str]
    """Global names."""
    imports: frozenset[str]
    """Dotted names of modules; `from a import b` counts as `a` and `a.b`."""
    attributes: frozenset[str]
    """Names that may be attributes."""
    stores: frozenset[str] = frozenset()
    """Names bound at its own level, and global names bound by nested code."""
    required: frozenset[str] = frozenset()
    """Imports outside of a `try`."""
    sets: frozenset[str] = frozenset()
    """Names that are stored as `global`."""


_names_by_code: WeakKeyDictionary[types.CodeType, CodeNames] = WeakKeyDictionary()


def code_names(code: types.CodeType) -> CodeNames:
    """Return the names in a code object and in the code nested in it."""
    names = _names_by_code.get(code)
    if names is None:
        loads, stores, imports, module = set(), set(), set(), ""
        required: set[str] = set()
        sets: set[str] = set()
        # Imports in these ranges are optional.
        guarded_ranges = _try_ranges(code)
        for step in dis.get_instructions(code):
            if step.opname in _GLOBAL_LOADS:
                loads.add(str(step.argval))
            elif step.opname in _GLOBAL_STORES:
                stores.add(str(step.argval))
                sets.update([str(step.argval)] if step.opname == "STORE_GLOBAL" else ())
            elif step.opname == "IMPORT_NAME":
                module = str(step.argval)
                imports.add(module)
                is_required = not any(start <= step.offset < end for start, end in guarded_ranges)
                required.update([module] if is_required else ())
            elif step.opname == "IMPORT_FROM":
                # The IMPORT_NAME of the same statement came just before.
                imports.add(f"{module}.{step.argval}")
                required.update([f"{module}.{step.argval}"] if is_required else ())
        inner = [
            code_names(constant)
            for constant in code.co_consts
            if isinstance(constant, types.CodeType)
        ]
        # String constants may be arguments of calls that expand names.
        texts = [constant for constant in code.co_consts if isinstance(constant, str)]
        names = _names_by_code[code] = CodeNames(
            frozenset(loads).union(
                mentioned_names(code.co_names, texts), *(nested.loads for nested in inner)
            )
            - _OWN,
            frozenset(imports).union(*(nested.imports for nested in inner)),
            frozenset(code.co_names).union(*(nested.attributes for nested in inner)),
            frozenset(stores).union(*(nested.sets for nested in inner)),
            frozenset(required).union(*(nested.required for nested in inner)),
            frozenset(sets).union(*(nested.sets for nested in inner)),
        )
    return names


def _try_ranges(code: types.CodeType) -> list[tuple[int, int]]:
    """Return offsets (start, end) of code in a `try` with an `except`, and of the `except` itself.

    Code in a `with`, or in a `try` with only a `finally`, does not count.
    """
    if not code.co_exceptiontable:
        return []
    steps = list(dis.get_instructions(code))
    index = {step.offset: number for number, step in enumerate(steps)}
    return [
        (entry.start, entry.end)
        for entry in getattr(dis.Bytecode(code), "exception_entries", ())
        if _handles([step.opname for step in steps[index[entry.target] : index[entry.target] + 8]])
    ]


def _handles(handler: list[str]) -> bool:
    """Return True if instructions start an `except`, or its cleanup."""
    if handler[0] == "COPY":
        return True
    check = handler.index("CHECK_EXC_MATCH") if "CHECK_EXC_MATCH" in handler else len(handler)
    allowed = {
        "PUSH_EXC_INFO",
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "LOAD_ATTR",
        "BUILD_TUPLE",
        "LOAD_FAST",
        "NOP",
        "CACHE",
    }
    # A bare `except:` drops the exception without comparing its type.
    return handler[:2] == ["PUSH_EXC_INFO", "POP_TOP"] or (
        check < len(handler) and allowed.issuperset(handler[:check])
    )


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def compiled_names(node: ast.stmt | ast.expr, *, postponed: bool = False) -> CodeNames:
    """Return the names in a statement or an expression, by the compiler's own scope rules.

    Args:
        postponed: True if annotations are not evaluated.
    """
    return code_names(_compiled(node, postponed))


def header_names(definition: Definition, *, postponed: bool = False) -> CodeNames:
    """Return the names used by decorators, bases, defaults and annotations of a definition."""
    # Compile the definition with an empty body, so that only its header is left.
    bare: Any = copy.copy(definition)
    bare.body = ast.Constant(None) if isinstance(bare, ast.Lambda) else [ast.Pass()]
    return compiled_names(ast.fix_missing_locations(bare), postponed=postponed)


def body_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> CodeNames:
    """Return the global names that a function's body loads and binds.

    Names in its header are left out; see `header_names`.
    """
    name = "<lambda>" if isinstance(function, ast.Lambda) else function.name
    # PEP 695: a generic function is created in a scope of its type parameters.
    own = (name, f"<generic parameters of {name}>")
    inner = _compiled(function, postponed=False).co_consts
    names = [
        code_names(code)
        for code in inner
        if isinstance(code, types.CodeType) and code.co_name in own
    ]
    return CodeNames(
        loads=frozenset().union(*(nested.loads for nested in names)),
        imports=frozenset(),
        attributes=frozenset(),
        sets=frozenset().union(*(nested.sets for nested in names)),
    )


def _compiled(node: ast.stmt | ast.expr, postponed: bool) -> types.CodeType:
    tree = ast.Expression(node) if isinstance(node, ast.expr) else ast.Module([node], [])
    mode = "eval" if isinstance(node, ast.expr) else "exec"
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | (
        __future__.annotations.compiler_flag if postponed else 0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks will issue them
        code: types.CodeType = compile(tree, "<cell>", mode, flags, dont_inherit=True)
    return code


# -- names in strings ------------------------------------------------------------------------------

_EXPANDING = frozenset({"system", "getoutput", "run_line_magic", "run_cell_magic"})
"""Methods that IPython turns `!`, `%` and `%%` into."""
_CODE_MAGICS = frozenset(
    {"time", "timeit", "prun", "memit", "mprun", "lprun", "capture", "pyinstrument"}
)
_QUERIES = frozenset({"query", "eval"})
"""Methods of data frames that take a query."""
# As in IPython: a dollar inside single quotes belongs to the shell, and $$ is a dollar sign.
_DOLLAR = re.compile(r"(.*?)\$(\$?[\w.]+)(?=(?:[^']*'[^']*')*[^']*$)", re.DOTALL)
_OPTION = re.compile(r"^\s*(?:-[nrsltTDm]\s*\S+|-\w+)\s*")


def mentioned_names(methods: Collection[str], texts: Sequence[str]) -> set[str]:
    """Return names mentioned in the literal arguments of calls of these methods."""
    names: set[str] = set()
    if not _QUERIES.isdisjoint(methods):
        names.update(name for text in texts for name in re.findall(r"@(\w+)", text))
    if not _EXPANDING.isdisjoint(methods):
        names.update(name for text in texts for name in _expanded_names(text))
        if not _CODE_MAGICS.isdisjoint(texts):
            names.update(
                name for text in texts for name in _magic_names(text) if text not in _CODE_MAGICS
            )
    return names


def call_names(call: ast.Call) -> set[str]:
    """Return names mentioned in the literal arguments of a call.

    Empty unless it is a call of IPython or of a data frame.
    """
    method, texts = (
        call.func.attr if isinstance(call.func, ast.Attribute) else "",
        literal_arguments(call),
    )
    if method == "run_cell_magic" and _CODE_MAGICS.isdisjoint(texts[:1]):
        texts = texts[:2]  # the body of another magic is not expanded
    return mentioned_names({method}, texts)


def literal_arguments(call: ast.Call) -> list[str]:
    """Return the arguments of a call that are literal strings."""
    return [
        arg.value
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]


def _expanded_names(text: str) -> set[str]:
    """Return names that IPython expands in a shell or magic line: `{expr}` and `$var`."""
    names: set[str] = set()
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name]
    except ValueError:  # the braces belong to the shell
        fields = []
    for expression in fields:
        names |= _source_names(expression.strip(), "eval")
    names.update(
        match[2].partition(".")[0]
        for match in _DOLLAR.finditer(text)
        if not match[2].startswith("$")
    )
    return {name for name in names if name.isidentifier()}


def _magic_names(text: str) -> set[str]:
    """Return names in the code that a magic such as `%timeit` runs."""
    while (option := _OPTION.match(text)) is not None:
        text = text[option.end() :]
    return _source_names(text, "exec")


def _source_names(source: str, mode: str) -> set[str]:
    """Return names that code loads without binding them; empty if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will issue them
            code = compile(
                source, "<string>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = code_names(code)
    return set(names.loads - names.stores)


def namespace_keys(tree: ast.AST) -> set[str]:
    """Return names that a cell looks up by a literal key.

    For example `globals()["x"]`, `vars().get("x")`, `"x" in globals()`; `Out[10]` counts as `_10`.
    """
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        # `globals()["x"]`
        if isinstance(node, ast.Subscript) and _is_namespace(node.value):
            keys.append(node.slice)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("Out", "_oh")
        ):
            keys.append(
                ast.Constant(
                    f"_{ast.unparse(node.slice)}" if isinstance(node.slice, ast.Constant) else None
                )
            )
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _is_namespace(node.func.value)
        ):
            keys += node.args[:1]
            if node.func.attr == "update":
                keys += [ast.Constant(keyword.arg) for keyword in node.keywords if keyword.arg]
                keys += [
                    key
                    for argument in node.args
                    if isinstance(argument, ast.Dict)
                    for key in argument.keys
                    if key
                ]
        # `"x" in globals()`
        elif isinstance(node, ast.Compare) and any(map(_is_namespace, node.comparators)):
            keys.append(node.left)
    return {
        key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _is_namespace(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "user_ns"
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
        return False
    return node.func.id in ("globals", "vars", "locals")


# -- names in annotations --------------------------------------------------------------------------

_NOT_NAMES = {"Literal"}


def annotated_names(tree: ast.AST, postponed: bool) -> set[str]:
    """Return names in the annotations of code.

    Args:
        postponed: True if all annotations are strings; otherwise only names in string literals
            count.
    """
    names: set[str] = set()
    for annotation in _annotations(tree):
        inner = {text for node in _without_literals(annotation) for text in _strings(node)}
        names |= {name for text in inner for name in text_names(text)}
        if postponed:
            names |= {
                node.id for node in _without_literals(annotation) if isinstance(node, ast.Name)
            }
    return names


def value_names(value: object, namespace: Mapping[str, object]) -> set[str]:
    """Return names of types in `namespace` that string annotations of a value refer to."""
    try:
        annotations = dict(own_annotations(value))
    except Exception:  # raised by the value's own code
        return set()
    texts = {text for annotation in annotations.values() for text in _forward(annotation)}
    return {name for text in texts for name in text_names(text) if is_type(namespace.get(name))}


def own_annotations(value: Any) -> Any:
    """Return the annotations of a function, or of a class without those of its bases."""
    if sys.version_info >= (3, 14):  # evaluated lazily: names may not exist yet
        from annotationlib import Format, get_annotations

        try:
            return get_annotations(value)
        except Exception:
            return get_annotations(value, format=Format.STRING)
    return (
        vars(value).get("__annotations__", {}) if isinstance(value, type) else value.__annotations__
    )


def is_type(value: object) -> bool:
    """Return True if a value may occur in annotations.

    This holds for classes, modules with classes, and objects created by `typing`.
    """
    kinds = (type, types.ModuleType, types.GenericAlias, types.UnionType)
    return isinstance(value, kinds) or type(value).__module__ == "typing"


@lru_cache(maxsize=256)
def text_names(text: str) -> frozenset[str]:
    """Return names in one annotation, or an empty set if it is not Python."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    nodes = list(_without_literals(tree))
    inner = (text_names(nested) for node in nodes for nested in _strings(node))
    return frozenset({node.id for node in nodes if isinstance(node, ast.Name)}.union(*inner))


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _without_literals(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes, but only the name of a `Literal[…]`."""
    yield tree
    literal = (
        isinstance(tree, ast.Subscript)
        and getattr(tree.value, "attr", getattr(tree.value, "id", "")) in _NOT_NAMES
    )
    for child in (
        [tree.value] if isinstance(tree, ast.Subscript) and literal else ast.iter_child_nodes(tree)
    ):
        yield from _without_literals(child)


def _strings(node: ast.AST) -> Iterable[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _forward(annotation: object) -> Iterator[str]:
    """Yield the strings in an annotation's value.

    That is the value itself, or strings inside `Optional["Net"]` and `list["Net"]`.
    """
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(text := getattr(annotation, "__forward_arg__", None), str):
        yield text
    elif getattr(annotation, "__origin__", None) is not None or isinstance(
        annotation, types.UnionType
    ):
        for argument in getattr(annotation, "__args__", ()):
            yield from _forward(argument)
