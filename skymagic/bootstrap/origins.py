"""Where the notebook's own distributions come from, and their sources as one digest: editable ones are built, others packed again.

An installer writes down what a distribution was installed from (``direct_url.json``, PEP 610): a folder, a repository, a file.
No index need have such a distribution, or may have something else of its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from skymagic.plan.masking import masked

_DERIVED = re.compile(
    r"__pycache__|\.(git|hg|svn|venv|tox|nox|eggs|ipynb_checkpoints|.*_cache)|venv|build|dist|node_modules|.*\.egg-info"
)
"""Folders that hold nothing of a source: what version control, environments and builds leave."""
_COMPILED = (".pyc", ".pyo")
_CODE = (".py", ".pyi", ".pyx", ".pxd")
"""What counts also where git ignores it: generated code, such as ``_version.py``."""
GIT_TIMEOUT = 20.0


@dataclass(frozen=True)
class Origin:
    """What a distribution was installed from.

    Attributes:
        url: without passwords.
        folder: a folder of this machine; "" where it is something else.
        editable: whether the notebook imports from that folder itself.
        archive: whether it was one file.
    """

    url: str
    folder: str = ""
    editable: bool = False
    archive: bool = False

    def __str__(self) -> str:
        return self.folder or self.url


def origin(distribution: metadata.Distribution) -> Origin | None:
    """What it was installed from; None for an index, and for a file that was downloaded by its URL."""
    try:
        said = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = str(said["url"])
    except (ValueError, KeyError, TypeError):
        return None
    local = urlsplit(url).scheme == "file"
    path = url2pathname(urlsplit(url).path) if local else ""
    if "dir_info" in said:
        within = str(said.get("subdirectory") or "")
        folder = str(Path(path, within)) if within else path
        return Origin(masked(url), folder, bool((said["dir_info"] or {}).get("editable")))
    if "vcs_info" in said:
        commit = (said["vcs_info"] or {}).get("commit_id", "")
        return Origin(f"{masked(url)}@{commit}"[:200])
    return Origin(masked(url), archive=True) if local else None


def source_digest(folder: Path, name: str) -> str:
    """Names the content of a source folder, and what it is built by and for."""
    whole = hashlib.sha256(f"{name} {sysconfig.get_platform()} {sys.version_info[:2]}".encode())
    for path in source_files(folder):
        status = (folder / path).stat()
        told = f"\0{path}\0{status.st_mode & 0o111 != 0}\0"
        whole.update(told.encode() + _digest(str(folder / path), status.st_size, status.st_mtime_ns))
    return whole.hexdigest()[:24]


@lru_cache(maxsize=100_000)
def _digest(path: str, nbytes: int, changed: int) -> bytes:
    """Of one file, which is read again when it was changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def source_files(folder: Path) -> list[str]:
    """The files of a source, relative to its folder, sorted: as git knows them, else all but what builds leave."""
    found = _known_to_git(folder)
    if found is None:
        found = set(_walked(folder))
    return sorted(path for path in found if not path.endswith(_COMPILED) and (folder / path).is_file())


def _walked(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not _DERIVED.fullmatch(name) and not Path(place, name, "pyvenv.cfg").exists()
        ]
        within = Path(place).relative_to(folder)
        yield from (str(within / name) for name in files)


def _known_to_git(folder: Path) -> set[str] | None:
    """What git has or would take, and code that it ignores beside that: a data folder that it ignores may be large. None without git."""
    listed = _git(folder, "-co")
    if not listed:
        return None
    return listed | {path for path in _git(folder, "-oi", "--directory") or () if path.endswith(_CODE)}


def _git(folder: Path, *options: str) -> set[str] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", *options, "--exclude-standard", "."]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(filter(None, os.fsdecode(done.stdout).split("\0"))) if done.returncode == 0 else None
