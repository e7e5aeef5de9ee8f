"""Folders below a base, opened by descriptor and never through a link (openat, O_NOFOLLOW).

The contents of a base come from others, who may put a link in place of a folder, between two copies
or in the middle of one. A path is looked up again by each system call, and follows the link; a
descriptor stays the folder that was opened, whatever its current name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import NamedTuple

OWN_PREFIX = ".skymagic-"
"""Prefix of skymagic's own files among the user's."""
NOFOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening files: no links, and no waiting for the writer of a pipe."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
_LISTED_FLAGS = os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW
# O_PATH opens a folder with search permission only; macOS has no such flag.
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | NOFOLLOW
Identity = tuple[int, int]
"""Device and inode number, which identify a folder even after it was moved."""


class LinkInTheWay(OSError):
    """A link where a folder is expected."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "a link in the way", path)

    def __str__(self) -> str:
        return (
            f"{self.filename} is a link here, but a folder would be copied there: "
            "remove it, or copy to its target"
        )


class ReplacedError(OSError):
    """A file or folder was replaced after it was listed."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ESTALE, "replaced after it was listed: copy it again", path)


def identity(state: os.stat_result) -> Identity:
    """Return the identity of a file or folder."""
    return state.st_dev, state.st_ino


class Root(NamedTuple):
    """A folder whose files are listed: named by the user, or the target of a followed link."""

    path: str
    identity: Identity

    def file_place(self, path: str) -> FilePlace:
        """Return the place of a path below."""
        return FilePlace(self, path[len(self.path) :].lstrip("/" + os.sep).replace(os.sep, "/"))


class FilePlace(NamedTuple):
    """Location of a listed file: below a root, with ``/`` between the parts, and through no
    link.
    """

    root: Root
    below: str

    @property
    def path(self) -> str:
        """Absolute path, for display."""
        return os.path.join(self.root.path, *self.below.split("/"))

    @classmethod
    def of(cls, path: str, state: os.stat_result | None = None) -> FilePlace:
        """Return the place of a file that the user named; links are followed now.

        Raises:
            ReplacedError: it is not the file that `state` describes.
        """
        real = os.path.realpath(path)
        if state is not None and identity(os.lstat(real)) != identity(state):
            raise ReplacedError(path)
        above, name = os.path.split(real)
        return cls(Root(above, identity(os.stat(above))), name)


@contextlib.contextmanager
def opened(path: str, above: int | None, state: os.stat_result) -> Iterator[int]:
    """Open a folder for listing.

    Args:
        above: descriptor of the enclosing folder; None for a root, to which links may lead.
        state: status of the folder when it was found.

    Raises:
        ReplacedError: it has been replaced since.
    """
    flags = _LISTED_FLAGS & ~os.O_NOFOLLOW if above is None else _LISTED_FLAGS
    descriptor = os.open(path if above is None else os.path.basename(path), flags, dir_fd=above)
    try:
        if identity(os.fstat(descriptor)) != identity(state):
            raise ReplacedError(path)
        yield descriptor
    finally:
        os.close(descriptor)


class Folders:
    """The folders below `base`; the last one used, and those above it, stay open.

    Args:
        base: absolute path as the user named it; links in it are followed.
        expected: identity that it must have; None for any.
    """

    def __init__(self, base: str, expected: Identity | None = None) -> None:
        self._base, self._expected = base, expected
        # names and descriptors from the base down; the base's own name is empty
        self._open: list[tuple[str, int]] = []

    def parent(self, path: str, *, make: bool = False) -> tuple[int, str]:
        """Return the ``dir_fd`` and name of an entry for functions of `os`.

        They are valid until the next call.

        Args:
            path: below the base, with ``/`` between its parts.
            make: create missing folders.

        Raises:
            LinkInTheWay: one of the folders is a link.
            OSError: one of them does not exist, or cannot be entered.
        """
        *names, name = path.split("/")
        if not self._open:
            # The user chose the base, so links in it are followed.
            self._open.append(("", os.open(self._base, _FOLDER_FLAGS & ~os.O_NOFOLLOW)))
            if self._expected not in (None, identity(os.fstat(self._open[0][1]))):
                self.close()
                raise ReplacedError(self._base)
        common = 0
        while (
            common < min(len(names), len(self._open) - 1)
            and names[common] == self._open[common + 1][0]
        ):
            common += 1
        self._close_below(common + 1)
        for depth in range(common, len(names)):
            self._open.append(
                (names[depth], self._enter(self._open[-1][1], names[: depth + 1], make))
            )
        return self._open[-1][1], name

    def enter(self, path: str) -> tuple[int, str]:
        """Return a folder itself as `parent` returns an entry, with the same errors."""
        return self.parent(f"{path}/.")

    def open(self, path: str, flags: int) -> int:
        """Open an existing file that is not a link; an opener for `open`."""
        folder, name = self.parent(path)
        return os.open(name, flags | NOFOLLOW, dir_fd=folder)

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

    def _close_below(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def close(self) -> None:
        """Close all folders. Safe to call twice; a later use opens them again."""
        self._close_below(0)


class ListedFiles:
    """Opener of listed files, for reading.

    Their folders may belong to other users, who can put links in the way after the listing. Editors
    replace a file by another of the same name when they save: then the new file is opened.
    """

    def __init__(self) -> None:
        self._root: Root | None = None
        self._folders = Folders("")

    def open(self, entry: FilePlace) -> int:
        """Return a descriptor of a listed file.

        Raises:
            ReplacedError: it is no longer a regular file, its root is another folder, or a link is
                in its path.
        """
        if entry.root != self._root:
            self.close()
            self._root, self._folders = entry.root, Folders(*entry.root)
        try:
            descriptor = self._folders.open(entry.below, os.O_RDONLY)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise ReplacedError(entry.path) from None
            raise
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise ReplacedError(entry.path)

    def close(self) -> None:
        """Close the open folders. Safe to call twice."""
        self._folders.close()


def new_name() -> str:
    """Return a unique name for an incomplete file."""
    return f"{OWN_PREFIX}{secrets.token_hex(8)}.part"


def rename(folder: int, old: str, new: str) -> None:
    """Move a complete file to its final name."""
    os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
