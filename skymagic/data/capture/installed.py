"""Distributions in an environment and the modules they provide; used on both sides."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from inspect import getmodulename
from pathlib import Path

from skymagic.plan.distributions import Environment, canonical

_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
_HEADER = re.compile("^(Name|Version): *(.*)$", re.MULTILINE)
"""Matches the required fields of a distribution's metadata.

`Distribution.metadata` parses the whole description, which takes 2 ms.
"""
DEPTH = 4
"""Number of parts in a dotted name that distinguish distributions of one namespace package."""


def present() -> Environment:
    """Return the importable modules and versions, judging only by names of folders.

    This is fast, because no files of distributions are read.
    """
    versions: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = [entry.name for entry in os.scandir(folder or ".")]
        except OSError:
            continue
        for match in filter(None, map(_FOLDER.fullmatch, entries)):
            versions.setdefault(canonical(match["name"]), match["version"])
    importable = (module.name for module in pkgutil.iter_modules(sys.path))
    return Environment(
        versions, {name: () for name in importable if name not in sys.stdlib_module_names}
    )


def version(package: str) -> str:
    """Return a package's version, preferably from the imported module itself.

    Return "" if the version is unknown.
    """
    if package in sys.stdlib_module_names:
        return ""
    declared = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(declared, str):
        return declared
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def stamp() -> tuple[object, ...]:
    """Return a value that changes whenever a package is installed or removed."""
    return tuple((folder, _modification_time(folder)) for folder in sys.path)


def _modification_time(folder: str) -> int:
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0


def current_environment() -> Environment:
    """Return this environment with the distribution of each name; cached until it changes."""
    return _read(stamp())


def _top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the top-level names that a distribution provides."""
    if declared := distribution.read_text("top_level.txt"):
        return set(declared.split())
    parts = {path.partition("/")[:2] for path in _recorded_paths(distribution)}
    # A dot marks folders such as `name-1.0.dist-info`, and `..` in paths to scripts.
    return {
        top
        for first, slash in parts
        if (top := first if slash else getmodulename(first)) and "." not in top
    }


def _recorded_paths(distribution: importlib.metadata.Distribution) -> Iterable[str]:
    """Return the paths of a distribution's files as text.

    `Distribution.files` creates a path object for each, and checks the disk since Python 3.12.
    """
    record = distribution.read_text("RECORD")
    return (
        (row[0] for row in csv.reader(record.splitlines()) if row)
        if record
        else map(str, distribution.files or ())
    )


# The argument is only the key of the cache.
@lru_cache(maxsize=1)
def _read(stamp: tuple[object, ...]) -> Environment:
    versions: dict[str, str] = {}
    modules: dict[str, tuple[str, ...]] = {}
    holders: dict[str, dict[str, None]] = {}
    for distribution in importlib.metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        head = dict(_HEADER.findall(text.partition("\n\n")[0]))
        for top in _top_level_names(distribution) if len(head) == 2 else ():
            # The first one on `sys.path` is the one that is imported.
            versions.setdefault(canonical(head["Name"]), head["Version"])
            holders.setdefault(top, {})[head["Name"]] = None
    for top, names in holders.items():
        # Several distributions may provide a namespace package: look up their modules below it.
        if len(names) == 1:
            modules[top] = (*names,)
        else:
            for name in names:
                for module in _modules_of(name, top):
                    modules[module] = (*modules.get(module, ()), name)
    for distribution in importlib.metadata.distributions():
        # Editable distributions record no modules, so read the folders that they add.
        for folder in _linked(distribution):
            versions.setdefault(canonical(distribution.name), distribution.version)
            for module_info in pkgutil.iter_modules([folder]):
                modules.setdefault(module_info.name, (distribution.name,))
    return Environment(versions, modules)


def source_stamp(top: str) -> object:
    """Return a value that changes whenever a file of a module or package does.

    The module is not imported.
    """
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    locations = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return [(path, _modification_time(path)) for location in locations for path in _files(location)]


def _files(path: str) -> list[str]:
    """Return a file, or all files below a folder."""
    paths = (f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)
    return sorted(path for path in paths if not path.endswith(".pyc")) or [path]


def _linked(distribution: importlib.metadata.Distribution) -> list[str]:
    """Return folders that an editable distribution adds to `sys.path`.

    Few of these distributions list the modules in them.
    """
    try:
        direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable = (
            direct_url.get("dir_info", {}).get("editable")
            and distribution.name
            and distribution.version
        )
    except (ValueError, AttributeError):
        return []
    if not editable:
        return []
    files = [
        Path(str(distribution.locate_file(path)))
        for path in _recorded_paths(distribution)
        if path.endswith(".pth")
    ]
    lines = [
        line
        for file in files
        if file.is_file()
        for line in file.read_text(errors="replace").splitlines()
    ]
    return [line.strip() for line in lines if Path(line.strip()).is_dir() and line.strip()]


def _modules_of(distribution: str, top: str) -> set[str]:
    """Return the topmost dotted modules that a distribution provides below a top-level name."""
    names: set[str] = set()
    for *folders, file in (
        path.split("/") for path in _recorded_paths(importlib.metadata.distribution(distribution))
    ):
        stem, _, suffix = file.partition(".")
        if (folders or [stem])[0].partition(".")[0] == top and (suffix == "py" or ".so" in file):
            names.add(".".join((folders if stem == "__init__" else [*folders, stem])[:DEPTH]))
    return {name for name in names if not any(name.startswith(f"{other}.") for other in names)}
