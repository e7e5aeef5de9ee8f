"""The distributions of this environment, and what is imported from them; on both sides."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import re
import sys
from functools import lru_cache
from pathlib import Path, PurePosixPath

from skymagic.plan.distributions import Environment, canonical

_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
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
    return Environment(versions, {name: () for name in importable if name not in sys.stdlib_module_names})


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


@lru_cache(maxsize=1)
def _read(stamp: tuple[object, ...]) -> Environment:
    versions: dict[str, str] = {}
    modules: dict[str, tuple[str, ...]] = {}
    shared: set[str] = set()
    for top, names in importlib.metadata.packages_distributions().items():
        names = list(dict.fromkeys(names))
        versions.update({canonical(name): importlib.metadata.version(name) for name in names})
        if len(names) == 1:
            modules[top] = (names[0],)
        else:
            shared.update(names)
            for name in names:
                for module in _modules_of(name, top):
                    modules[module] = (*modules.get(module, ()), name)
    return Environment(versions, modules)


def _modules_of(distribution: str, top: str) -> set[str]:
    """The packages and modules below a name that a distribution holds, dotted; the highest of each branch."""
    found: set[str] = set()
    for path in importlib.metadata.files(distribution) or ():
        parts = PurePosixPath(path).parts
        if (
            parts[0].partition(".")[0] != top
            or parts[-1].partition(".")[2] not in ("py", "so")
            and ".so" not in parts[-1]
        ):
            continue
        stem = parts[-1].partition(".")[0]
        dotted = parts[:-1] if stem == "__init__" else (*parts[:-1], stem)
        found.add(".".join(dotted[:DEPTH]))
    return {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
