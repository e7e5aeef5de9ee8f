"""Messages as files: what is there is compared first; what comes is written beside it, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from skymagic.files.transfer import mirror
from skymagic.files.transfer.entries import FILE, FOLDER, LINK, Entry, Top, unsafe
from skymagic.files.transfer.folders import BY_DESCRIPTOR, NEW_FILE, WRITTEN_OVER, Folders, LinkInTheWay, beside, rename
from skymagic.files.transfer.listing import digests, error_text
from skymagic.files.transfer.pieces import LARGE, LEFT, PresentPieces, half_mark, halves, present, remove_left
from skymagic.wire.codec import write_all
from skymagic.wire.files import FileFailed, FilePart, FilePiece, FileStart
from skymagic.wire.processes import boot_id

MAX_GROWTH = 64 << 20
"""Bytes by which a file may grow, beside becoming twice as long, between its listing and its copy: logs do."""
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
        base: in full, and the user's own word: made when it is not there, and followed where it is a link. Below it no link is.
        entries: what is to be there.
        mirror: whether what an earlier mirroring brought, and is no more wanted, goes.
    """

    def __init__(self, base: str, entries: Sequence[Entry], *, mirror: bool = False) -> None:
        self._base, self._entries, self._mirror = base, list(entries), mirror
        self.problems: list[str] = unsafe(self._entries)
        """What went wrong so far, a sentence each."""
        self.disk_full = False
        """Whether the disk is full: nothing more can be written."""
        self.files = self.removed = self.nbytes = 0
        self._folders = Folders(base)
        self._temporary: tuple[int | None, str] | None = None
        """Folder and name of the file that is written; the folder stays open until it is whole."""
        self._descriptor = -1
        self._present: PresentPieces | None = None
        """Of a large file that is written."""
        self._half = ""
        """What the file was called that is written over."""
        self._current: tuple[int, int] = (-1, 0)
        self._created: list[Entry] = []
        self._want: frozenset[int] = frozenset()
        self._left = 0
        """Bytes that may still come of the file that is written."""
        self._modes = 0o777 & ~_umask()

    def path(self, entry: Entry) -> str:
        """Where an entry goes, to be shown; what is written is found by `Folders`."""
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
                found.problems.append(_words(self.path(entry), problem))
        found.problems = list(dict.fromkeys(found.problems))
        self._folders.close()
        found.problems += self._unwritable(found) or self._no_room(found, sizes)
        return found

    def hashes(self, numbers: Iterable[int], stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The xxh3-128 of files that are here now, in hex; "" for one that cannot be read."""
        try:
            paths = (self._entries[number].path for number in numbers)
            yield from digests(paths, partial(self._folders.open, flags=os.O_RDONLY), stopped)
        finally:
            self._folders.close()

    def pieces(self, numbers: Iterable[int], stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """What is here of files that are to come; `pieces.present` says how."""
        return present(self._folders, (self._entries[number] for number in numbers), stopped)

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
            folder, name = self._folders.parent(entry.path)
            state = os.lstat(name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            if entry.kind == FILE:
                found.want.append(number)
            return 0
        is_folder = stat.S_ISDIR(state.st_mode)
        if entry.kind == FOLDER and stat.S_ISLNK(state.st_mode):
            raise LinkInTheWay(path)
        if entry.kind == FOLDER and not is_folder:
            found.problems.append(f"{path} is a file here, and a folder is to come")
        elif entry.kind != FOLDER and is_folder:
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
        need -= sum(self._left_of(self._entries[number]) for number in found.want)
        folder = _nearest_existing(self._base)
        free = shutil.disk_usage(folder).free
        if need <= free:
            return []
        from skymagic.plan.units import size  # when it is needed: a node's end starts for each copy

        return [f"{folder}: no room: {size(need)} more are needed, {size(free)} are free"]

    def _left_of(self, entry: Entry) -> int:
        """Bytes of what a cut connection has left of a file."""
        left = 0
        if entry.size >= LARGE:
            with contextlib.suppress(OSError):
                folder, name = self._folders.parent(entry.path)
                for each in halves(self._folders, entry.path):
                    left += os.lstat(os.path.join(os.path.dirname(name), each), dir_fd=folder).st_size
        self._folders.close()
        return left

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
                self._note_error(self.path(entry), problem)
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
            self._note_error(self.path(self._entries[self._current[0]]), problem)

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
            keep: leave what has come of a large file, for the next copy to go on with.
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
        elif (words := _words(path, problem)) not in self.problems[-1:]:
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
                self._note_error(self.path(entry), problem)
        if not self.problems:
            with contextlib.suppress(OSError):  # all that was to come is there
                remove_left(self._folders, self._entries)
        if self._mirror and not self.problems:
            try:
                self.removed += mirror.remove_old(self._folders, self._entries)
                mirror.write_record(self._folders, self._entries)
            except OSError as problem:
                self._note_error(os.path.join(self._base, mirror.RECORD), problem)
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


def _words(path: str, problem: OSError) -> str:
    """An OSError in words, with the link where one is in the way."""
    if isinstance(problem, LinkInTheWay):
        return str(problem)
    return f"{path}: it is a link" if problem.errno == errno.ELOOP else error_text(path, problem)


def _nearest_existing(path: str) -> str:
    """The folder itself, or the nearest above it that is there."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
