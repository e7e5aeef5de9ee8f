"""Receiver of files: data is written to temporary files, which are renamed when they are whole.

A mirrored folder is cleaned up afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from skymagic.content.transfer.comparing import FolderComparison, os_error_text
from skymagic.content.transfer.folders import (
    NEW_FILE,
    NOFOLLOW,
    OWN_PREFIX,
    Folders,
    identity,
    new_name,
    rename,
)
from skymagic.content.transfer.listing import FOLDER, LINK, Entry, refuse_unsafe
from skymagic.content.transfer.pieces import LARGE, PresentPieces, lock, part_name
from skymagic.wire.codec import write_all
from skymagic.wire.files import FileFailed, FilePart, FilePiece, FileStart

MAX_GROWTH = 64 << 20
"""Growth in bytes to accept, besides doubling, between a file's listing and its copy: logs grow."""
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class PartFile:
    """A file being received: it has a temporary name until it is whole, and a lock that keeps other
    copies away.

    The part that a lost connection or a killed process left is overwritten, and correct pieces in
    it are reused.

    Args:
        folders: those below the base; used for no other file meanwhile.
        entry: the file's entry.
        nbytes: most bytes to accept.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folders: Folders, entry: Entry, nbytes: int) -> None:
        self._entry, self._rest = entry, nbytes
        self._folder, self._goal = folders.parent(entry.path, make=True)
        # before the lock is taken
        present = PresentPieces(folders, entry.path) if entry.size >= LARGE else None
        self._name = part_name(entry.path)
        self._descriptor = self._open_or_resume()
        if self._descriptor < 0:
            self._name = new_name()
            self._descriptor = os.open(self._name, NEW_FILE, 0o600, dir_fd=self._folder)
        self._present = present

    def _open_or_resume(self) -> int:
        """Open the part left of the file, or a new one.

        Return -1 if another process writes or owns it.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(
                self._name, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o600, dir_fd=self._folder
            )
            state = os.fstat(descriptor)
            own = (
                stat.S_ISREG(state.st_mode) and state.st_nlink == 1 and state.st_uid == os.geteuid()
            )
            # Race: the previous holder of the lock may have given the file its final name
            # meanwhile.
            if own and lock(descriptor, fcntl.LOCK_EX) and self._is_called(state):
                return descriptor
            os.close(descriptor)
        return -1

    def _is_called(self, state: os.stat_result) -> bool:
        with contextlib.suppress(OSError):
            return identity(os.lstat(self._name, dir_fd=self._folder)) == identity(state)
        return False

    def take(self, message: FilePart, view: bytes | memoryview) -> None:
        """Write the next bytes, or a piece that is already present.

        Raises:
            OSError: it cannot be written, or a piece has changed.
            ValueError: more bytes than were announced, or a piece that does not exist.
        """
        data = view
        if isinstance(message, FilePiece):
            if self._present is None:
                raise ValueError("a piece of a file that has none")
            data = self._present.read(message.number, message.digest)
        self._rest -= len(data)
        if self._rest < 0:
            raise ValueError("more bytes of a file than were announced")
        if isinstance(message, FilePiece) and self._is_at(message.number):
            os.lseek(self._descriptor, len(data), os.SEEK_CUR)
        else:
            write_all(self._descriptor, data)

    def _is_at(self, number: int) -> bool:
        """Return True if a piece is at its final offset in the file that is overwritten."""
        assert self._present is not None
        return self._present.is_at(number, self._name, self._position())

    def _position(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def finish(self, mtime: int, modes: int) -> None:
        """Complete the file: set its time, its mode as masked by `modes`, and its name."""
        os.ftruncate(self._descriptor, self._position())
        _touch(self._descriptor, replace(self._entry, mtime=mtime), modes)
        rename(self._folder, self._name, self._goal)
        self._name = ""
        self.close()

    def close(self, *, keep: bool = False) -> None:
        """Remove the file unless it is whole. Safe to call twice.

        Args:
            keep: keep the part of a large file, so that the next copy resumes.
        """
        if self._descriptor >= 0:
            if self._name and not (keep and os.fstat(self._descriptor).st_size >= LARGE):
                with contextlib.suppress(OSError):
                    os.unlink(self._name, dir_fd=self._folder)
            os.close(self._descriptor)
            self._descriptor = -1
        if self._present is not None:
            self._present.close()


class Receiver:
    """Receiver of entries into a base folder.

    Args:
        base: absolute path chosen by the user; created if missing, and followed if it is a link.
            Links below it are never followed.
        entries: the entries that are to be in the folder.
        mirror: remove what an earlier mirroring wrote, and is no longer in `entries`.
    """

    def __init__(self, base: str, entries: Sequence[Entry], *, mirror: bool = False) -> None:
        self.comparison = FolderComparison(base, entries)  # differences from the folder
        self._base, self._entries, self._mirror = base, self.comparison.entries, mirror
        self.problems = list(self.comparison.unsafe)  # problems so far, a sentence each
        self.disk_full = False  # True if the disk is full: nothing more can be written
        self.files = self.removed = self.nbytes = 0
        self._folders = Folders(base)
        self._part: PartFile | None = None  # the file being written
        self._current = FileStart(-1, 0, 0, True, 0)  # its announcement
        self._created: list[Entry] = []
        self._to_write: frozenset[int] = frozenset()
        self._modes = 0o777 & ~_umask()

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, to_write: Collection[int]) -> None:
        """Create the folders, which stay writable until the end.

        Only files in `to_write` are accepted.
        """
        self._to_write = frozenset(to_write)
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
        """Create a folder; return True if it did not exist."""
        try:
            self._folders.enter(path)
        except FileNotFoundError:
            folder, name = self._folders.parent(path, make=True)
            os.mkdir(name, dir_fd=folder)
            return True
        return False

    def take(self, message: FilePart, view: bytes | memoryview) -> None:
        """Handle a message of a file with its payload.

        Problems are recorded, and the rest of that file is ignored.

        Raises:
            ValueError: a file that was not requested, or more bytes of it than were announced.
        """
        if isinstance(message, FileFailed):
            self._discard()
            self.problems.append(str(message.reason))
            return
        try:
            if isinstance(message, FileStart):
                self._discard()
                self._begin_file(message)
            if self._part is None:
                return
            self.nbytes += len(view)
            self._part.take(message, view)
            if message.last:
                self._part.finish(self._current.mtime, self._modes)
                self.files += 1
                self._part = None
        except OSError as problem:
            self._discard()
            self._note_error(self.comparison.path(self._entries[self._current.number]), problem)

    def _begin_file(self, message: FileStart) -> None:
        if message.number not in self._to_write:
            raise ValueError("a file that was not requested")
        self._current, entry = message, self._entries[message.number]
        if message.size > MAX_GROWTH + 2 * entry.size:
            raise OSError(
                f"it grew from {entry.size:,} to {message.size:,} bytes since it was listed: "
                "copy it again"
            )
        if not self.disk_full:
            self._part = PartFile(self._folders, entry, message.size)

    def abort(self, *, keep: bool = False) -> None:
        """Remove partial files and close everything. Safe to call twice.

        Args:
            keep: keep the part of a large file, so that the next copy resumes.
        """
        self._discard(keep=keep)
        self._folders.close()

    def _discard(self, *, keep: bool = False) -> None:
        if self._part is not None:
            self._part.close(keep=keep)
            self._part = None

    def _note_error(self, path: str, problem: OSError) -> None:
        if problem.errno in DISK_FULL_ERRNOS:
            if not self.disk_full:
                self.problems.append(f"{path}: the disk is full")
            self.disk_full = True
        # Every entry below a link has the same problem, which is reported once.
        elif (message := os_error_text(path, problem)) not in self.problems[-1:]:
            self.problems.append(message)

    # -- after -------------------------------------------------------------------------------------

    def end(self, same_content: Sequence[int]) -> None:
        """Finish: create links, set times and modes, and remove old files.

        Args:
            same_content: files whose content is the same already, and whose times are to be set.
        """
        self._discard()
        jobs: list[tuple[Entry, Callable[[Entry], None]]] = [
            *((self._entries[number], self._touch_here) for number in same_content),
            *((entry, self._link) for entry in self._entries if entry.kind == LINK),
            *((entry, self._folder_mode) for entry in reversed(self._created)),
        ]
        for entry, job in jobs:
            try:
                job(entry)
            except OSError as problem:
                self._note_error(self.comparison.path(entry), problem)
        if self._mirror and not self.problems:
            try:
                self.removed += remove_old(self._folders, self._entries)
                write_record(self._folders, self._entries)
            except OSError as problem:
                self._note_error(os.path.join(self._base, RECORD), problem)
        self._folders.close()

    def _touch_here(self, entry: Entry) -> None:
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
        temporary = new_name()
        os.symlink(entry.target, temporary, dir_fd=folder)
        rename(folder, temporary, name)

    def _folder_mode(self, entry: Entry) -> None:
        if entry.mode is not None:
            folder, name = self._folders.enter(entry.path)
            os.chmod(name, entry.mode & self._modes, dir_fd=folder)


def _umask() -> int:
    """Return this process's umask.

    Without ``/proc`` it has to be changed to be read, which races with other threads.
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    os.umask(mask := os.umask(0o077))
    return mask


def _touch(descriptor: int, entry: Entry, modes: int) -> None:
    """Set a file's time, and its mode as masked by `modes`."""
    if entry.mode is not None:
        os.chmod(descriptor, entry.mode & modes)
    os.utime(descriptor, ns=(entry.mtime, entry.mtime))


# -- the record of a mirrored folder ---------------------------------------------------------------


RECORD = f"{OWN_PREFIX}sync"


def remove_old(folders: Folders, entries: Sequence[Entry]) -> int:
    """Remove recorded files that are no longer wanted and unchanged since, then empty folders;
    return the number of files.
    """
    wanted_paths = {entry.path for entry in entries}
    old = [entry for entry in _record(folders) if entry.path not in wanted_paths]
    return sum(
        _remove(folders, entry) for entry in sorted(old, key=lambda entry: entry.path, reverse=True)
    )


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
    return [] if refuse_unsafe(entries) else entries


def write_record(folders: Folders, entries: Sequence[Entry]) -> None:
    """Record the current files."""
    noted: list[list[Any]] = []
    for entry in entries:
        folder, name = folders.parent(entry.path)
        state = os.lstat(name, dir_fd=folder)
        noted.append(
            Entry(
                entry.path, entry.kind, state.st_size, state.st_mtime_ns, target=entry.target
            ).plain()
        )
    folder, name = folders.parent(RECORD)
    temporary = new_name()
    with open(os.open(temporary, NEW_FILE, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
        json.dump(noted, file)
    rename(folder, temporary, name)
