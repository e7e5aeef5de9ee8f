"""Find the names that a cell needs, directly or through their values, and the source of cells."""

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
from skymagic.data.capture.numbering import numbers_by_file


@dataclass(frozen=True)
class CellNames:
    """Names of a cell that are known before it runs."""

    loads: frozenset[str] = frozenset()
    """Names taken from outside: loaded where the cell may not have defined them."""
    stores: frozenset[str] = frozenset()
    """Names bound anywhere in the cell, including by `global` in its functions."""
    certain: frozenset[str] = frozenset()
    """Names bound on every path to the cell's end."""
    imports: frozenset[str] = frozenset()
    """Dotted names of modules that the cell may import."""
    required: frozenset[str] = frozenset()
    """Imports that the cell requires: those outside of a `try`."""
    attributes: frozenset[str] = frozenset()
    """Every attribute name in the cell; shows the submodules that it reaches through a package."""
    hints: frozenset[str] = frozenset()
    """Names in annotations that are not evaluated: types with these names are sent if possible."""
    probes: frozenset[str] = frozenset()
    """Names that it looks up in the namespace (`globals()["x"]`, `"x" in globals()`): they are sent
    if possible.
    """
    scripts: tuple[Script, ...] = ()
    """Files that the cell runs with `%run`."""
    has_effect: bool = True
    """False for a cell without effect, which calls no function at all."""


@lru_cache(maxsize=64)
def cell_names(source: str, compiler_flags: int = 0) -> CellNames:
    """Return the names that a cell loads, stores, deletes and imports.

    A name counts as loaded if some path through the cell reaches the load without defining it. A
    function's body counts at the first use of the function's name after its definition, otherwise
    at the end of the cell.

    Args:
        source: plain Python, after IPython's transformations.
        compiler_flags: flags of `__future__` imports in earlier cells.

    Raises:
        SyntaxError: the cell does not compile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks will issue them when the cell runs
        try:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | compiler_flags
            code = compile(source, "<cell>", "exec", flags, dont_inherit=True)
            tree = ast.parse(source)
        except (RecursionError, MemoryError) as problem:
            raise SyntaxError("the cell is nested too deep to compile") from problem
        except ValueError as problem:
            raise SyntaxError(str(problem)) from problem
    try:
        # The flag is set by a `__future__` import in the cell itself or in an earlier one.
        flow = Flow(postponed=bool(code.co_flags & __future__.annotations.compiler_flag))
        flow.block(tree.body)
        # Before `finish`, which treats the end of the cell as reached.
        certain = frozenset(flow.defined)
        flow.finish()
        attributes = (
            {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            if "." in source
            else ()
        )
        imports = imported_names(tree) if _MAY_IMPORT.search(source) else frozenset()
        keys = namespace_keys(tree) if _READS_NAMESPACE.search(source) else set()
        # The checks for substrings are cheap, and most cells need none of these passes.
        hints = annotated_names(tree, flow.postponed) if ":" in source or "->" in source else set()
    except RecursionError:
        # Expressions are nested too deep for this visitor: use the names without their order.
        names = code_names(code)
        stores = frozenset(code.co_names)
        return CellNames(
            names.loads, stores, frozenset(), names.imports, names.required, names.attributes
        )
    required = required_names(tree) if imports else frozenset()
    return CellNames(
        loads=frozenset(flow.loads),
        stores=frozenset(flow.stores),
        certain=certain,
        imports=imports,
        required=required,
        attributes=frozenset(attributes),
        hints=frozenset(hints - flow.loads - flow.stores),
        scripts=tuple(flow.scripts),
        probes=frozenset(keys - flow.loads),
        has_effect=not all(isinstance(statement, ast.Pass) for statement in tree.body),
    )


def needed_names(
    loads: Iterable[str],
    namespace: Mapping[str, object],
    uses: Callable[[str, object], Mapping[str, str]],
    further_names: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, str]:
    """Return the names of the namespace that a cell needs, each with the reason.

    Args:
        loads: names that the cell itself loads; those missing in the namespace are left out.
        uses: returns the global names that a name's value needs, with the place of their use.
        further_names: more names with the reason, followed after all names that the cell itself
            loads.

    Returns:
        The reason by name, `"the cell"` or `"used by Net.forward"`, in the order of discovery.
    """
    why: dict[str, str] = {}
    pending: dict[str, str] = {
        **further_names,
        **dict.fromkeys(sorted(loads, reverse=True), "the cell"),
    }
    # The last names were inserted first, so that `popitem` returns the cell's own names in order.
    while pending:
        name, reason = pending.popitem()
        value = namespace.get(name, _NOTHING)
        if value is _NOTHING or name in why or is_interactive_name(name, value):
            continue
        why[name] = reason
        if used_names := uses(name, value):
            for used, user in used_names.items():
                if used not in why:
                    pending.setdefault(used, f"used by {user}")
    return why


_READS_NAMESPACE = re.compile(r"\b(?:globals|vars|locals|user_ns|Out|_oh)\b")
_MAY_IMPORT = re.compile(r"import|files|get_data|(?:read|open)_(?:text|binary)")
_HISTORY_NAME = re.compile(r"In|Out|_i{1,3}|_i\d+|_[iod]h|_exit_code")
_MODULE_ATTRIBUTES = frozenset(
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
OUTPUT_NAMES = ("_", "__", "___")
"""Names that IPython binds to the last outputs."""
_OUTPUT_NAME = re.compile(r"_{1,3}|_\d+")
_SHELL_FUNCTIONS = frozenset(("exit", "quit", "get_ipython", "open", "display"))


def is_interactive_name(name: str, value: object) -> bool:
    """Return True if a name belongs to IPython, or to Python itself in each module.

    For example IPython's inputs, `exit`, `get_ipython`, or an `open` that was not rebound.
    """
    if name[0] in "_IO" and (name in _MODULE_ATTRIBUTES or _HISTORY_NAME.fullmatch(name)):
        return True
    if name in _BUILTINS and value is _BUILTINS[name]:
        return True
    if name not in _SHELL_FUNCTIONS:
        return False
    # IPython's `open` wraps that of `io`, and has its `__module__`
    globals_ = getattr(value, "__globals__", {})
    module = (
        globals_.get("__name__") or getattr(value, "__module__", None) or type(value).__module__
    )
    return str(module).partition(".")[0] in ("IPython", "ipykernel", "_sitebuiltins")


def displayed_outputs(names: Iterable[str], namespace: Mapping[str, object]) -> list[str]:
    """Return those of `_`, `__` and `___` among the names that hold an output of IPython.

    A value assigned by a cell does not count.
    """
    # By identity, so that no value's own `__eq__` is called.
    candidates, outputs = sorted({*OUTPUT_NAMES}.intersection(names)), namespace.get("_oh")
    values = (
        {id(value) for value in list(outputs.values())}
        if candidates and isinstance(outputs, dict)
        else set()
    )
    return [name for name in candidates if id(namespace.get(name)) in values]


def is_output(name: str) -> bool:
    """Return True if IPython binds this name to outputs of plain cells: `_`, `__`, `___`, `_10`."""
    return name[0] == "_" and _OUTPUT_NAME.fullmatch(name) is not None


_NOTHING = object()
_BUILTINS = vars(builtins)


def with_scripts(names: CellNames) -> CellNames:
    """Add the names of the files that a cell runs.

    A file that cannot be read is left for the rank to report.
    """
    for script in names.scripts:
        try:
            inner = cell_names(Path(script.path).expanduser().read_text())
        except (OSError, ValueError, RuntimeError, SyntaxError):
            continue
        # Without `-i` the file runs in a namespace of its own.
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


# -- cells -----------------------------------------------------------------------------------------


def cell_sources(files: Iterable[str]) -> dict[str, str]:
    """Return the text of code that exists only in memory, by file name."""
    sources = {}
    for name in files:
        entry = linecache.cache.get(name)
        # IPython's entries for cells have no modification time, so that they are never outdated.
        if entry is not None and len(entry) == 4 and entry[1] is None:
            sources[name] = "".join(entry[2])
    return sources


def cell_numbers(files: Iterable[str]) -> dict[str, int]:
    """Return the numbers of the cells, by file name."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = numbers_by_file(getattr(shell, "compile", None))
    return {name: numbers[name] for name in files if name in numbers}
