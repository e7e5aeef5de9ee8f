"""Files that the user alone can read, replaced atomically: a concurrent reader sees the old content or the new."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

OWN_NAMES = ("skymagic", ".skymagic")
OTHERS_WRITE = 0o022
"""Mode bits that let the group or others write."""


def private_folder(path: Path) -> Path:
    """A folder that only the user can change, made where it is missing; every folder from ``skymagic`` down to it too.

    ``mkdir(mode, parents=True)`` gives the mode to the last folder alone: with umask 002 a group could rename the ones above it.

    Raises:
        OSError: it cannot be made, or one of these folders belongs to another user.
    """
    folders = [*reversed(path.parents), path]
    # the last folder of this name: a checkout of skymagic may be above it, which is not ours to change
    first = max(
        (n for n, folder in enumerate(folders) if folder.name in OWN_NAMES), default=len(folders)
    )
    for n, folder in enumerate(folders):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
        if n >= first:
            _take(folder)
    return path


def _take(folder: Path) -> None:
    """Let nobody else write to a folder of the user's."""
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(0o700)


def is_private(path: Path) -> bool:
    """Whether a file is the user's own, and nobody else can write to it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & OTHERS_WRITE
    )


def write(path: Path, content: bytes) -> None:
    """Replace a file's content; its folder is made private to the user.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    private_folder(path.parent)
    # other processes and threads may write the same file now
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def state_folder(kind: str) -> Path:
    """Where what outlives a notebook is, for the user alone: ``pools``, ``logs``, ``costs``, …"""
    from platformdirs import user_state_path

    return user_state_path("skymagic") / kind


def keep(path: Path, content: bytes) -> None:
    """The same as `write`, for what is a hint alone: a home that cannot be written, or a full disk, keeps nothing."""
    with contextlib.suppress(OSError):
        write(path, content)
