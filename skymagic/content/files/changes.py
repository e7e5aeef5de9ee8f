"""The files that a copy transfers, its progress, and the text of its results and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from skymagic.cluster import Node
from skymagic.content.transfer.listing import FILE, Entry
from skymagic.content.transfer.pieces import LARGE, equal
from skymagic.errors import FilesError
from skymagic.plan.units import count, size
from skymagic.wire import files as files_wire
from skymagic.wire.untrusted import sanitized_line

MAX_SENTENCES = 20
"""Maximum number of lines shown of an error, and of notes."""


@dataclass(frozen=True)
class CopyResult:
    """Result of a copy to or from one node.

    Attributes:
        node, hostname: the node.
        files: number of files transferred.
        nbytes: bytes transferred; of a large file only the missing pieces count.
        unchanged: number of files that were already present.
        removed: number of files of an earlier copy that were removed.
        notes: skipped entries, with the reasons.
    """

    node: int
    hostname: str
    files: int
    nbytes: int
    unchanged: int
    removed: int = 0
    notes: tuple[str, ...] = ()


def summary(copied: Sequence[CopyResult], seconds: float, *, to_nodes: bool = True) -> str:
    """Summarize a copy in a line, with further lines for what was skipped."""
    counts = [(result.files, result.nbytes, result.unchanged, result.removed) for result in copied]
    moved = sum(result.nbytes for result in copied)
    alike = len(set(counts)) == 1
    totals = counts[0] if alike else tuple(sum(column) for column in zip(*counts, strict=True))
    files, nbytes, unchanged, removed = totals
    location = (
        copied[0].hostname
        if len(copied) == 1
        else count(len(copied), "node") + (" each" if alike else "")
    )
    done = f"{count(files, 'file')} ({size(nbytes)}) {'to' if to_nodes else 'from'} {location}"
    if files:
        speed = f", {size(moved / seconds)}/s" if seconds >= 0.5 else ""
        done += f" in {seconds:.1f} s{speed}"
    already = [f"{count(unchanged, 'file')} there already"] if unchanged else []
    removals = [f"{count(removed, 'file')} removed"] if removed else []
    notes = dict.fromkeys(sanitized_line(note) for result in copied for note in result.notes)
    return "\n".join(["; ".join([done, *already, *removals]), *_abridged(list(notes))])


def files_error(title: str, problems: Iterable[tuple[str, str]], nodes: int) -> FilesError:
    """Return a single error for all problems.

    Args:
        title: outcome of the whole copy.
        problems: (node, sentence) pairs; a repeated sentence is shown once.
        nodes: number of nodes that take part.
    """
    names_of: dict[str, list[str]] = {}
    for name, sentence in problems:
        names_of.setdefault(sanitized_line(sentence), []).append(name)
    lines = []
    for sentence, names in names_of.items():
        label = (
            "every node"
            if nodes > 1 and len(names) == nodes
            else ", ".join(dict.fromkeys(filter(None, names)))
        )
        lines.append(f"{label}: {sentence}" if label else sentence)
    return FilesError(
        "\n".join([f"{title}:", *_abridged(lines)]) if len(lines) > 1 else f"{title}: {lines[0]}"
    )


def _abridged(lines: Sequence[str]) -> list[str]:
    more = [f"… and {len(lines) - MAX_SENTENCES} more"] if len(lines) > MAX_SENTENCES else []
    return [f"  {line}" for line in [*lines[:MAX_SENTENCES], *more]]


# -- files to transfer, and progress ---------------------------------------------------------------


Progress = Callable[[str, int, int], None]
"""Called with the path of the current file, the bytes moved so far, and the total bytes to move."""

INCOMPLETE_COPY = "not all was copied"


class ByteCounter:
    """Progress counter that several threads add to."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._name, self._done, self.total = "", 0, 0

    def add(self, name: str, count: int) -> None:
        """Count transferred bytes of this file."""
        with self._lock:
            self._name, self._done = name, self._done + count

    def show(self) -> None:
        """Report the progress."""
        if self.total:
            self._progress(sanitized_line(self._name), self._done, self.total)


def files_to_write(
    difference: files_wire.CompareReply, digests: Mapping[int, str]
) -> files_wire.Write:
    """Return the files to write. Files of the same size are transferred if their digests differ.

    Args:
        difference: the receiver's comparison.
        digests: the sender's digests of the files in `difference.ask`, by number.
    """
    present = dict(difference.present)
    same = [number for number in difference.ask if equal(digests[number], present[number])]
    return files_wire.Write(sorted({*difference.to_send, *difference.ask} - set(same)), same)


def present_pieces(
    entries: Sequence[Entry], want: Sequence[int], pieces: Iterable[tuple[int, str]]
) -> dict[int, str]:
    """Return the pieces that the receiver already has of large files, by file number.

    Small files are sent whole.
    """
    wanted_numbers = set(want)
    return {
        number: text
        for number, text in pieces
        if number in wanted_numbers and text and entries[number].size >= LARGE
    }


def copy_result(
    node: Node,
    entries: Sequence[Entry],
    want: Sequence[int],
    nbytes: int,
    removed: int,
    notes: Sequence[str],
) -> CopyResult:
    files = sum(entry.kind == FILE for entry in entries)
    return CopyResult(
        node.index, node.name, len(want), nbytes, files - len(want), removed, tuple(notes)
    )
