"""Comparison of a folder with a list of entries: missing files, conflicts, and lack of room."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import closing

from skymagic.content.transfer.folders import Folders, LinkInTheWay
from skymagic.content.transfer.listing import FILE, FOLDER, Entry, error_text, refuse_unsafe
from skymagic.content.transfer.pieces import LARGE, PresentPieces
from skymagic.wire.files import CompareReply, Top
from skymagic.wire.processes import boot_id


class FolderComparison:
    """Comparison of entries with the current contents of a folder.

    Args:
        base: absolute path chosen by the user; followed if it is a link. Links below it are never
            followed.
        entries: the entries that are to be in the folder.
    """

    def __init__(self, base: str, entries: Sequence[Entry]) -> None:
        self.base, self.entries = base, list(entries)
        self.unsafe = refuse_unsafe(
            self.entries
        )  # A sentence for each entry that would leave the base folder
        self._folders = Folders(base)

    def path(self, entry: Entry) -> str:
        """Return the path of an entry, for display; `Folders` opens the files to write."""
        return os.path.join(self.base, *entry.path.split("/"))

    def compare(
        self,
        origin: str,
        tops: Sequence[Top],
        stopped: Callable[[], bool] = lambda: False,
        *,
        contents: bool,
    ) -> CompareReply:
        """Return the differences here.

        `origin`, a machine, and `tops` on it identify the source.
        """
        reply = CompareReply([], [], [], list(self.unsafe))
        if reply.problems:
            return reply
        if origin == boot_id():
            reply.problems.extend(self._refuse_copy_onto_itself(tops, contents))
        if os.path.lexists(self.base) and not os.path.isdir(self.base):
            reply.problems.append(f"{self.base} is a file, and no folder")
        if reply.problems:
            return reply
        sizes = {}
        for number, entry in enumerate(self.entries):
            try:
                sizes[number] = self._compare_entry(number, entry, reply)
            except OSError as problem:
                reply.problems.append(os_error_text(self.path(entry), problem))
        reply.problems[:] = [*dict.fromkeys(reply.problems), *self._unwritable(reply)]
        resumable = 0 if reply.problems else self._look_for_pieces(reply, stopped)
        self._folders.close()
        reply.problems.extend(self._space_problem(reply, sizes, resumable))
        return reply

    def _look_for_pieces(self, reply: CompareReply, stopped: Callable[[], bool]) -> int:
        """Record the pieces present of files.

        Return the bytes of files to send that lost connections left behind.
        """
        resumable = 0
        large = [number for number in reply.to_send if self.entries[number].size >= LARGE]
        for numbers in (reply.ask, large):
            for number in numbers:
                text = ""
                with closing(PresentPieces(self._folders, self.entries[number].path)) as present:
                    resumable += present.left if numbers is large else 0
                    with contextlib.suppress(OSError):
                        text = present.digests(stopped)
                reply.present.append((number, text))
        return resumable

    def _refuse_copy_onto_itself(self, tops: Sequence[Top], contents: bool) -> list[str]:
        goals = (
            {self.base}
            if contents
            else {self.path(entry) for entry in self.entries if "/" not in entry.path}
        )
        for top, goal in itertools.product(tops, sorted(goals)):
            with contextlib.suppress(OSError):
                state = os.stat(goal)
                if (state.st_dev, state.st_ino) == (top.device, top.number):
                    return [f"{top.real} is there already: it would be copied onto itself"]
            if top.kind == FOLDER and os.path.realpath(goal).startswith(os.path.join(top.real, "")):
                return [f"{top.real} would be copied into itself, to {goal}"]
        return []

    def _compare_entry(self, number: int, entry: Entry, reply: CompareReply) -> int:
        """Record the action for one entry; return the bytes present now."""
        path = self.path(entry)
        try:
            folder, name = self._folders.parent(entry.path)
            state = os.lstat(name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            if entry.kind == FILE:
                reply.to_send.append(number)
            return 0
        is_folder = stat.S_ISDIR(state.st_mode)
        if entry.kind == FOLDER and stat.S_ISLNK(state.st_mode):
            raise LinkInTheWay(path)
        if entry.kind == FOLDER and not is_folder:
            reply.problems.append(f"{path} is a file here, but a folder would be copied there")
        elif entry.kind != FOLDER and is_folder:
            reply.problems.append(
                f"{path} is a folder here, but a {entry.kind} would be copied there"
            )
        elif entry.kind == FILE:
            regular = stat.S_ISREG(state.st_mode)
            if not regular or state.st_size != entry.size:
                reply.to_send.append(number)
            elif state.st_mtime_ns != entry.mtime:
                reply.ask.append(number)
            return state.st_size if regular else 0
        return 0

    def _unwritable(self, reply: CompareReply) -> list[str]:
        """Return messages for folders that are not writable but have to be written to."""
        missing = [
            entry
            for entry in self.entries
            if entry.kind != FILE and not os.path.lexists(self.path(entry))
        ]
        touched = [*(self.entries[number] for number in (*reply.to_send, *reply.ask)), *missing]
        folders = {_nearest_existing(os.path.dirname(self.path(entry))) for entry in touched}
        if not self.entries:
            folders.add(_nearest_existing(self.base))
        return [
            f"{path}: no permission to write there"
            for path in sorted(folders)
            if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK)
        ]

    def _space_problem(
        self, reply: CompareReply, sizes: dict[int, int], free_bytes: int
    ) -> list[str]:
        """Return a message if there is not enough room, else nothing.

        A new file is kept next to the old one until it is whole.
        """
        old = [sizes.get(number, 0) for number in reply.to_send]
        need = (
            sum(self.entries[number].size for number in reply.to_send)
            - sum(old)
            + max(old, default=0)
            - free_bytes
        )
        folder = _nearest_existing(self.base)
        free = shutil.disk_usage(folder).free
        if need <= free:
            return []
        # imported only if needed: a node's end starts for each copy
        from skymagic.plan.units import size

        return [f"{folder}: no room: {size(need)} more are needed, {size(free)} are free"]


def os_error_text(path: str, problem: OSError) -> str:
    """Return the message of an OSError, and name the link that caused it, if any."""
    if isinstance(problem, LinkInTheWay):
        return str(problem)
    return f"{path}: it is a link" if problem.errno == errno.ELOOP else error_text(path, problem)


def _nearest_existing(path: str) -> str:
    """Return a folder, or the nearest existing one above it."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
