"""What a copy changes: which files travel, how far they are, and results and errors in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from skymagic.cluster import Node
from skymagic.errors import FilesError
from skymagic.files.transfer.listing import FILE, Entry
from skymagic.files.transfer.pieces import LARGE, equal
from skymagic.plan.units import count, size
from skymagic.wire import files as wire
from skymagic.wire.untrusted import sanitized_line

MAX_SENTENCES = 20
"""Most sentences of an error, and notes, that are shown."""


@dataclass(frozen=True)
class Copied:
    """What changed through one node.

    Attributes:
        node, hostname: which.
        files, nbytes: files that travelled, and the bytes that did: of a large one those that were not there.
        unchanged: files that were there already.
        removed: files of an earlier time that went.
        notes: what stayed behind, and why.
    """

    node: int
    hostname: str
    files: int
    nbytes: int
    unchanged: int
    removed: int = 0
    notes: tuple[str, ...] = ()


def summary(copied: Sequence[Copied], seconds: float, *, to_nodes: bool = True) -> str:
    """What was done, in a line, and in further lines what stayed behind."""
    counts = [(one.files, one.nbytes, one.unchanged, one.removed) for one in copied]
    moved = sum(one.nbytes for one in copied)
    alike = len(set(counts)) == 1
    totals = counts[0] if alike else tuple(sum(each) for each in zip(*counts, strict=True))
    files, nbytes, unchanged, removed = totals
    where = (
        copied[0].hostname
        if len(copied) == 1
        else count(len(copied), "node") + (" each" if alike else "")
    )
    done = f"{count(files, 'file')} ({size(nbytes)}) {'to' if to_nodes else 'from'} {where}"
    if files:
        speed = f", {size(moved / seconds)}/s" if seconds >= 0.5 else ""
        done += f" in {seconds:.1f} s{speed}"
    there = [f"{count(unchanged, 'file')} there already"] if unchanged else []
    gone = [f"{count(removed, 'file')} removed"] if removed else []
    notes = dict.fromkeys(sanitized_line(note) for one in copied for note in one.notes)
    return "\n".join(["; ".join([done, *there, *gone]), *_abridged(list(notes))])


def files_error(title: str, problems: Iterable[tuple[str, str]], nodes: int) -> FilesError:
    """One error for all that went wrong.

    Args:
        title: what became of the whole.
        problems: (where, sentence); the same sentence is told once.
        nodes: how many take part.
    """
    places: dict[str, list[str]] = {}
    for where, sentence in problems:
        places.setdefault(sanitized_line(sentence), []).append(where)
    lines = []
    for sentence, at in places.items():
        label = (
            "every node"
            if nodes > 1 and len(at) == nodes
            else ", ".join(dict.fromkeys(filter(None, at)))
        )
        lines.append(f"{label}: {sentence}" if label else sentence)
    return FilesError(
        "\n".join([f"{title}:", *_abridged(lines)]) if len(lines) > 1 else f"{title}: {lines[0]}"
    )


def _abridged(lines: Sequence[str]) -> list[str]:
    more = [f"… and {len(lines) - MAX_SENTENCES} more"] if len(lines) > MAX_SENTENCES else []
    return [f"  {line}" for line in [*lines[:MAX_SENTENCES], *more]]


# -- which files travel, and how far they are ------------------------------------------------------


Progress = Callable[[str, int, int], None]
"""Called with the path of a file under way, the bytes moved so far, and all bytes to move."""

PARTLY_COPIED = "not all was copied"


class ByteCounter:
    """Progress counter that several threads add to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._name, self._done, self.total = "", 0, 0

    def add(self, name: str, count: int) -> None:
        """Count bytes of this file that have travelled."""
        with self._lock:
            self._name, self._done = name, self._done + count

    def show(self) -> None:
        """Report the progress."""
        if self.total:
            self._progress(sanitized_line(self._name), self._done, self.total)


def changes(difference: wire.CompareReply, known: Mapping[int, str]) -> wire.Write:
    """What one side is to get: files of the same size travel when their digests differ.

    Args:
        difference: what the receiver has found.
        known: by number, the sender's digests of the files to ask for.
    """
    there = dict(difference.there)
    same = [number for number in difference.ask if equal(known[number], there[number])]
    return wire.Write(sorted({*difference.want, *difference.ask} - set(same)), same)


def large_pieces(
    entries: Sequence[Entry], want: Sequence[int], there: Iterable[tuple[int, str]]
) -> dict[int, str]:
    """By number, the pieces that are there of large files that travel; of small ones all is sent."""
    wanted = set(want)
    return {
        number: text
        for number, text in there
        if number in wanted and text and entries[number].size >= LARGE
    }


def copied(
    node: Node,
    entries: Sequence[Entry],
    want: Sequence[int],
    nbytes: int,
    removed: int,
    notes: Sequence[str],
) -> Copied:
    files = sum(entry.kind == FILE for entry in entries)
    return Copied(
        node.index, node.name, len(want), nbytes, files - len(want), removed, tuple(notes)
    )
