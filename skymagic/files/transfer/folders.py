"""Folders below a base, opened one by one by descriptor and never through a link (openat, O_NOFOLLOW).

What is below a base was written by others, who may put a link where a folder was, between two copies or in the middle of one. A
path is looked up anew by each system call, and follows it; a descriptor is the folder that was opened, whatever its name is now.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat

from skymagic.files.transfer.entries import OWN_PREFIX

BY_DESCRIPTOR = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether the system has openat; else each part of a path is looked at before the path is used."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""For files that are opened: no link, and no waiting for who writes into a pipe."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NOFOLLOW
WRITTEN_OVER = os.O_RDWR | getattr(os, "O_BINARY", 0) | NOFOLLOW
"""For a file of our own that is there."""
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW


class LinkInTheWay(OSError):
    """A link is where a folder is to be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "a link in the way", path)

    def __str__(self) -> str:
        return f"{self.filename} is a link here, and a folder is to come: remove it, or copy to where it leads"


class Folders:
    """The folders below `base`; the last one that was used, and those above it, stay open.

    Args:
        base: in full, as the user named it: links on the way to it, and itself, are followed.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._open: list[tuple[str, int]] = []
        """Names and descriptors from the base down; the base's own name is empty."""

    def parent(self, path: str, *, make: bool = False) -> tuple[int | None, str]:
        """Where an entry is, as ``dir_fd`` and the path of the functions in `os`.

        Args:
            path: below the base, with ``/`` between its parts.
            make: make the folders that are missing.

        Raises:
            LinkInTheWay: one of the folders is a link.
            OSError: one of them is not there, or cannot be entered.
        """
        *above, name = path.split("/")
        if not BY_DESCRIPTOR:
            return None, os.path.join(self._checked(above, make), name)
        return self._descriptor(above, make), name

    def enter(self, path: str) -> tuple[int | None, str]:
        """A folder itself, as `parent` gives an entry; errors as there."""
        return self.parent(f"{path}/.")

    def open(self, path: str, flags: int) -> int:
        """Open a file that is there, and is no link; an opener for `open`."""
        folder, name = self.parent(path)
        return os.open(name, flags | NOFOLLOW, dir_fd=folder)

    def _descriptor(self, names: list[str], make: bool) -> int:
        if not self._open:
            # the base is the user's own word: followed
            self._open.append(("", os.open(self._base, _FOLDER_FLAGS & ~getattr(os, "O_NOFOLLOW", 0))))
        common = 0
        while common < min(len(names), len(self._open) - 1) and names[common] == self._open[common + 1][0]:
            common += 1
        self._close_below(common + 1)
        for depth in range(common, len(names)):
            self._open.append((names[depth], self._enter(self._open[-1][1], names[: depth + 1], make)))
        return self._open[-1][1]

    def _enter(self, above: int, names: list[str], make: bool) -> int:
        try:
            return os.open(names[-1], _FOLDER_FLAGS, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(names[-1], dir_fd=above)
            return os.open(names[-1], _FOLDER_FLAGS, dir_fd=above)
        except OSError:
            if stat.S_ISLNK(os.lstat(names[-1], dir_fd=above).st_mode):
                raise LinkInTheWay(os.path.join(self._base, *names)) from None
            raise

    def _checked(self, names: list[str], make: bool) -> str:
        path = self._base
        for name in names:
            path = os.path.join(path, name)
            if os.path.islink(path):
                raise LinkInTheWay(path)
            if make and not os.path.isdir(path):
                os.mkdir(path)
        return path

    def _close_below(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def close(self) -> None:
        """Close all of them; twice is safe, and a later use opens them again."""
        self._close_below(0)


def beside(name: str, mark: str = "") -> str:
    """A name for what is not whole yet, in the same folder; `mark` stands in it."""
    return os.path.join(os.path.dirname(name), f"{OWN_PREFIX}{mark}{secrets.token_hex(8)}.part")


def rename(folder: int | None, old: str, new: str) -> None:
    """Put what is whole in its place."""
    os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
