"""The distributions of this environment, and what is imported from them; on both sides."""

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
"""What is needed of a distribution's metadata; `Distribution.metadata` reads its whole description, and takes 2 ms."""
DEPTH = 4
"""Parts of a dotted name by which distributions of one namespace package are told apart."""


def present() -> Environment:
    """What can be imported here, without reading any distribution's files: names of folders tell it at once."""
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
    """A package's version here, as it tells it itself where it was imported; "" where it has none."""
    if package in sys.stdlib_module_names:
        return ""
    known = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(known, str):
        return known
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def stamp() -> tuple[object, ...]:
    """Equal as long as nothing is installed here, or removed."""
    return tuple((folder, _changed(folder)) for folder in sys.path)


def _changed(folder: str) -> int:
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0


def here() -> Environment:
    """What is installed here, with the distribution of each name; read again when something was installed."""
    return _read(stamp())


def _tops(distribution: importlib.metadata.Distribution) -> set[str]:
    """The names that a distribution is imported by."""
    if declared := distribution.read_text("top_level.txt"):
        return set(declared.split())
    parts = {path.partition("/")[:2] for path in _recorded(distribution)}
    return {
        top
        for first, slash in parts
        if (top := first if slash else getmodulename(first)) and "." not in top
    }


def _recorded(distribution: importlib.metadata.Distribution) -> Iterable[str]:
    """Its files; `Distribution.files` makes a path of each, and since Python 3.12 looks for it on the disk."""
    record = distribution.read_text("RECORD")
    return (
        (row[0] for row in csv.reader(record.splitlines()) if row)
        if record
        else map(str, distribution.files or ())
    )


@lru_cache(maxsize=1)
def _read(stamp: tuple[object, ...]) -> Environment:
    versions: dict[str, str] = {}
    modules: dict[str, tuple[str, ...]] = {}
    holders: dict[str, dict[str, None]] = {}
    for found in importlib.metadata.distributions():
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
        head = dict(_HEADER.findall(text.partition("\n\n")[0]))
        for top in _tops(found) if len(head) == 2 else ():
            versions.setdefault(canonical(head["Name"]), head["Version"])
            holders.setdefault(top, {})[head["Name"]] = None
    for top, names in holders.items():
        if len(names) == 1:
            modules[top] = (*names,)
        else:
            for name in names:
                for module in _modules_of(name, top):
                    modules[module] = (*modules.get(module, ()), name)
    for found in importlib.metadata.distributions():
        for folder in _linked(found):
            versions.setdefault(canonical(found.name), found.version)
            for each in pkgutil.iter_modules([folder]):
                modules.setdefault(each.name, (found.name,))
    return Environment(versions, modules)


def source_stamp(top: str) -> object:
    """Equal as long as no file of a module or package is changed, added or removed; it is not imported."""
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    places = list(found.submodule_search_locations or ()) or [found.origin or ""]
    return [(path, _changed(path)) for place in places for path in _files(place)]


def _files(place: str) -> list[str]:
    """A file, or all that is below a folder."""
    walked = (f"{folder}/{name}" for folder, _, names in os.walk(place) for name in names)
    return sorted(path for path in walked if not path.endswith(".pyc")) or [place]


def _linked(distribution: importlib.metadata.Distribution) -> list[str]:
    """Folders that an editable distribution adds to ``sys.path``: few of them list the modules that are in there."""
    try:
        said = json.loads(distribution.read_text("direct_url.json") or "{}")
        editable = (
            said.get("dir_info", {}).get("editable") and distribution.name and distribution.version
        )
    except (ValueError, AttributeError):
        return []
    if not editable:
        return []
    files = [
        Path(str(distribution.locate_file(path)))
        for path in _recorded(distribution)
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
    """The packages and modules below a name that a distribution holds, dotted; the highest of each branch."""
    found: set[str] = set()
    for *folders, file in (
        path.split("/") for path in _recorded(importlib.metadata.distribution(distribution))
    ):
        stem, _, suffix = file.partition(".")
        if (folders or [stem])[0].partition(".")[0] == top and (suffix == "py" or ".so" in file):
            found.add(".".join((folders if stem == "__init__" else [*folders, stem])[:DEPTH]))
    return {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
