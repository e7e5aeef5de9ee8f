"""Wheels and package indexes for tests: tiny distributions, in a folder or served over HTTP."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    """A wheel of one module, which holds its version; `requires` are its requirements."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    files = {f"{module}.py": f"__version__ = {version!r}\n", **dist_info(name, version, requires)}
    files[f"{module}-{version}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{each},,\n" for each in files)
    files[f"{module}-{version}.dist-info/RECORD"] = f"{record}{module}-{version}.dist-info/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path


def dist_info(name: str, version: str, requires: Sequence[str] = ()) -> Mapping[str, str]:
    """The files that make an environment have a distribution."""
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    return {f"{name.replace('-', '_')}-{version}.dist-info/METADATA": text}


def installed(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Let a folder that is on sys.path have a distribution, without its code."""
    for file, text in dist_info(name, version, requires).items():
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(text)
