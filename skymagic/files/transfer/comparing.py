"""A folder beside a list of entries: what must be sent, what is there already, and why it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import closing

from skymagic.files.transfer.folders import Folders, LinkInTheWay
from skymagic.files.transfer.listing import FILE, FOLDER, Entry, Top, error_text, unsafe
from skymagic.files.transfer.pieces import LARGE, PresentPieces
from skymagic.wire.files import CompareReply
from skymagic.wire.processes import boot_id


class FolderComparison:
    """Compares entries with what is in a folder now.

    Args:
        base: in full, and the user's own word: followed where it is a link. Below it no link is.
        entries: what is to be there.
    """

    def __init__(self, base: str, entries: Sequence[Entry]) -> None:
        self.base, self.entries = base, list(entries)
        self.unsafe = unsafe(
            self.entries
        )  # A sentence for each entry that would leave the base folder
        self._folders = Folders(base)

    def path(self, entry: Entry) -> str:
        """Where an entry goes, to be shown; what is written is found by `Folders`."""
        return os.path.join(self.base, *entry.path.split("/"))

    def compare(
        self,
        origin: str,
        tops: Sequence[Top],
        stopped: Callable[[], bool] = lambda: False,
        *,
        contents: bool,
    ) -> CompareReply:
        """What differs here; `origin`, a machine, and `tops` there say where it all comes from."""
        found = CompareReply([], [], [], list(self.unsafe))
        if found.problems:
            return found
        if origin == boot_id():
            found.problems.extend(self._onto_itself(tops, contents))
        if os.path.lexists(self.base) and not os.path.isdir(self.base):
            found.problems.append(f"{self.base} is a file, and no folder")
        if found.problems:
            return found
        sizes = {}
        for number, entry in enumerate(self.entries):
            try:
                sizes[number] = self._compare_entry(number, entry, found)
            except OSError as problem:
                found.problems.append(os_error_text(self.path(entry), problem))
        found.problems[:] = [*dict.fromkeys(found.problems), *self._unwritable(found)]
        left = 0 if found.problems else self._look_for_pieces(found, stopped)
        self._folders.close()
        found.problems.extend(self._no_room(found, sizes, left))
        return found

    def _look_for_pieces(self, found: CompareReply, stopped: Callable[[], bool]) -> int:
        """Note what is there of files; returns the bytes that cut connections have left of those to be sent."""
        left = 0
        large = [number for number in found.want if self.entries[number].size >= LARGE]
        for numbers in (found.ask, large):
            for number in numbers:
                text = ""
                with closing(PresentPieces(self._folders, self.entries[number].path)) as here:
                    left += here.left if numbers is large else 0
                    with contextlib.suppress(OSError):
                        text = here.digests(stopped)
                found.there.append((number, text))
        return left

    def _onto_itself(self, tops: Sequence[Top], contents: bool) -> list[str]:
        goals = (
            {self.base}
            if contents
            else {self.path(each) for each in self.entries if "/" not in each.path}
        )
        for top, goal in itertools.product(tops, sorted(goals)):
            with contextlib.suppress(OSError):
                state = os.stat(goal)
                if (state.st_dev, state.st_ino) == (top.device, top.number):
                    return [f"{top.real} is there already: it would be copied onto itself"]
            if top.kind == FOLDER and os.path.realpath(goal).startswith(os.path.join(top.real, "")):
                return [f"{top.real} would be copied into itself, to {goal}"]
        return []

    def _compare_entry(self, number: int, entry: Entry, found: CompareReply) -> int:
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
            found.problems.append(f"{path} is a file here, but a folder would be copied there")
        elif entry.kind != FOLDER and is_folder:
            found.problems.append(
                f"{path} is a folder here, but a {entry.kind} would be copied there"
            )
        elif entry.kind == FILE:
            regular = stat.S_ISREG(state.st_mode)
            if not regular or state.st_size != entry.size:
                found.want.append(number)
            elif state.st_mtime_ns != entry.mtime:
                found.ask.append(number)
            return state.st_size if regular else 0
        return 0

    def _unwritable(self, found: CompareReply) -> list[str]:
        """Folders in which something is to be written and may not."""
        missing = [
            entry
            for entry in self.entries
            if entry.kind != FILE and not os.path.lexists(self.path(entry))
        ]
        touched = [*(self.entries[number] for number in (*found.want, *found.ask)), *missing]
        folders = {_nearest_existing(os.path.dirname(self.path(entry))) for entry in touched}
        if not self.entries:
            folders.add(_nearest_existing(self.base))
        return [
            f"{path}: no permission to write there"
            for path in sorted(folders)
            if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK)
        ]

    def _no_room(self, found: CompareReply, sizes: dict[int, int], left: int) -> list[str]:
        """A file lies beside the old one until it is whole; over what was `left` of it."""
        old = [sizes.get(number, 0) for number in found.want]
        need = (
            sum(self.entries[number].size for number in found.want)
            - sum(old)
            + max(old, default=0)
            - left
        )
        folder = _nearest_existing(self.base)
        free = shutil.disk_usage(folder).free
        if need <= free:
            return []
        from skymagic.plan.units import size  # when it is needed: a node's end starts for each copy

        return [f"{folder}: no room: {size(need)} more are needed, {size(free)} are free"]


def os_error_text(path: str, problem: OSError) -> str:
    """An OSError in words, with the link where one is in the way."""
    if isinstance(problem, LinkInTheWay):
        return str(problem)
    return f"{path}: it is a link" if problem.errno == errno.ELOOP else error_text(path, problem)


def _nearest_existing(path: str) -> str:
    """The folder itself, or the nearest above it that is there."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
