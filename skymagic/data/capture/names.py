"""What a cell needs: the names that it takes from the notebook, the names that those need in turn, and the cells that code comes from."""

from __future__ import annotations
import __future__

import ast
import builtins
import linecache
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from skymagic.data.capture.code import annotated_names, code_names, namespace_keys
from skymagic.data.capture.dataflow import Flow, Script
from skymagic.data.capture.imports import imported_names, required_names


@dataclass(frozen=True)
class CellNames:
    """Names of a cell, as far as they can be known before it runs."""

    loads: frozenset[str] = frozenset()
    """Taken from outside: loaded where the cell may not have defined them."""
    stores: frozenset[str] = frozenset()
    """Bound somewhere in the cell, also by ``global`` in its functions."""
    certain: frozenset[str] = frozenset()
    """Bound on every path to the cell's end."""
    imports: frozenset[str] = frozenset()
    """Dotted names of modules that the cell may import."""
    required: frozenset[str] = frozenset()
    """Imports that it does not do without: not in a ``try``."""
    attributes: frozenset[str] = frozenset()
    """All attribute names in the cell; they tell which submodules it reaches through a package."""
    hints: frozenset[str] = frozenset()
    """Names in annotations that are not evaluated: types of these names travel if they can."""
    probes: frozenset[str] = frozenset()
    """Names that it looks up among the global names (``globals()["x"]``, ``"x" in globals()``): they travel if they can."""
    scripts: tuple[Script, ...] = ()
    """Files that it runs with ``%run``."""
    runs: bool = True
    """Whether it does anything: functions that it does not name may run then."""


@lru_cache(maxsize=64)
def cell_names(source: str, compiler_flags: int = 0) -> CellNames:
    """The names that a cell loads, stores, deletes and imports.

    A name counts as loaded where some path through the cell reaches the load without having defined it. A function's
    body counts when the function is first named after its definition, else at the end of the cell.

    Args:
        source: plain Python, after IPython's transformations.
        compiler_flags: of ``__future__``, as earlier cells have set them.

    Raises:
        SyntaxError: the cell does not compile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks will say it, once the cell runs
        try:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | compiler_flags
            code = compile(source, "<cell>", "exec", flags, dont_inherit=True)
            tree = ast.parse(source)
        except (RecursionError, MemoryError) as problem:
            raise SyntaxError("the cell is nested too deep to compile") from problem
        except ValueError as problem:
            raise SyntaxError(str(problem)) from problem
    try:
        flow = Flow(postponed=bool(code.co_flags & __future__.annotations.compiler_flag))
        flow.block(tree.body)
        certain = frozenset(flow.defined)
        flow.finish()
        attributes = (
            {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            if "." in source
            else ()
        )
        imports = imported_names(tree) if _MAY_IMPORT.search(source) else frozenset()
        keys = namespace_keys(tree) if _NAMESPACE.search(source) else set()
        hints = annotated_names(tree, flow.postponed) if ":" in source or "->" in source else set()
    except RecursionError:
        # Expressions nested deeper than this visitor can go: the order is lost, the names are not.
        names = code_names(code)
        stores = frozenset(code.co_names)
        return CellNames(
            names.loads, stores, frozenset(), names.imports, names.required, names.attributes
        )
    required = required_names(tree) if imports else frozenset()
    return CellNames(
        loads=frozenset(flow.loads), stores=frozenset(flow.stores), certain=certain, imports=imports, required=required,
        attributes=frozenset(attributes), hints=frozenset(hints - flow.loads - flow.stores), scripts=tuple(flow.scripts),
        probes=frozenset(keys - flow.loads), runs=not all(isinstance(each, ast.Pass) for each in tree.body),
    )  # fmt: skip


def reach(
    loads: Iterable[str],
    namespace: Mapping[str, object],
    uses: Callable[[str, object], Mapping[str, str]],
    others: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, str]:
    """The names of the namespace that a cell needs, each with the reason.

    Args:
        loads: what the cell itself loads; names that the namespace lacks are left out.
        uses: what a name's value needs: global names with where they are used.
        others: further names with the reason, followed after all that the cell itself loads.

    Returns:
        Names in the order in which they were found: ``"the cell"`` or ``"used by Net.forward"``.
    """
    why: dict[str, str] = {}
    todo: dict[str, str] = {**others, **dict.fromkeys(sorted(loads, reverse=True), "the cell")}
    while todo:
        name, reason = todo.popitem()
        value = namespace.get(name, _NOTHING)
        if value is _NOTHING or name in why or interactive(name, value):
            continue
        why[name] = reason
        if found := uses(name, value):
            for used, where in found.items():
                if used not in why:
                    todo.setdefault(used, f"used by {where}")
    return why


_NAMESPACE = re.compile(r"\b(?:globals|vars|locals|user_ns|Out|_oh)\b")
_MAY_IMPORT = re.compile(r"import|files|get_data|(?:read|open)_(?:text|binary)")
_HISTORY = re.compile(r"In|Out|_i{1,3}|_i\d+|_[iod]h|_exit_code")
_OF_MODULES = frozenset(
    f"__{name}__"
    for name in [
        "name",
        "doc",
        "package",
        "loader",
        "spec",
        "builtins",
        "builtin",
        "annotations",
        "annotate",
        "conditional_annotations",
        "session",
    ]
)
LAST_SHOWN = ("_", "__", "___")
"""Names that IPython binds to what was shown last."""
_OUTPUT = re.compile(r"_{1,3}|_\d+")
_GIVEN = frozenset(("exit", "quit", "get_ipython", "open", "display"))


def interactive(name: str, value: object) -> bool:
    """Whether a name is IPython's own: its inputs, ``exit`` or ``get_ipython``, an ``open`` nobody rebound; or Python's, for each module."""
    if name[0] in "_IO" and (name in _OF_MODULES or _HISTORY.fullmatch(name)):
        return True
    if name in _BUILTINS and value is _BUILTINS[name]:
        return True
    if name not in _GIVEN:
        return False
    # IPython's own `open` says that it is of `io`: it wraps that one
    globals_ = getattr(value, "__globals__", {})
    module = (
        globals_.get("__name__") or getattr(value, "__module__", None) or type(value).__module__
    )
    return str(module).partition(".")[0] in ("IPython", "ipykernel", "_sitebuiltins")


def last_shown(names: Iterable[str], namespace: Mapping[str, object]) -> list[str]:
    """``_``, ``__`` and ``___`` among the names, those that are what IPython has shown, and not what a cell has assigned."""
    found, shown = sorted({*LAST_SHOWN}.intersection(names)), namespace.get("_oh")
    values = (
        {id(value) for value in list(shown.values())}
        if found and isinstance(shown, dict)
        else set()
    )
    return [name for name in found if id(namespace.get(name)) in values]


def is_output(name: str) -> bool:
    """Whether IPython binds this name to what plain cells show: ``_``, ``__``, ``___``, ``_10``."""
    return name[0] == "_" and _OUTPUT.fullmatch(name) is not None


_NOTHING = object()
_BUILTINS = vars(builtins)


def with_scripts(names: CellNames) -> CellNames:
    """The names of a cell and of the files that it runs; a file that cannot be read is left to the rank's own error."""
    for script in names.scripts:
        try:
            inner = cell_names(Path(script.path).expanduser().read_text())
        except (OSError, ValueError, RuntimeError, SyntaxError):
            continue
        loads = inner.loads - script.defined if script.interactive else frozenset()
        names = replace(
            names,
            loads=names.loads | loads,
            hints=names.hints | (inner.hints if script.interactive else frozenset()),
            imports=names.imports | inner.imports,
            required=names.required | inner.required,
            attributes=names.attributes | inner.attributes,
        )
    return names


# -- cells -----------------------------------------------------------------------------------------------------------


def cell_sources(files: Iterable[str]) -> dict[str, str]:
    """The text of code that exists in memory alone, by file name."""
    found = {}
    for name in files:
        entry = linecache.cache.get(name)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            found[name] = "".join(entry[2])
    return found


def cell_numbers(files: Iterable[str]) -> dict[str, int]:
    """The numbers of the cells, by file name."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    known: Mapping[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {name: known[name] for name in files if name in known}
