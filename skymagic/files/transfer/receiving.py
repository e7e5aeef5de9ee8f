"""Messages as files: what comes is written beside what is there, and renamed when it is whole; then a mirrored folder is tidied."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from skymagic.files.transfer.comparing import FolderComparison, os_error_text
from skymagic.files.transfer.folders import (
    BY_DESCRIPTOR,
    NEW_FILE,
    OWN_PREFIX,
    WRITTEN_OVER,
    Folders,
    beside,
    rename,
)
from skymagic.files.transfer.listing import FOLDER, LINK, Entry, unsafe
from skymagic.files.transfer.pieces import LARGE, LEFT, PresentPieces, half_mark, halves, remove_left
from skymagic.wire.codec import write_all
from skymagic.wire.files import FileFailed, FilePart, FilePiece, FileStart

MAX_GROWTH = 64 << 20
"""Bytes by which a file may grow, beside becoming twice as long, between its listing and its copy: logs do."""
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class Receiver:
    """Brings entries into a base folder.

    Args:
        base: in full, and the user's own word: made when it is not there, and followed where it is a link. Below it no link is.
        entries: what is to be there.
        mirror: whether what an earlier mirroring brought, and is no more wanted, goes.
    """

    def __init__(self, base: str, entries: Sequence[Entry], *, mirror: bool = False) -> None:
        self.comparison = FolderComparison(base, entries)
        """What differs there."""
        self._base, self._entries, self._mirror = base, self.comparison.entries, mirror
        self.problems = list(self.comparison.unsafe)
        """What went wrong so far, a sentence each."""
        self.disk_full = False
        """Whether the disk is full: nothing more can be written."""
        self.files = self.removed = self.nbytes = 0
        self._folders = Folders(base)
        self._temporary: tuple[int | None, str] | None = None
        """Folder and name of the file that is written; the folder stays open until it is whole."""
        self._descriptor = -1
        self._present: PresentPieces | None = None
        """The pieces that are there of a large file that is written."""
        self._half = ""
        """What the file was called that is written over."""
        self._current: tuple[int, int] = (-1, 0)
        self._created: list[Entry] = []
        self._want: frozenset[int] = frozenset()
        self._left = 0
        """Bytes that may still come of the file that is written."""
        self._modes = 0o777 & ~_umask()

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, want: Collection[int]) -> None:
        """Make the folders; each can be written into until the end. No other files than `want` are taken."""
        self._want = frozenset(want)
        try:
            os.makedirs(self._base, exist_ok=True)
        except OSError as problem:
            self._note_error(self._base, problem)
        for entry in (entry for entry in self._entries if entry.kind == FOLDER):
            try:
                if self._make_folder(entry.path):
                    self._created.append(entry)
            except OSError as problem:
                self._note_error(self.comparison.path(entry), problem)
        self._folders.close()

    def _make_folder(self, path: str) -> bool:
        """Whether it was not there."""
        try:
            self._folders.enter(path)
        except FileNotFoundError:
            folder, name = self._folders.parent(path, make=True)
            os.mkdir(name, dir_fd=folder)
            return True
        return False

    def take(self, message: FilePart, view: bytes | memoryview) -> None:
        """Take a message of a file, and its payload; what goes wrong is noted, and the rest of that file ignored.

        Raises:
            ValueError: a file that nobody wanted, or more bytes than were announced of it.
        """
        if isinstance(message, FileFailed):
            self._discard()
            self.problems.append(str(message.reason))
            return
        try:
            if isinstance(message, FileStart):
                self._discard()
                self._open(message)
            if self._descriptor < 0:
                return
            self.nbytes += len(view)
            data = self._piece(message) if isinstance(message, FilePiece) else view
            self._left -= len(data)
            if self._left < 0:
                raise ValueError("more bytes of a file than were announced")
            if not self._lies_here(message, len(data)):
                write_all(self._descriptor, data)
            if message.last:
                self._finish()
        except OSError as problem:
            self._discard()
            self._note_error(self.comparison.path(self._entries[self._current[0]]), problem)

    def _open(self, message: FileStart) -> None:
        number = message.number
        if number not in self._want:
            raise ValueError("a file that nobody asked for")
        self._current, self._left = (number, message.mtime), message.size
        if message.size > MAX_GROWTH + 2 * (listed := self._entries[number].size):
            raise OSError(f"it grew from {listed:,} to {message.size:,} bytes since it was listed: copy it again")
        if self.disk_full:
            return
        folder, name = self._folders.parent(self._entries[number].path, make=True)
        mark, left = "", []
        if self._entries[number].size >= LARGE:
            path = self._entries[number].path
            self._present, mark, left = PresentPieces(self._folders, path), half_mark(path), halves(self._folders, path)
        temporary, self._half = beside(name, mark), ""
        for each in left:
            if not self._half and self._go_on(folder, os.path.join(os.path.dirname(name), each), temporary):
                self._half = each
        if not self._half:
            self._descriptor = os.open(temporary, NEW_FILE, 0o600, dir_fd=folder)
        self._temporary = folder, temporary

    def _go_on(self, folder: int | None, half: str, temporary: str) -> bool:
        """Write over what a cut connection has left of this file: what is right in it stays; whether it can be."""
        try:
            state = os.lstat(half, dir_fd=folder)
            if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_uid != os.geteuid():
                return False
            rename(folder, half, temporary)  # nobody else takes it then
            self._descriptor = os.open(temporary, WRITTEN_OVER, dir_fd=folder)
        except OSError:
            return False
        return True

    def _piece(self, message: FilePiece) -> bytes:
        """A piece of the file that this machine has already."""
        if self._present is None:
            raise ValueError("a piece of a file that has none")
        return self._present.read(message.number, message.digest)

    def _lies_here(self, message: FilePart, count: int) -> bool:
        """Whether the file that is written over has this piece at this place; it is passed over then."""
        if not isinstance(message, FilePiece) or self._present is None:
            return False
        place = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if not self._present.lies(message.number, self._half, place):
            return False
        os.lseek(self._descriptor, count, os.SEEK_CUR)
        return True

    def _finish(self) -> None:
        assert self._temporary is not None
        number, mtime = self._current
        entry = replace(self._entries[number], mtime=mtime)
        folder, temporary = self._temporary
        if entry.size >= LARGE:
            os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR))
        if BY_DESCRIPTOR:
            _touch(self._descriptor, entry, self._modes)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        if not BY_DESCRIPTOR:
            _touch(temporary, entry, self._modes)
        rename(folder, temporary, os.path.join(os.path.dirname(temporary), entry.path.rpartition("/")[2]))
        self._temporary = None
        self.files += 1
        self._discard()

    def abort(self, *, keep: bool = False) -> None:
        """Leave no half file, and nothing open; twice is safe.

        Args:
            keep: leave what has come of a large file, for the next copy to resume.
        """
        if (
            keep
            and self._temporary is not None
            and self._descriptor >= 0
            and os.lseek(self._descriptor, 0, os.SEEK_CUR) >= LARGE
        ):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor if BY_DESCRIPTOR else self._temporary[1], (LEFT, LEFT))
                self._temporary = None
        self._discard()
        self._folders.close()

    def _discard(self) -> None:
        if self._present is not None:
            self._present.close()
            self._present = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._temporary is not None:
            folder, name = self._temporary
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            self._temporary = None

    def _note_error(self, path: str, problem: OSError) -> None:
        if problem.errno in DISK_FULL_ERRNOS:
            if not self.disk_full:
                self.problems.append(f"{path}: the disk is full")
            self.disk_full = True
        # all that is below a link says the same
        elif (words := os_error_text(path, problem)) not in self.problems[-1:]:
            self.problems.append(words)

    # -- after -------------------------------------------------------------------------------------------------------

    def end(self, equal: Sequence[int]) -> None:
        """Make links, give files that were found `equal` their times, and folders their modes; then remove what is to go."""
        self._discard()
        jobs: list[tuple[Entry, Callable[[Entry], None]]] = [
            *((self._entries[number], self._touch_here) for number in equal),
            *((entry, self._link) for entry in self._entries if entry.kind == LINK),
            *((entry, self._folder_mode) for entry in reversed(self._created)),
        ]
        for entry, job in jobs:
            try:
                job(entry)
            except OSError as problem:
                self._note_error(self.comparison.path(entry), problem)
        if not self.problems:
            with contextlib.suppress(OSError):  # all that was to come is there
                remove_left(self._folders, self._entries)
        if self._mirror and not self.problems:
            try:
                self.removed += remove_old(self._folders, self._entries)
                write_record(self._folders, self._entries)
            except OSError as problem:
                self._note_error(os.path.join(self._base, RECORD), problem)
        self._folders.close()

    def _touch_here(self, entry: Entry) -> None:
        if not BY_DESCRIPTOR:
            _touch(self._folders.parent(entry.path)[1], entry, self._modes)
            return
        descriptor = self._folders.open(entry.path, os.O_RDONLY)
        try:
            _touch(descriptor, entry, self._modes)
        finally:
            os.close(descriptor)

    def _link(self, entry: Entry) -> None:
        folder, name = self._folders.parent(entry.path, make=True)
        with contextlib.suppress(OSError):
            if os.readlink(name, dir_fd=folder) == entry.target:
                return
        temporary = beside(name)
        os.symlink(entry.target, temporary, dir_fd=folder)
        rename(folder, temporary, name)

    def _folder_mode(self, entry: Entry) -> None:
        if entry.mode is not None:
            folder, name = self._folders.enter(entry.path)
            os.chmod(name, entry.mode & self._modes, dir_fd=folder)


def _umask() -> int:
    """This process's umask; changing it to read it would race with other threads, so that is left to systems without ``/proc``."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    os.umask(mask := os.umask(0o077))
    return mask


def _touch(file: int | str, entry: Entry, modes: int) -> None:
    """A file's time, and its mode as far as `modes` has it; it is given by its descriptor where the system can."""
    if entry.mode is not None:
        os.chmod(file, entry.mode & modes)
    os.utime(file, ns=(entry.mtime, entry.mtime))


# -- the record of a mirrored folder ---------------------------------------------------------------


RECORD = f"{OWN_PREFIX}sync"


def remove_old(folders: Folders, entries: Sequence[Entry]) -> int:
    """Remove what the record names, is not wanted, and nobody has changed since, and folders that are empty then; how many files."""
    wanted = {entry.path for entry in entries}
    old = [entry for entry in _record(folders) if entry.path not in wanted]
    return sum(_remove(folders, entry) for entry in sorted(old, key=lambda one: one.path, reverse=True))


def _remove(folders: Folders, entry: Entry) -> bool:
    with contextlib.suppress(OSError):
        folder, name = folders.parent(entry.path)
        state = os.lstat(name, dir_fd=folder)
        if entry.kind == FOLDER:
            os.rmdir(name, dir_fd=folder)
        elif entry.kind == LINK or (state.st_size, state.st_mtime_ns) == (entry.size, entry.mtime):
            os.unlink(name, dir_fd=folder)
            return True
    return False


def _record(folders: Folders) -> list[Entry]:
    try:
        with open(RECORD, encoding="utf-8", opener=folders.open) as file:
            entries = [Entry(*plain) for plain in json.load(file)]
    except (OSError, ValueError, TypeError):
        return []
    return [] if unsafe(entries) else entries


def write_record(folders: Folders, entries: Sequence[Entry]) -> None:
    """Note what is there now."""
    noted: list[list[Any]] = []
    for entry in entries:
        folder, name = folders.parent(entry.path)
        state = os.lstat(name, dir_fd=folder)
        noted.append(Entry(entry.path, entry.kind, state.st_size, state.st_mtime_ns, target=entry.target).plain())
    folder, name = folders.parent(RECORD)
    temporary = beside(name)
    with open(os.open(temporary, NEW_FILE, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
        json.dump(noted, file)
    rename(folder, temporary, name)
