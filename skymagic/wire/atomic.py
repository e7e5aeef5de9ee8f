"""Private files, replaced atomically: a concurrent reader sees the old or the new content."""

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
    """Create a folder that only the user can change, and return it.

    Every folder from ``skymagic`` down is made private too: ``mkdir(mode, parents=True)`` applies
    the mode to the last folder only, and with umask 002 a group could rename those above it.

    Raises:
        OSError: it cannot be created, or one of these folders belongs to another user.
    """
    folders = [*reversed(path.parents), path]
    # Start at the last folder of this name: a checkout of skymagic may lie above it, and its
    # permissions are not ours to change.
    first = max(
        (n for n, folder in enumerate(folders) if folder.name in OWN_NAMES), default=len(folders)
    )
    for n, folder in enumerate(folders):
        if not folder.is_dir():
            # Another process may create it at this moment.
            folder.mkdir(mode=0o700, exist_ok=True)
        if n >= first:
            _take(folder)
    return path


def _take(folder: Path) -> None:
    """Take write permission on a folder away from all other users.

    Raises:
        PermissionError: the folder belongs to another user.
    """
    status = folder.stat()
    # The owner could make it writable again at any time.
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(0o700)


def is_private(path: Path) -> bool:
    """Return True if a regular file belongs to the user and no other user can write to it."""
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
    """Replace a file's content, in a folder that is private to the user.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    private_folder(path.parent)
    # Other processes and threads may be writing the same file.
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        # O_TRUNC rather than O_EXCL: a killed process with the same ids may have left this file.
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    finally:
        # It still exists only if the write or the rename failed.
        part.unlink(missing_ok=True)


def state_folder(kind: str) -> Path:
    """Return the private folder for state that outlives a notebook: ``pools``, ``logs``, ``costs``,
    …
    """
    from platformdirs import user_state_path

    return user_state_path("skymagic") / kind


def keep(path: Path, content: bytes) -> None:
    """Write a file that is only a hint.

    Errors are ignored, such as a full disk or a read-only home.
    """
    with contextlib.suppress(OSError):
        write(path, content)
