"""Modules that the notebook has loaded: those behind its names, which a pool of other machines has from its start, and those whose file
was edited after the import: ranks get the new text, the notebook runs the old."""

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
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import interactive


def imported_modules(namespace: Mapping[str, object], folder: str) -> frozenset[str]:
    """Dotted names of the modules that the notebook has imported, that its values are made of and that its functions need.

    Those of the notebook's folder stand for what they import in turn.
    """
    names: set[str] = set()
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not interactive(name, value):
            names.update(_modules(value, namespace))
    found = modules.search(names, folder)
    own = {name.partition(".")[0] for name in found.sources}
    return frozenset(name for name in names | found.required if name.partition(".")[0] not in own)


def _modules(value: object, namespace: Mapping[str, object]) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
        return
    kind = value if isinstance(value, type | types.FunctionType) else type(value)
    if kind.__module__ != namespace.get("__name__"):
        yield from [kind.__module__] if isinstance(kind.__module__, str) else []
        return
    for each in (kind, *getattr(kind, "__bases__", ()), *vars(kind).values()):
        if isinstance(each, types.FunctionType):
            yield from code_names(each.__code__).required
        elif isinstance(each, type) and each.__module__ != kind.__module__:
            yield each.__module__


_EARLIER = "an earlier text"


class ImportedTexts:
    """Knows the text that each of the notebook's modules was imported with, as far as that can be found out."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, str]] = {}
        """Module → its spec, another one after each reload, and the hash of its text then."""
        self._noted: dict[str, str] = {}

    def stale(self, sources: Iterable[ModuleSource]) -> list[ModuleSource]:
        """The modules of which the notebook has another text than the file; each text is reported once."""
        found = []
        remember_reloads()
        for source in sources:
            spec = getattr(sys.modules.get(source.name), "__spec__", None)
            if spec is None or not source.source:
                continue
            seen = self._seen.get(source.name)
            if seen is None or seen[0] is not spec:
                seen = self._seen[source.name] = (
                    spec,
                    _EARLIER if _compiled_earlier(source.origin) else source.hash,
                )
            if seen[1] != source.hash and (
                _was_reloaded(source) or runs(sys.modules[source.name], source.source)
            ):
                seen = self._seen[source.name] = (
                    spec,
                    source.hash,
                )  # executed again without an import, patched by %autoreload, or only touched
            if seen[1] != source.hash and self._noted.get(source.name) != source.hash:
                self._noted[source.name] = source.hash
                found.append(source)
        return found


_reload_times: dict[str, float] = {}
"""Module → modification time of the file that IPython's autoreload had recorded at the last look."""
_reloaded: dict[str, float] = {}
"""Module → modification time of the text that autoreload has executed in place of another."""


def remember_reloads() -> None:
    """Record what autoreload has reloaded since the last look; called after each cell.

    It patches the module's functions one by one where it can, which leaves no trace in the module itself. The first time that it records
    for a module is that of its file then, which the notebook may have imported earlier: only a later one means a reload.
    """
    reloader = _autoreloader()
    times = getattr(reloader, "modules_mtimes", None)
    if not isinstance(times, dict):
        return
    failed = getattr(reloader, "failed", {})
    for name, time in times.items():
        known = _reload_times.setdefault(name, time)
        if known != time:
            _reload_times[name] = time
            module = sys.modules.get(name)
            if failed.get(getattr(module, "__file__", None)) != time:
                _reloaded[name] = time


def _autoreloader() -> Any:
    """Return the reloader of IPython's extension; None where it was not loaded."""
    if "IPython.extensions.autoreload" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    registry = getattr(getattr(shell, "magics_manager", None), "registry", {})
    return getattr(registry.get("AutoreloadMagics"), "_reloader", None)


def _was_reloaded(source: ModuleSource) -> bool:
    """Return True if autoreload has executed the present text of a module's file."""
    try:
        return _reloaded.get(source.name) == Path(source.origin).stat().st_mtime
    except OSError:
        return False


def runs(module: Any, text: str) -> bool:
    """Whether a module holds what this text defines: its functions' code and its constants; False where that cannot be seen."""
    try:
        tree = ast.parse(text)
        code = compile(text, str(module.__file__), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    defined = {each.co_name: each for each in code.co_consts if isinstance(each, types.CodeType)}
    return all(_holds(vars(module), node, defined) for node in tree.body)


def _holds(space: Mapping[str, Any], node: ast.stmt, defined: Mapping[str, types.CodeType]) -> bool:
    """Whether a namespace holds what a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        own = inspect.unwrap(space.get(node.name))  # type: ignore[arg-type]
        return _same_code(getattr(own, "__code__", None), defined.get(node.name))
    if isinstance(node, ast.ClassDef):
        inner = {
            each.co_name: each
            for each in defined[node.name].co_consts
            if isinstance(each, types.CodeType)
        }
        return all(_holds(vars(space.get(node.name, object)), each, inner) for each in node.body)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
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
"""Flags of code objects that say what it is, such as a generator; those of ``from __future__ import`` lie above."""


def _same_code(one: object, other: object) -> bool:
    """Return True if two code objects do the same, wherever they stand in their files."""
    if not isinstance(one, types.CodeType) or not isinstance(other, types.CodeType):
        return type(one) is type(other) and one == other
    return (
        all(getattr(one, name) == getattr(other, name) for name in _CODE_ATTRIBUTES)
        and one.co_flags & _LANGUAGE_FLAGS == other.co_flags & _LANGUAGE_FLAGS
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_code, one.co_consts, other.co_consts))
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
    """Whether the compiled file that an import leaves is of an earlier text; False where there is none, or it cannot be replaced."""
    try:
        compiled = importlib.util.cache_from_source(path)
        with Path(compiled).open("rb") as file:
            header = file.read(16)
        status = Path(path).stat()
    except (OSError, NotImplementedError):
        return False
    # magic number, flags, and for flags 0 the source's time and size (PEP 552)
    if (
        header[:4] != importlib.util.MAGIC_NUMBER
        or int.from_bytes(header[4:8], "little")
        or not os.access(compiled, os.W_OK)
    ):
        return False
    told = int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
    return told != (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
