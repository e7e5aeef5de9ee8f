"""Modules that the notebook has loaded.

Those behind its names are installed on pools of other machines from the start. Those with files
edited after the import need a warning: ranks run the new version, and the notebook the old one.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skymagic.data.capture import modules
from skymagic.data.capture.code import code_names
from skymagic.data.capture.names import is_interactive_name
from skymagic.wire.values import ModuleSource


def imported_modules(namespace: Mapping[str, object], folder: str) -> frozenset[str]:
    """Return dotted names of the modules behind the notebook's names, values and functions.

    A module in the notebook's folder is replaced by the modules that it imports.
    """
    names: set[str] = set()
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not is_interactive_name(name, value):
            names.update(_modules(value, namespace))
    local = modules.search(names, folder)
    # The user's own modules travel as source and need no installation.
    own = {name.partition(".")[0] for name in local.sources}
    return frozenset(name for name in names | local.required if name.partition(".")[0] not in own)


def _modules(value: object, namespace: Mapping[str, object]) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
        return
    kind = value if isinstance(value, type | types.FunctionType) else type(value)
    if kind.__module__ != namespace.get("__name__"):
        yield from [kind.__module__] if isinstance(kind.__module__, str) else []
        return
    for member in (kind, *getattr(kind, "__bases__", ()), *vars(kind).values()):
        if isinstance(member, types.FunctionType):
            yield from code_names(member.__code__).required
        elif isinstance(member, type) and member.__module__ != kind.__module__:
            yield member.__module__


_EARLIER = "an earlier text"


class ImportedTexts:
    """Source texts of the notebook's imported modules, if known."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, str]] = {}
        """By module: its spec, which changes with each reload, and the hash of its text at that
        time.
        """
        self._noted: dict[str, str] = {}

    def stale(self, sources: Iterable[ModuleSource]) -> list[ModuleSource]:
        """Return modules loaded from another text than the file's; each text is reported once."""
        stale_sources = []
        remember_reloads()
        for source in sources:
            spec = getattr(sys.modules.get(source.name), "__spec__", None)
            # Not loaded here, or a namespace package without text.
            if spec is None or not source.source:
                continue
            loaded = self._seen.get(source.name)
            if loaded is None or loaded[0] is not spec:
                loaded = self._seen[source.name] = (
                    spec,
                    _EARLIER if _compiled_earlier(source.origin) else source.hash,
                )
            if loaded[1] != source.hash and (
                _was_reloaded(source) or holds_source(sys.modules[source.name], source.source)
            ):
                # Executed again without an import, patched by %autoreload, or only touched.
                loaded = self._seen[source.name] = (spec, source.hash)
            if loaded[1] != source.hash and self._noted.get(source.name) != source.hash:
                self._noted[source.name] = source.hash
                stale_sources.append(source)
        return stale_sources


_reload_times: dict[str, float] = {}
"""By module: modification time of its file as last recorded by IPython's autoreload."""
_reloaded: dict[str, float] = {}
"""By module: modification time of the text that autoreload executed to replace an earlier one."""


def remember_reloads() -> None:
    """Record which modules autoreload has reloaded; called after each cell.

    Where possible, autoreload patches a module's functions one by one, which leaves no trace in the
    module itself. The first time that it records for a module is the file's current modification
    time, even if the notebook imported the module earlier. So only a later time indicates a reload.
    """
    reloader = _autoreloader()
    times = getattr(reloader, "modules_mtimes", None)
    if not isinstance(times, dict):
        return
    failed = getattr(reloader, "failed", {})
    for name, time in times.items():
        recorded = _reload_times.setdefault(name, time)
        if recorded != time:
            _reload_times[name] = time
            module = sys.modules.get(name)
            # A reload that failed leaves the earlier text in place.
            if failed.get(getattr(module, "__file__", None)) != time:
                _reloaded[name] = time


def _autoreloader() -> Any:
    """Return the reloader of IPython's autoreload extension, or None if it is not loaded."""
    if "IPython.extensions.autoreload" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    registry = getattr(getattr(shell, "magics_manager", None), "registry", {})
    return getattr(registry.get("AutoreloadMagics"), "_reloader", None)


def _was_reloaded(source: ModuleSource) -> bool:
    """Return True if autoreload has executed the current text of a module's file."""
    try:
        return _reloaded.get(source.name) == Path(source.origin).stat().st_mtime
    except OSError:
        return False


def holds_source(module: Any, text: str) -> bool:
    """Return True if a module holds what this text defines: its functions' code and its constants.

    Return False if that cannot be determined.
    """
    try:
        tree = ast.parse(text)
        code = compile(text, str(module.__file__), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    defined = {
        constant.co_name: constant
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    }
    return all(_has_binding(vars(module), node, defined) for node in tree.body)


def _has_binding(
    space: Mapping[str, object], node: ast.stmt, defined: Mapping[str, types.CodeType]
) -> bool:
    """Return True if a namespace holds what a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = inspect.unwrap(space.get(node.name))  # type: ignore[arg-type]
        return _same_code(getattr(function, "__code__", None), defined.get(node.name))
    if isinstance(node, ast.ClassDef):
        nested = {
            constant.co_name: constant
            for constant in defined[node.name].co_consts
            if isinstance(constant, types.CodeType)
        }
        return all(
            _has_binding(vars(space.get(node.name, object)), statement, nested)
            for statement in node.body
        )
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        # Unpacking and attribute assignments are not compared.
        if len(names) != len(targets):
            return False
        with contextlib.suppress(ValueError):
            value = ast.literal_eval(node.value)
            return all(
                name in space and type(space[name]) is type(value) and space[name] == value
                for name in names
            )
    return False


_LANGUAGE_FLAGS = 0x3FF
"""Flags of code objects for properties such as being a generator, without those of `from
__future__` imports.
"""


def _same_code(value: object, other: object) -> bool:
    """Return True if two code objects do the same, regardless of their position in a file."""
    if not isinstance(value, types.CodeType) or not isinstance(other, types.CodeType):
        # With the types, because True equals 1.
        return type(value) is type(other) and value == other
    return (
        all(getattr(value, name) == getattr(other, name) for name in _CODE_ATTRIBUTES)
        and value.co_flags & _LANGUAGE_FLAGS == other.co_flags & _LANGUAGE_FLAGS
        and len(value.co_consts) == len(other.co_consts)
        and all(map(_same_code, value.co_consts, other.co_consts))
    )


_CODE_ATTRIBUTES = (
    "co_name",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
)


def _compiled_earlier(path: str) -> bool:
    """Return True if the cached bytecode that an import leaves was compiled from an earlier text.

    Return False if the cache is missing or cannot be replaced.
    """
    try:
        compiled = importlib.util.cache_from_source(path)
        with Path(compiled).open("rb") as file:
            header = file.read(16)
        status = Path(path).stat()
    except (OSError, NotImplementedError):
        return False
    # Magic number, flags, and for flags 0 the source's modification time and size (PEP 552).
    if (
        header[:4] != importlib.util.MAGIC_NUMBER
        or int.from_bytes(header[4:8], "little")
        or not os.access(compiled, os.W_OK)
    ):
        return False
    recorded = int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
    return recorded != (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
