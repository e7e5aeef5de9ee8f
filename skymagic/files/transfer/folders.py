"""Folders below a base, opened one by one by descriptor and never through a link (openat, O_NOFOLLOW).

What is below a base was written by others, who may put a link where a folder was, between two copies or in the middle of one. A
path is looked up again by each system call, and follows it; a descriptor is the folder that was opened, whatever its name is now.
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
"""Prefix of our own files among the user's."""
BY_DESCRIPTOR = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether the system has openat; else each part of a path is looked at before the path is used."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""For files that are opened: no link, and no waiting for who writes into a pipe."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | NOFOLLOW
WRITTEN_OVER = os.O_RDWR | getattr(os, "O_BINARY", 0) | NOFOLLOW
"""For a file of our own that is there."""
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
_LISTED_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
"""For a folder whose names are read, which O_PATH does not allow."""
_LINK = getattr(os, "O_NOFOLLOW", 0)
Identity = tuple[int, int]
"""Device and number: the same folder, whatever its path is now."""


class LinkInTheWay(OSError):
    """A link is where a folder is to be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "a link in the way", path)

    def __str__(self) -> str:
        return f"{self.filename} is a link here, and a folder is to come: remove it, or copy to where it leads"


class ReplacedError(OSError):
    """Something else is where a file or folder was when it was listed."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ESTALE, "replaced after it was listed: copy it again", path)


def identity(state: os.stat_result) -> Identity:
    """The identity of a file or folder."""
    return state.st_dev, state.st_ino


class Root(NamedTuple):
    """A folder below which files are listed: the user has named it, or a link to it is followed."""

    path: str
    identity: Identity

    def place(self, path: str) -> FilePlace:
        """The place of a path below."""
        return FilePlace(self, path[len(self.path) :].lstrip("/" + os.sep).replace(os.sep, "/"))


class FilePlace(NamedTuple):
    """Where a listed file lies: below a root, with ``/`` between the parts, and through no link."""

    root: Root
    below: str

    @property
    def path(self) -> str:
        """In full, to be shown."""
        return os.path.join(self.root.path, *self.below.split("/"))

    @classmethod
    def of(cls, path: str, state: os.stat_result | None = None) -> FilePlace:
        """The place of a file that the user has named: links are followed, now.

        Raises:
            ReplacedError: it is not the one that was seen there, which `state` is of.
        """
        real = os.path.realpath(path)
        if state is not None and identity(os.lstat(real)) != identity(state):
            raise ReplacedError(path)
        above, name = os.path.split(real)
        return cls(Root(above, identity(os.stat(above))), name)


@contextlib.contextmanager
def opened(path: str, above: int | None, state: os.stat_result) -> Iterator[int | None]:
    """A folder that is to be listed, opened; None where the system has no openat, and names are all there is.

    Args:
        above: the folder that it is in, which is open; None for a root, to which links may lead.
        state: what was seen there.

    Raises:
        ReplacedError: it is another one by now.
    """
    if not BY_DESCRIPTOR:
        yield None
        return
    flags = _LISTED_FLAGS & ~_LINK if above is None else _LISTED_FLAGS
    descriptor = os.open(path if above is None else os.path.basename(path), flags, dir_fd=above)
    try:
        if identity(os.fstat(descriptor)) != identity(state):
            raise ReplacedError(path)
        yield descriptor
    finally:
        os.close(descriptor)


class Folders:
    """The folders below `base`; the last one that was used, and those above it, stay open.

    Args:
        base: in full, as the user named it: links on the way to it, and itself, are followed.
        expected: what it must be; None where it may be any folder.
    """

    def __init__(self, base: str, expected: Identity | None = None) -> None:
        self._base, self._expected = base, expected
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
        return os.open(name, flags | getattr(os, "O_BINARY", 0) | NOFOLLOW, dir_fd=folder)

    def _descriptor(self, names: list[str], make: bool) -> int:
        if not self._open:
            # the base is the user's own word: followed
            self._open.append(("", os.open(self._base, _FOLDER_FLAGS & ~_LINK)))
            self._check(self._open[0][1])
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

    def _check(self, base: int | str) -> None:
        if self._expected not in (None, identity(os.stat(base))):
            self.close()
            raise ReplacedError(self._base)

    def _checked(self, names: list[str], make: bool) -> str:
        path = self._base
        self._check(path)
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


class ListedFiles:
    """Opens listed files for reading. Their folders may belong to other users, who can put links in the way after the listing.

    A file may take another one's name in its folder, as editors do when they save: it is what a listing would find now.
    """

    def __init__(self) -> None:
        self._root: Root | None = None
        self._folders = Folders("")

    def open(self, place: FilePlace) -> int:
        """A descriptor.

        Raises:
            ReplacedError: it is no regular file now, its root is another folder, or a link is on the way there.
        """
        if place.root != self._root:
            self.close()
            self._root, self._folders = place.root, Folders(*place.root)
        try:
            descriptor = self._folders.open(place.below, os.O_RDONLY)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise ReplacedError(place.path) from None
            raise
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise ReplacedError(place.path)

    def close(self) -> None:
        """Close the folders that are open; twice is safe."""
        self._folders.close()


def beside(name: str, mark: str = "") -> str:
    """A name for what is not whole yet, in the same folder; `mark` stands in it."""
    return os.path.join(os.path.dirname(name), f"{OWN_PREFIX}{mark}{secrets.token_hex(8)}.part")


def rename(folder: int | None, old: str, new: str) -> None:
    """Put what is whole in its place."""
    os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
