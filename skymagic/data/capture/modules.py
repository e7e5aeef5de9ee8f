"""The user's own modules, of the notebook's folder and of entries that they added to ``sys.path``: they travel as source, with those that they import."""

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

from skymagic.data.capture.imports import imported_names, required_names
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
    """The package's data files, as `packed_data` makes them; empty where the rank sees the package's folder."""


@dataclass(frozen=True)
class _Parsed:
    source: str
    hash: str
    imports: frozenset[str]
    required: frozenset[str]
    """Imports that it does not do without when it is imported."""


class FoundModules(NamedTuple):
    """Modules that travel, and those that would if they were Python."""

    sources: dict[str, ModuleSource]
    problems: dict[str, str]
    """Name → file, line, and what is wrong there."""
    imports: frozenset[str]
    """Dotted names that the sources may import."""
    required: frozenset[str]
    """Dotted names without which the sources cannot be imported."""


def search(names: Iterable[str], folder: str) -> FoundModules:
    """The local modules among ``names``, their parent packages and the local modules that they import.

    A file that cannot be read is left to the rank's own import.
    """
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
    return FoundModules(found, problems, frozenset(imports), frozenset(required))


def locate(name: str, folder: str) -> tuple[str, bool] | None:
    """File (or directory, for a namespace package) and whether it is a package; None for a module from elsewhere."""
    top = name.partition(".")[0]
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
    # torch.ops says that it is "_ops.py", and makes a namespace of any other name that it is asked for
    if (
        isinstance(origin, str)
        and not os.path.isabs(origin)
        and type(module) is not types.ModuleType
    ):
        return None
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
        compile(
            tree, path, "exec", dont_inherit=True
        )  # `return` outside of a function is an error of this step
    except SyntaxError as wrong:
        return f"{path}, line {wrong.lineno or 1}: {wrong.msg}"
    except (ValueError, RecursionError, MemoryError) as wrong:
        return f"{path}: {wrong}"
    above = name if package else name.rpartition(".")[0]
    names = imported_names(tree, above), required_names(tree, above, functions=False)
    return _Parsed(source, digest([data]), *names)


def is_own(path: str, top: str, folder: str) -> bool:
    """Whether a module's file is the user's own, so that it travels as source.

    Args:
        top: the first part of the module's name; through ``sys.path`` it is found directly in one of the entries.
        folder: the notebook's folder.
    """
    if inside(path, folder):
        return True
    path_entries = (*sys.path, *_resolved_entries)
    entries = added(path_entries, os.environ.get("PYTHONPATH", ""), os.getcwd())
    if not entries:  # most often; and every path is resolved link by link
        return False
    real = os.path.realpath(path)
    return any(
        _first_part(real, entry) in (top, f"{top}.py") and inside(path, entry) for entry in entries
    )


_resolved_entries: dict[str, None] = {}
"""Absolute paths that relative entries of ``sys.path`` had while the notebook could import from them."""


def remember_relative_entries() -> None:
    """Resolve relative entries of ``sys.path`` now; called after each cell, for a later cell may change the working directory."""
    relative = [entry for entry in sys.path if entry and not os.path.isabs(entry)]
    if relative:
        with contextlib.suppress(OSError):  # the working directory was deleted
            _resolved_entries.update(dict.fromkeys(os.path.abspath(entry) for entry in relative))


@lru_cache(maxsize=4)
def added(path: tuple[str, ...], pythonpath: str, cwd: str) -> list[str]:
    """Entries of ``sys.path`` that came after Python's start: not its own, of ``PYTHONPATH``, or of an installation (``.pth``)."""
    entries = (
        os.path.realpath(os.path.join(cwd, entry))
        for entry in path
        if entry and not entry.endswith(".zip")
    )
    return [
        entry for entry in entries if entry not in _startup(pythonpath) and not in_packages(entry)
    ]


def inside(path: str, folder: str) -> bool:
    """Whether a file belongs to a folder, and not to an environment that lies in it."""
    real = os.path.realpath(path)
    root = os.path.realpath(folder)
    if not _under(real, root):
        return False
    return not any(_under(real, place) for place in _installed(root)) and not in_packages(
        real[len(root) :]
    )


def _first_part(path: str, root: str) -> str:
    return os.path.relpath(path, root).partition(os.sep)[0] if _under(path, root) else ""


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def in_packages(path: str) -> bool:
    """Return True if a file is in a folder of installed packages."""
    return not {"site-packages", "dist-packages", "node_modules"}.isdisjoint(Path(path).parts)


@lru_cache(maxsize=64)
def _installed(root: str) -> tuple[str, ...]:
    """Directories of installed code."""
    paths = [*_environment()]
    # A prefix such as /usr may hold the notebook's folder itself: only one that lies in the folder is excluded.
    paths += [
        prefix for prefix in (sys.prefix, sys.base_prefix) if _under(os.path.realpath(prefix), root)
    ]
    return tuple(
        os.path.realpath(path) for path in paths if path and os.path.realpath(path) != root
    )


def _environment() -> Iterator[str]:
    """Where Python and its packages are installed."""
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    yield from filter(None, [*found, *site.getsitepackages(), site.getusersitepackages()])


@lru_cache(maxsize=4)
def _startup(pythonpath: str) -> frozenset[str]:
    """What Python put on ``sys.path`` when it started."""
    compiled = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
    entries = [*_environment(), compiled, *filter(None, pythonpath.split(os.pathsep))]
    for folder in {*_environment()}:
        for file in Path(folder).glob("*.pth"):
            entries += _listed(file)
    return frozenset(os.path.realpath(entry) for entry in entries)


def _listed(file: Path) -> list[str]:
    """Folders that a ``.pth`` file adds: of editable installations."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    plain = (line.strip() for line in lines if not line.startswith(("#", "import ", "import\t")))
    return [str(file.parent / line) for line in plain if line]


MAX_DATA_BYTES = 4_000_000
"""Data files of a package that together have more bytes do not travel with its source."""
DATA_READERS = frozenset({"importlib", "importlib.resources", "importlib_resources", "pkgutil"})
"""Modules that read data files; where the code imports none of them, none of the files is needed."""
_CODE = (".py", ".pyc", ".pyo", ".pyi", ".so", ".pyd", ".ipynb")


def data_files(folder: Path) -> list[Path]:
    """A package's data files: neither code nor hidden."""
    files = (path for path in folder.rglob("*") if not path.name.endswith(_CODE) and path.is_file())
    return sorted(
        path
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    )


def packed_data(folder: Path, files: list[Path]) -> str:
    """Data files as text: a zip archive in base64, the same for the same contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in files:
            archive.writestr(
                zipfile.ZipInfo(path.relative_to(folder).as_posix()),
                path.read_bytes(),
                zipfile.ZIP_DEFLATED,
            )
    return base64.b64encode(out.getvalue()).decode()


def unpacked_data(text: str) -> zipfile.Path:
    """The archive as a folder."""
    return zipfile.Path(zipfile.ZipFile(io.BytesIO(base64.b64decode(text))))
