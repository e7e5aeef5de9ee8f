"""Folders of the user's own modules: the notebook's, and those that he has put on ``sys.path``."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path


def is_own(path: str, top: str, folder: str) -> bool:
    """Whether a module's file is the user's own, so that it travels as source.

    Args:
        top: the first part of the module's name; through ``sys.path`` it is found directly in one of the entries.
        folder: the notebook's folder.
    """
    if inside(path, folder):
        return True
    entries = added(tuple(sys.path), os.environ.get("PYTHONPATH", ""), os.getcwd())
    if not entries:  # most often; and every path is resolved link by link
        return False
    real = os.path.realpath(path)
    return any(_first_part(real, entry) in (top, f"{top}.py") and inside(path, entry) for entry in entries)


@lru_cache(maxsize=4)
def added(path: tuple[str, ...], pythonpath: str, cwd: str) -> list[str]:
    """Entries of ``sys.path`` that came after Python's start: not its own, of ``PYTHONPATH``, or of an installation (``.pth``)."""
    entries = (os.path.realpath(os.path.join(cwd, entry)) for entry in path if entry and not entry.endswith(".zip"))
    return [entry for entry in entries if entry not in _startup(pythonpath) and not _in_packages(entry)]


def inside(path: str, folder: str) -> bool:
    """Whether a file belongs to a folder, and not to an environment that lies in it."""
    real = os.path.realpath(path)
    root = os.path.realpath(folder)
    if not _under(real, root):
        return False
    return not any(_under(real, place) for place in _installed(root)) and not _in_packages(real[len(root) :])


def _first_part(path: str, root: str) -> str:
    return os.path.relpath(path, root).partition(os.sep)[0] if _under(path, root) else ""


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _in_packages(path: str) -> bool:
    return not {"site-packages", "dist-packages", "node_modules"}.isdisjoint(Path(path).parts)


@lru_cache(maxsize=64)
def _installed(root: str) -> tuple[str, ...]:
    """Directories of installed code."""
    paths = [*_environment()]
    # A prefix such as /usr may hold the notebook's folder itself: only one that lies in the folder is excluded.
    paths += [prefix for prefix in (sys.prefix, sys.base_prefix) if _under(os.path.realpath(prefix), root)]
    return tuple(os.path.realpath(path) for path in paths if path and os.path.realpath(path) != root)


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
