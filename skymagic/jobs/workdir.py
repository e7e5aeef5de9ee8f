"""The folder of a script: the notebook's own on this machine, on other machines a copy that is brought up to date first."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from skymagic.display.screen import Copying
from skymagic.errors import RequestError
from skymagic.files.changes import summary
from skymagic.plan.units import Selection
from skymagic.pool import Pool

REMOTE_ROOT = "~/.skymagic/work"
"""Where such folders are on a node."""


def folder_here(text: str) -> Path:
    """The folder that a user names. Raises RequestError when there is none."""
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        raise RequestError(f"--workdir: there is no folder {text!r} here ({folder})")
    return folder


def folder_on_nodes(pool: Pool, folder: Path, targets: Selection) -> str:
    """Where a folder of the notebook is on these nodes, in the end; what differs there is copied, and said.

    Raises:
        FilesError: what cannot be copied, for all nodes at once.
    """
    if not pool.plan.remote:
        return str(folder)
    destination = remote_folder(folder)
    image = pool.plan.image
    includes = [str(Path(text).expanduser().absolute()) for text in image.includes]
    nodes = pool.machines(targets)
    with Copying() as progress:
        copied = pool.files().sync(folder, destination, image.excludes, includes, nodes, progress)
    if any(one.files or one.removed or one.notes for one in copied):
        progress.end(f"[{folder.name}: {summary(copied, progress.seconds)}]")
    return destination


def remote_folder(folder: Path) -> str:
    """The same for a folder each time, and another one for each folder and machine."""
    mark = hashlib.sha256(f"{platform.node()}\0{folder}".encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{REMOTE_ROOT}/{folder.name or 'root'}-{mark}"
