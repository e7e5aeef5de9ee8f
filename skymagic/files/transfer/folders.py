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
NOFOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""For files that are opened: no link, and no waiting for who writes into a pipe."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
_LISTED_FLAGS = os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW
# O_PATH: a folder that may only be passed through can be opened; macOS has no such flag
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | NOFOLLOW
Identity = tuple[int, int]
"""Device and number: the same folder, whatever its path is now."""


class LinkInTheWay(OSError):
    """A link is where a folder is to be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "a link in the way", path)

    def __str__(self) -> str:
        return f"{self.filename} is a link here, but a folder would be copied there: remove it, or copy to its target"


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
def opened(path: str, above: int | None, state: os.stat_result) -> Iterator[int]:
    """A folder that is to be listed, opened.

    Args:
        above: the folder that it is in, which is open; None for a root, to which links may lead.
        state: what was seen there.

    Raises:
        ReplacedError: it is another one by now.
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
    """The folders below `base`; the last one that was used, and those above it, stay open.

    Args:
        base: in full, as the user named it: links on the way to it, and itself, are followed.
        expected: what it must be; None where it may be any folder.
    """

    def __init__(self, base: str, expected: Identity | None = None) -> None:
        self._base, self._expected = base, expected
        self._open: list[
            tuple[str, int]
        ] = []  # names and descriptors from the base down; the base's own name is empty

    def parent(self, path: str, *, make: bool = False) -> tuple[int, str]:
        """Where an entry is: ``dir_fd`` and the name of the functions in `os`; valid until another folder is asked for.

        Args:
            path: below the base, with ``/`` between its parts.
            make: make the folders that are missing.

        Raises:
            LinkInTheWay: one of the folders is a link.
            OSError: one of them is not there, or cannot be entered.
        """
        *names, name = path.split("/")
        if not self._open:
            # the base is the user's own word: followed
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
        """A folder itself, as `parent` gives an entry; errors as there."""
        return self.parent(f"{path}/.")

    def open(self, path: str, flags: int) -> int:
        """Open a file that is there, and is no link; an opener for `open`."""
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


def new_name() -> str:
    """A name that nobody has, for what is not whole yet."""
    return f"{OWN_PREFIX}{secrets.token_hex(8)}.part"


def rename(folder: int, old: str, new: str) -> None:
    """Put what is whole in its place."""
    os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
