"""Modules of the notebook's folder: they travel as source, with those that they import."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class _Parsed:
    source: str
    hash: str
    imports: frozenset[str]


def imported_names(tree: ast.AST, package: str = "") -> frozenset[str]:
    """Dotted names that a piece of code may import; ``from a import b`` counts as ``a`` and ``a.b``.

    Args:
        package: the package that relative imports start from.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base:
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    return frozenset(names)


def collect(names: Iterable[str], folder: str) -> dict[str, ModuleSource]:
    """The local modules among ``names``, their parent packages and the local modules that they import.

    A file that cannot be read or is not valid Python is left out: the rank's own import will say so.
    """
    found: dict[str, ModuleSource] = {}
    todo = list(names)
    seen: set[str] = set()
    while todo:
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
        if parsed is not None:
            found[name] = ModuleSource(name, parsed.source, package, path, parsed.hash)
            todo.extend(parsed.imports)
    return found


def is_local(module: str, folder: str) -> bool:
    """Whether an importable name stands for a module of the folder."""
    return locate(module, folder) is not None


def locate(name: str, folder: str) -> tuple[str, bool] | None:
    """File (or directory, for a namespace package) and whether it is a package; None for a module from elsewhere."""
    top = name.partition(".")[0]
    if top in ("skymagic", "__main__") or top in sys.builtin_module_names:
        return None
    module = sys.modules.get(name)
    if module is not None:
        return _from_module(module, folder)
    if top in sys.stdlib_module_names:
        return None
    return _from_path(name, folder)


def _from_module(module: types.ModuleType, folder: str) -> tuple[str, bool] | None:
    origin = getattr(module, "__file__", None)
    package = hasattr(module, "__path__")
    if origin is None and package:
        origin = next((entry for entry in module.__path__ if inside(entry, folder)), None)
        return (origin, True) if origin is not None else None
    if not isinstance(origin, str) or not origin.endswith(".py") or not inside(origin, folder):
        return None
    return os.path.abspath(origin), package


def _from_path(name: str, folder: str) -> tuple[str, bool] | None:
    """What an import would find, without running the parents' code."""
    parent, _, tail = name.rpartition(".")
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
            return (initial, True) if inside(initial, folder) else None
        if any(os.path.isfile(base + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            return None
        if os.path.isfile(base + ".py"):
            return (base + ".py", False) if inside(base + ".py", folder) else None
        if os.path.isdir(base):
            spaces.append(base)
    return next(((space, True) for space in spaces if inside(space, folder)), None)


def inside(path: str, folder: str) -> bool:
    """Whether a file belongs to the notebook's folder, and not to an environment that lies in it."""
    real = os.path.realpath(path)
    root = os.path.realpath(folder)
    if not _under(real, root):
        return False
    return not any(_under(real, place) for place in _installed(root)) and not _in_packages(real[len(root) :])


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _in_packages(path: str) -> bool:
    return not {"site-packages", "dist-packages", "node_modules"}.isdisjoint(Path(path).parts)


@lru_cache(maxsize=64)
def _installed(root: str) -> tuple[str, ...]:
    """Directories of installed code."""
    paths = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    # A prefix such as /usr may hold the notebook's folder itself: only one that lies in the folder is excluded.
    paths += [prefix for prefix in (sys.prefix, sys.base_prefix) if _under(os.path.realpath(prefix), root)]
    return tuple(os.path.realpath(path) for path in paths if path and os.path.realpath(path) != root)


_cache: dict[str, tuple[tuple[int, int, int], _Parsed | None]] = {}


def _read(path: str, name: str, package: bool) -> _Parsed | None:
    """A module's text and imports, read again only when the file has changed."""
    if os.path.isdir(path):
        return _Parsed("", "", frozenset())
    try:
        status = os.stat(path)
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        cached = _cache.get(path)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        data = Path(path).read_bytes()
        parsed: _Parsed | None = None
        try:
            source = importlib.util.decode_source(data)
            tree = ast.parse(source, path)
            parsed = _Parsed(source, digest([data]), imported_names(tree, name if package else name.rpartition(".")[0]))
        except (SyntaxError, ValueError, RecursionError):
            parsed = None
        _cache[path] = (stamp, parsed)
        return parsed
    except OSError:
        return None


def as_plain(module: ModuleSource) -> dict[str, Any]:
    """The module as values that JSON can hold."""
    return asdict(module)
