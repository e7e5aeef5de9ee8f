"""The user's own modules, of the notebook's folder and of his entries of ``sys.path``: they travel as source, with those that they import."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skymagic.data.capture.imports import imported_names, required_names
from skymagic.data.capture.paths import is_own
from skymagic.data.store.store import digest


@dataclass(frozen=True)
class ModuleSource:
    """A module that travels as its source."""

    name: str
    """As imported: ``package.module``."""
    source: str
    """Empty for a namespace package."""
    package: bool
    origin: str
    """The file that it was read from; ``__file__`` on the ranks too."""
    hash: str
    data: str = ""
    """Its data files, as `resources.packed` makes them; empty where the rank sees the package's folder."""


@dataclass(frozen=True)
class _Parsed:
    source: str
    hash: str
    imports: frozenset[str]
    required: frozenset[str]
    """Those of them that it does not do without when it is imported."""


class Found(NamedTuple):
    """Modules that travel, and those that would if they were Python."""

    sources: dict[str, ModuleSource]
    problems: dict[str, str]
    """Name → file, line, and what is wrong there."""
    imports: frozenset[str]
    """Dotted names that the sources may import."""
    required: frozenset[str]
    """Those of them without which they cannot be imported."""


def collect(names: Iterable[str], folder: str) -> dict[str, ModuleSource]:
    """The local modules among ``names``, their parent packages and the local modules that they import.

    A file that cannot be read or is not valid Python is left out.
    """
    return search(names, folder).sources


def search(names: Iterable[str], folder: str) -> Found:
    """Like `collect`, with the files that are not Python. A file that cannot be read is left to the rank's own import."""
    found: dict[str, ModuleSource] = {}
    problems: dict[str, str] = {}
    imports: set[str] = set()
    required: set[str] = set()
    todo, optional = list(names), list[str]()
    surely = True  # what is found first is needed; then comes what may be
    seen: set[str] = set()
    while todo or optional:
        if not todo:
            todo, optional, surely = optional, [], False
        name = todo.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        todo.append(name.rpartition(".")[0])
        place = locate(name, folder)
        if place is None:
            continue
        path, package = place
        parsed = _read(path, name, package)
        if isinstance(parsed, str):
            problems[name] = parsed
        elif parsed is not None:
            found[name] = ModuleSource(name, parsed.source, package, path, parsed.hash)
            imports |= parsed.imports
            if surely:
                required |= parsed.required
                todo.extend(parsed.required)
            optional.extend(parsed.imports)
    return Found(found, problems, frozenset(imports), frozenset(required))


def is_local(module: str, folder: str) -> bool:
    """Whether an importable name stands for a module of the user's own."""
    return locate(module, folder) is not None


def locate(name: str, folder: str) -> tuple[str, bool] | None:
    """File (or directory, for a namespace package) and whether it is a package; None for a module from elsewhere."""
    top = name.partition(".")[0]
    if top in ("skymagic", "__main__") or top in sys.builtin_module_names:
        return None
    module = sys.modules.get(name)
    if module is not None:
        return _from_module(module, top, folder)
    if top in sys.stdlib_module_names:
        return None
    return _from_path(name, folder)


def _from_module(module: types.ModuleType, top: str, folder: str) -> tuple[str, bool] | None:
    origin = getattr(module, "__file__", None)
    package = hasattr(module, "__path__")
    if origin is None and package:
        origin = next((entry for entry in module.__path__ if is_own(entry, top, folder)), None)
        return (origin, True) if origin is not None else None
    if not isinstance(origin, str) or not origin.endswith(".py") or not is_own(origin, top, folder):
        return None
    return os.path.abspath(origin), package


def _from_path(name: str, folder: str) -> tuple[str, bool] | None:
    """What an import would find, without running the parents' code."""
    parent, _, tail = name.rpartition(".")
    top = name.partition(".")[0]
    entries: Sequence[str] = sys.path
    if parent:
        above = locate(parent, folder)
        if above is None or not above[1]:
            return None
        entries = [above[0] if os.path.isdir(above[0]) else os.path.dirname(above[0])]
    spaces = []
    for entry in entries:
        base = os.path.join(os.path.abspath(entry or os.getcwd()), tail)
        initial = os.path.join(base, "__init__.py")
        if os.path.isfile(initial):
            return (initial, True) if is_own(initial, top, folder) else None
        if any(os.path.isfile(base + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            return None
        if os.path.isfile(base + ".py"):
            return (base + ".py", False) if is_own(base + ".py", top, folder) else None
        if os.path.isdir(base):
            spaces.append(base)
    return next(((space, True) for space in spaces if is_own(space, top, folder)), None)


_cache: dict[str, tuple[tuple[int, int, int], _Parsed | str]] = {}


def _read(path: str, name: str, package: bool) -> _Parsed | str | None:
    """A module's text and imports, read again only when the file has changed; what is wrong with it if it is not Python."""
    if os.path.isdir(path):
        return _Parsed("", "", frozenset(), frozenset())
    try:
        status = os.stat(path)
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        cached = _cache.get(path)
        if cached is None or cached[0] != stamp:
            cached = _cache[path] = stamp, _parse(Path(path).read_bytes(), path, name, package)
        return cached[1]
    except OSError:
        return None


def _parse(data: bytes, path: str, name: str, package: bool) -> _Parsed | str:
    try:
        source = importlib.util.decode_source(data)
        tree = ast.parse(source, path)
        compile(tree, path, "exec", dont_inherit=True)  # `return` outside of a function is an error of this step
    except SyntaxError as wrong:
        return f"{path}, line {wrong.lineno or 1}: {wrong.msg}"
    except (ValueError, RecursionError, MemoryError) as wrong:
        return f"{path}: {wrong}"
    above = name if package else name.rpartition(".")[0]
    names = imported_names(tree, above), required_names(tree, above, functions=False)
    return _Parsed(source, digest([data]), *names)


def as_plain(module: ModuleSource) -> dict[str, Any]:
    """The module as values that JSON can hold."""
    return asdict(module)
