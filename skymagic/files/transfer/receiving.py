"""Messages as files: what is there is compared first; what comes is written beside it, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.files.transfer.entries import FILE, FOLDER, LINK, OWN_PREFIX, Entry, Top, unsafe
from skymagic.files.transfer.listing import error_text
from skymagic.wire.boot import boot_id
from skymagic.wire.files import FileFailed, FileMessage, FileStart
from skymagic.wire.transport import write_all

MIRROR_RECORD = f"{OWN_PREFIX}sync"
"""The file with what the last sync brought into a folder: only that may a later one remove."""
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Difference:
    """What must be done, by numbers of entries.

    Attributes:
        want: files to be sent.
        ask: files of the same size and another time: their hashes tell.
        problems: why it cannot be done.
    """

    want: list[int] = field(default_factory=list)
    ask: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Receiver:
    """Brings entries into a base folder.

    Args:
        base: in full; made when it is not there.
        entries: what is to be there.
        mirror: whether what an earlier mirroring brought, and is no more wanted, goes.
    """

    def __init__(self, base: str, entries: Sequence[Entry], *, mirror: bool = False) -> None:
        self._base, self._entries, self._mirror = base, list(entries), mirror
        self.problems: list[str] = unsafe(self._entries)
        """What went wrong so far, a sentence each."""
        self.disk_full = False
        """Whether the disk is full: nothing more can be written."""
        self.files = self.removed = 0
        self._temporary = ""
        self._descriptor = -1
        self._current: tuple[int, int] = (-1, 0)
        self._created: list[Entry] = []
        self._want: frozenset[int] = frozenset()

    def path(self, entry: Entry) -> str:
        """Where an entry goes."""
        return os.path.join(self._base, *entry.path.split("/"))

    # -- before ------------------------------------------------------------------------------------------------------

    def compare(self, origin: str, tops: Sequence[Top], *, contents: bool) -> Difference:
        """What differs here; `origin`, a machine, and `tops` there say where it all comes from."""
        found = Difference(problems=list(self.problems))
        if found.problems:
            return found
        if origin == boot_id():
            found.problems += self._onto_itself(tops, contents)
        if os.path.lexists(self._base) and not os.path.isdir(self._base):
            found.problems.append(f"{self._base} is a file, and no folder")
        if found.problems:
            return found
        sizes = {}
        for number, entry in enumerate(self._entries):
            try:
                sizes[number] = self._compare_entry(number, entry, found)
            except OSError as problem:
                found.problems.append(error_text(self.path(entry), problem))
        found.problems += self._unwritable(found) or self._no_room(found, sizes)
        return found

    def _onto_itself(self, tops: Sequence[Top], contents: bool) -> list[str]:
        goals = {self._base} if contents else {self.path(each) for each in self._entries if "/" not in each.path}
        for top, goal in itertools.product(tops, sorted(goals)):
            with contextlib.suppress(OSError):
                state = os.stat(goal)
                if (state.st_dev, state.st_ino) == (top.device, top.number):
                    return [f"{top.real} is there already: it would be copied onto itself"]
            if top.kind == FOLDER and os.path.realpath(goal).startswith(os.path.join(top.real, "")):
                return [f"{top.real} would be copied into itself, to {goal}"]
        return []

    def _compare_entry(self, number: int, entry: Entry, found: Difference) -> int:
        """Note what must be done for one entry; returns the bytes that are there now."""
        path = self.path(entry)
        try:
            state = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            if entry.kind == FILE:
                found.want.append(number)
            return 0
        is_folder = os.path.isdir(path)
        if entry.kind == FOLDER and not is_folder:
            found.problems.append(f"{path} is a file here, and a folder is to come")
        elif entry.kind != FOLDER and is_folder and not stat.S_ISLNK(state.st_mode):
            found.problems.append(f"{path} is a folder here, and a {entry.kind} is to come")
        elif entry.kind == FILE:
            regular = stat.S_ISREG(state.st_mode)
            if not regular or state.st_size != entry.size:
                found.want.append(number)
            elif state.st_mtime_ns != entry.mtime:
                found.ask.append(number)
            return state.st_size if regular else 0
        return 0

    def _unwritable(self, found: Difference) -> list[str]:
        """Folders in which something is to be written and may not."""
        missing = [entry for entry in self._entries if entry.kind != FILE and not os.path.lexists(self.path(entry))]
        touched = [*(self._entries[number] for number in (*found.want, *found.ask)), *missing]
        folders = {_nearest_existing(os.path.dirname(self.path(entry))) for entry in touched}
        if not self._entries:
            folders.add(_nearest_existing(self._base))
        return [
            f"{path}: no permission to write there"
            for path in sorted(folders)
            if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK)
        ]

    def _no_room(self, found: Difference, sizes: dict[int, int]) -> list[str]:
        """A file lies beside the old one until it is whole."""
        old = [sizes.get(number, 0) for number in found.want]
        need = sum(self._entries[number].size for number in found.want) - sum(old) + max(old, default=0)
        folder = _nearest_existing(self._base)
        free = shutil.disk_usage(folder).free
        if need <= free:
            return []
        from skymagic.plan.units import size  # when it is needed: a node's end starts for each copy

        return [f"{folder}: no room: {size(need)} more are needed, {size(free)} are free"]

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, want: Collection[int]) -> None:
        """Make the folders; each can be written into until the end. No other files than `want` are taken."""
        self._want = frozenset(want)
        for entry in [Entry("", FOLDER), *(entry for entry in self._entries if entry.kind == FOLDER)]:
            path = self.path(entry) if entry.path else self._base
            try:
                if not os.path.isdir(path):
                    os.makedirs(path)
                    self._created.append(entry)
            except OSError as problem:
                self._note_error(path, problem)

    def take(self, message: FileMessage, view: bytes | memoryview) -> None:
        """Take a message of a file, and its payload; what goes wrong is noted, and the rest of that file ignored.

        Raises:
            ValueError: a file that nobody wanted.
        """
        if isinstance(message, FileFailed):
            self.abort()
            self.problems.append(str(message.reason))
            return
        path = ""
        try:
            if isinstance(message, FileStart):
                self._open(message.number, message.mtime)
            if self._descriptor < 0:
                return
            path = self.path(self._entries[self._current[0]])
            write_all(self._descriptor, view)
            if message.last:
                self._finish(path)
        except OSError as problem:
            self.abort()
            self._note_error(path or self.path(self._entries[self._current[0]]), problem)

    def _open(self, number: int, mtime: int) -> None:
        if number not in self._want:
            raise ValueError("a file that nobody asked for")
        self._current = (number, mtime)
        if self.disk_full:
            return
        folder = os.path.dirname(self.path(self._entries[number]))
        os.makedirs(folder, exist_ok=True)
        self._temporary = os.path.join(folder, f"{OWN_PREFIX}{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self._temporary, flags, 0o600)

    def _finish(self, path: str) -> None:
        number, mtime = self._current
        os.close(self._descriptor)
        self._descriptor = -1
        _touch(self._temporary, replace(self._entries[number], mtime=mtime))
        os.replace(self._temporary, path)
        self._temporary = ""
        self.files += 1

    def abort(self) -> None:
        """Leave no half file; twice is safe."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def _note_error(self, path: str, problem: OSError) -> None:
        if problem.errno in DISK_FULL_ERRNOS:
            if not self.disk_full:
                self.problems.append(f"{path}: the disk is full")
            self.disk_full = True
        else:
            self.problems.append(error_text(path, problem))

    # -- after -------------------------------------------------------------------------------------------------------

    def end(self, equal: Sequence[int]) -> None:
        """Make links, give files that were found `equal` their times, and folders their modes; then remove what is to go."""
        jobs: list[tuple[Entry, Callable[[str, Entry], None]]] = [
            *((self._entries[number], _touch) for number in equal),
            *((entry, _link) for entry in self._entries if entry.kind == LINK),
            *((entry, _mode) for entry in reversed(self._created) if entry.path),
        ]
        for entry, job in jobs:
            try:
                job(self.path(entry), entry)
            except OSError as problem:
                self._note_error(self.path(entry), problem)
        if self._mirror and not self.problems:
            try:
                self._remove_old()
                self._write_record()
            except OSError as problem:
                self._note_error(os.path.join(self._base, MIRROR_RECORD), problem)

    def _remove_old(self) -> None:
        """Remove what the record names and nobody has changed since, and folders that are empty then."""
        wanted = {entry.path for entry in self._entries}
        old = [entry for entry in self._record() if entry.path not in wanted]
        for entry in sorted(old, key=lambda one: one.path, reverse=True):
            path = self.path(entry)
            with contextlib.suppress(OSError):
                state = os.lstat(path)
                if entry.kind == FOLDER:
                    os.rmdir(path)
                elif entry.kind == LINK or (state.st_size, state.st_mtime_ns) == (entry.size, entry.mtime):
                    os.unlink(path)
                    self.removed += 1

    def _record(self) -> list[Entry]:
        try:
            with open(os.path.join(self._base, MIRROR_RECORD), encoding="utf-8") as file:
                entries = [Entry(*plain) for plain in json.load(file)]
        except (OSError, ValueError, TypeError):
            return []
        return [] if unsafe(entries) else entries

    def _write_record(self) -> None:
        entries: list[list[Any]] = []
        for entry in self._entries:
            state = os.lstat(self.path(entry))
            entries.append(Entry(entry.path, entry.kind, state.st_size, state.st_mtime_ns, target=entry.target).plain())
        temporary = os.path.join(self._base, f"{OWN_PREFIX}{secrets.token_hex(8)}.part")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(entries, file)
        os.replace(temporary, os.path.join(self._base, MIRROR_RECORD))


def _touch(path: str, entry: Entry) -> None:
    _mode(path, entry)
    os.utime(path, ns=(entry.mtime, entry.mtime))


def _mode(path: str, entry: Entry) -> None:
    if entry.mode is not None:
        os.chmod(path, entry.mode & 0o777)


def _link(path: str, entry: Entry) -> None:
    if os.path.islink(path) and os.readlink(path) == entry.target:
        return
    temporary = os.path.join(os.path.dirname(path), f"{OWN_PREFIX}{secrets.token_hex(8)}.part")
    os.symlink(entry.target, temporary)
    os.replace(temporary, path)


def _nearest_existing(path: str) -> str:
    """The folder itself, or the nearest above it that is there."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
