"""What a copy changes: which files travel, their count in the end, and how far they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from skymagic.cluster import Node
from skymagic.files.messages import Copied
from skymagic.files.transfer.entries import FILE, Entry
from skymagic.wire import files as wire
from skymagic.wire.codec import printable

Progress = Callable[[str, int, int], None]
"""Called with the path of a file under way, the bytes moved so far, and all bytes to move."""

PARTLY_COPIED = "not all was copied"


class ByteCounter:
    """Progress counter that several threads add to.

    Args:
        progress: called with the state, by `show` only.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._name, self._done, self.total = "", 0, 0

    def add(self, name: str, count: int) -> None:
        """So many bytes more, of this file."""
        with self._lock:
            self._name, self._done = name, self._done + count

    def show(self) -> None:
        """Report the progress."""
        if self.total:
            self._progress(printable(self._name), self._done, self.total)


def changes(want: Sequence[int], asked: Sequence[int], hashes: Sequence[str], known: Mapping[int, str]) -> wire.Write:
    """What one side is to get: files of the same size travel when their hashes differ."""
    theirs = dict(zip(asked, hashes, strict=True))
    equal = [number for number, said in theirs.items() if said and known[number] == said]
    return wire.Write(sorted({*want, *theirs} - set(equal)), equal)


def copied(
    node: Node, entries: Sequence[Entry], want: Sequence[int], nbytes: int, removed: int, notes: Sequence[str]
) -> Copied:
    files = sum(entry.kind == FILE for entry in entries)
    return Copied(node.index, node.name, len(want), nbytes, files - len(want), removed, tuple(notes))
