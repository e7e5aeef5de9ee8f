"""The user's own modules, which travel as source together with the local modules they import.

They are in the notebook's folder, or in entries that the user added to `sys.path`.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import site
import sys
import sysconfig
import types
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from skymagic.content.chunks import digest
from skymagic.data.capture.imports import imported_names, required_names
from skymagic.wire.values import ModuleSource


@dataclass(frozen=True)
class _Parsed:
    source: str
    hash: str
    imports: frozenset[str]
    required: frozenset[str]
    """Imports that the module requires when it is imported."""


class FoundModules(NamedTuple):
    """Modules that travel, and modules that are not valid Python."""

    sources: dict[str, ModuleSource]
    problems: dict[str, str]
    """By name: file, line, and description of the error."""
    imports: frozenset[str]
    """Dotted names that the sources may import."""
    required: frozenset[str]
    """Dotted names that the sources need in order to be imported."""


def search(names: Iterable[str], folder: str) -> FoundModules:
    """Find the local modules among `names`, their parent packages and local imports.

    A file that cannot be read is left for the rank's import to report.
    """
    sources: dict[str, ModuleSource] = {}
    problems: dict[str, str] = {}
    imports: set[str] = set()
    required: set[str] = set()
    pending, optional = list(names), list[str]()
    is_required = True  # first the required modules, then the optional ones
    visited: set[str] = set()
    while pending or optional:
        if not pending:
            pending, optional, is_required = optional, [], False
        name = pending.pop()
        if name in visited or not name:
            continue
        visited.add(name)
        # Importing a submodule imports its parent packages first.
        pending.append(name.rpartition(".")[0])
        location = locate(name, folder)
        if location is None:
            continue
        path, package = location
        parsed = _read(path, name, package)
        if isinstance(parsed, str):
            problems[name] = parsed
        elif parsed is not None:
            sources[name] = ModuleSource(name, parsed.source, package, path, parsed.hash)
            imports |= parsed.imports
            if is_required:
                required |= parsed.required
                pending.extend(parsed.required)
            optional.extend(parsed.imports)
    return FoundModules(sources, problems, frozenset(imports), frozenset(required))


def locate(name: str, folder: str) -> tuple[str, bool] | None:
    """Return the file of a local module, and True if it is a package.

    The file is a directory for a namespace package. Return None for a module from elsewhere.
    """
    top = name.partition(".")[0]
    # Present on every rank, or not importable at all.
    if top in ("skymagic", "__main__") or top in sys.builtin_module_names:
        return None
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        return _from_module(module, top, folder)
    if top in sys.stdlib_module_names:
        return None
    return _from_path(name, folder)


def _from_module(module: types.ModuleType, top: str, folder: str) -> tuple[str, bool] | None:
    origin = getattr(module, "__file__", None)
    # `torch.ops` has the file "_ops.py", and creates a namespace for any attribute looked up.
    if (
        isinstance(origin, str)
        and not os.path.isabs(origin)
        and type(module) is not types.ModuleType
    ):
        return None
    package = hasattr(module, "__path__")
    if origin is None and package:
        # A namespace package: a directory without `__init__.py`.
        origin = next((entry for entry in module.__path__ if is_own(entry, top, folder)), None)
        return (origin, True) if origin is not None else None
    if not isinstance(origin, str) or not origin.endswith(".py") or not is_own(origin, top, folder):
        return None
    return os.path.abspath(origin), package


def _from_path(name: str, folder: str) -> tuple[str, bool] | None:
    """Return the location that an import would find, without running the parents' code."""
    parent, _, tail = name.rpartition(".")
    top = name.partition(".")[0]
    entries: Sequence[str] = sys.path
    if parent:
        above = locate(parent, folder)
        if above is None or not above[1]:
            return None
        # The parent's file is its `__init__.py`, or the directory of a namespace package.
        entries = [above[0] if os.path.isdir(above[0]) else os.path.dirname(above[0])]
    spaces = []
    for entry in entries:
        base = os.path.join(os.path.abspath(entry or os.getcwd()), tail)
        initial = os.path.join(base, "__init__.py")
        if os.path.isfile(initial):
            return (initial, True) if is_own(initial, top, folder) else None
        # A compiled extension takes precedence over source, and cannot travel.
        if any(os.path.isfile(base + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            return None
        if os.path.isfile(base + ".py"):
            return (base + ".py", False) if is_own(base + ".py", top, folder) else None
        if os.path.isdir(base):
            # A namespace package is used only if no later entry has a regular module.
            spaces.append(base)
    return next(((space, True) for space in spaces if is_own(space, top, folder)), None)


# By path: modification time, size and inode of the file, and the result.
_cache: dict[str, tuple[tuple[int, int, int], _Parsed | str]] = {}


def _read(path: str, name: str, package: bool) -> _Parsed | str | None:
    """Return a module's text and imports, or a description of the error if it is not valid Python.

    The file is read again only if it changed.
    """
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
        # Compiling finds further errors, such as `return` outside of a function.
        compile(tree, path, "exec", dont_inherit=True)
    except SyntaxError as problem:
        return f"{path}, line {problem.lineno or 1}: {problem.msg}"
    except (ValueError, RecursionError, MemoryError) as problem:
        return f"{path}: {problem}"
    above = name if package else name.rpartition(".")[0]
    names = imported_names(tree, above), required_names(tree, above, functions=False)
    return _Parsed(source, digest([data]), *names)


def is_own(path: str, top: str, folder: str) -> bool:
    """Return True if a module's file is the user's own, so that it travels as source.

    Args:
        top: first part of the module's name; in `sys.path` it is found directly in one of the
            entries.
        folder: the notebook's folder.
    """
    if is_inside(path, folder):
        return True
    # Relative entries may have been resolved from another working directory.
    path_entries = (*sys.path, *_resolved_entries)
    entries = added_path_entries(path_entries, os.environ.get("PYTHONPATH", ""), os.getcwd())
    if not entries:  # the common case; resolving links in every path would be slow
        return False
    real = os.path.realpath(path)
    return any(
        _first_part(real, entry) in (top, f"{top}.py") and is_inside(path, entry)
        for entry in entries
    )


_resolved_entries: dict[str, None] = {}
"""Absolute paths of relative entries in `sys.path`, from the time when the notebook could import
from them.
"""


def remember_relative_entries() -> None:
    """Resolve relative entries of `sys.path` now.

    Called after each cell, because a later cell may change the working directory.
    """
    relative = [entry for entry in sys.path if entry and not os.path.isabs(entry)]
    if relative:
        with contextlib.suppress(OSError):  # the working directory was deleted
            _resolved_entries.update(dict.fromkeys(os.path.abspath(entry) for entry in relative))


@lru_cache(maxsize=4)
def added_path_entries(path: tuple[str, ...], pythonpath: str, cwd: str) -> list[str]:
    """Return entries of `sys.path` that were added after Python's start.

    Entries from Python itself, `PYTHONPATH`, or an installation (`.pth`) are left out.
    """
    entries = (
        os.path.realpath(os.path.join(cwd, entry))
        for entry in path
        if entry and not entry.endswith(".zip")
    )
    return [
        entry for entry in entries if entry not in _startup(pythonpath) and not in_packages(entry)
    ]


def is_inside(path: str, folder: str) -> bool:
    """Return True if a file belongs to a folder, and not to an environment inside the folder."""
    real = os.path.realpath(path)
    root = os.path.realpath(folder)
    if not _is_under(real, root):
        return False
    # Below the folder only: the folder itself may be among installed packages.
    return not any(
        _is_under(real, directory) for directory in _installation_folders(root)
    ) and not in_packages(real[len(root) :])


def _first_part(path: str, root: str) -> str:
    return os.path.relpath(path, root).partition(os.sep)[0] if _is_under(path, root) else ""


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def in_packages(path: str) -> bool:
    """Return True if a file is in a folder of installed packages."""
    return not {"site-packages", "dist-packages", "node_modules"}.isdisjoint(Path(path).parts)


@lru_cache(maxsize=64)
def _installation_folders(root: str) -> tuple[str, ...]:
    """Return directories of installed code."""
    paths = [*_environment()]
    # A prefix such as /usr may contain the notebook's folder: exclude it only if it is inside the
    # folder.
    paths += [
        prefix
        for prefix in (sys.prefix, sys.base_prefix)
        if _is_under(os.path.realpath(prefix), root)
    ]
    return tuple(
        os.path.realpath(path) for path in paths if path and os.path.realpath(path) != root
    )


def _environment() -> Iterator[str]:
    """Yield the directories where Python and its packages are installed."""
    paths = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    yield from filter(None, [*paths, *site.getsitepackages(), site.getusersitepackages()])


@lru_cache(maxsize=4)
def _startup(pythonpath: str) -> frozenset[str]:
    """Return the entries that Python put on `sys.path` when it started."""
    compiled = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
    entries = [*_environment(), compiled, *filter(None, pythonpath.split(os.pathsep))]
    for folder in {*_environment()}:
        for file in Path(folder).glob("*.pth"):
            entries += _folders_in_pth_files(file)
    return frozenset(os.path.realpath(entry) for entry in entries)


def _folders_in_pth_files(file: Path) -> list[str]:
    """Return folders that a `.pth` file adds, as editable installations do."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    # `site` executes the lines that start with `import`.
    plain = (line.strip() for line in lines if not line.startswith(("#", "import ", "import\t")))
    return [str(file.parent / line) for line in plain if line]


MAX_DATA_BYTES = 4_000_000
"""Data files of a package travel with its source only up to this total size in bytes."""
DATA_READERS = frozenset({"importlib", "importlib.resources", "importlib_resources", "pkgutil"})
"""Modules that read data files; code that imports none of them needs no data files."""
_CODE = (".py", ".pyc", ".pyo", ".pyi", ".so", ".pyd", ".ipynb")


def data_files(folder: Path) -> list[Path]:
    """Return a package's data files: neither code nor hidden files."""
    files = (path for path in folder.rglob("*") if not path.name.endswith(_CODE) and path.is_file())
    return sorted(
        path
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    )


def packed_data(folder: Path, files: list[Path]) -> str:
    """Return data files as text: a base64 zip archive, equal for equal contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in files:
            archive.writestr(
                # Without the file's modification time, so that equal contents give equal archives.
                zipfile.ZipInfo(path.relative_to(folder).as_posix()),
                path.read_bytes(),
                zipfile.ZIP_DEFLATED,
            )
    return base64.b64encode(out.getvalue()).decode()


def unpacked_data(text: str) -> zipfile.Path:
    """Return the archive as a folder."""
    return zipfile.Path(zipfile.ZipFile(io.BytesIO(base64.b64decode(text))))
