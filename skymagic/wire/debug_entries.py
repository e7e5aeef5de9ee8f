"""Entries of debug logs: find the files of a pool, read their last entries, and merge them by time.

The messages at the end are those of the process that reads the files of a node for the notebook
(`kernels.debug_entries`).
"""

from __future__ import annotations

import heapq
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skymagic.wire.codec import Codec, FrozenMessage
from skymagic.wire.debug_log import OLDER, file_name
from skymagic.wire.record import folders, why_unsafe

START = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ")
"""Beginning of an entry; further lines of the same entry are indented."""


@dataclass(frozen=True, order=True)
class Entry:
    """One message of a process.

    Attributes:
        text: its lines; the first one begins with the time.
        process: process that has written it, such as "node 1 rank-3".
    """

    text: str
    process: str

    def __str__(self) -> str:
        return f"[{self.process}] {self.text}"


def read(path: Path, process: str) -> Iterator[Entry]:
    """Yield the entries of a process's older and current file, in the order of writing."""
    lines: list[str] = []
    for part in (path.with_name(f"{path.name}{OLDER}"), path):
        try:
            with part.open(errors="replace") as file:
                for line in file:
                    if START.match(line) and lines:
                        yield Entry("".join(lines).rstrip("\n"), process)
                        lines = []
                    lines.append(line)
        except OSError:
            continue
    if lines:
        yield Entry("".join(lines).rstrip("\n"), process)


def last(entries: Iterable[Iterable[Entry]], count: int, pattern: str) -> list[Entry]:
    """Merge the entries of several processes by time, and return the last ones that match.

    Args:
        pattern: regular expression; "" matches all.
    """
    # Only the last entries of each process are kept in memory: its two files may have 10 MB. They
    # are sorted because threads may write in another order than that of their records' times.
    matches = re.compile(pattern).search
    matching = [
        deque((entry for entry in process if matches(str(entry))), count) for process in entries
    ]
    return list(deque(heapq.merge(*(sorted(queue) for queue in matching)), count))


def node_entries(job_id: str, node: int) -> list[Iterator[Entry]]:
    """Find the files of all processes of a pool's node on this machine, and read their entries.

    Finds files whether or not the node's agent and daemon still run.
    """
    # the agent's folder, and the daemon's
    parents = [
        *Path(tempfile.gettempdir()).glob(f"skymagic-{job_id}-*"),
        *map(Path, folders(f"{job_id}-{node}")),
    ]
    start, end = file_name(node, "*").split("*")
    files = [
        path
        for parent in parents
        # Any user of the machine can create such a folder in /tmp, with entries that mislead.
        if why_unsafe(str(parent)) is None
        for path in sorted(parent.glob(f"{start}*{end}"))
    ]
    return [read(path, f"node {node} {path.name[len(start) : -len(end)]}") for path in files]


# -- messages between the notebook and the process that reads a node's files ----------------------


class DebugMessage(FrozenMessage):
    """Base of this protocol's messages."""


class ReadEntries(DebugMessage):
    """Ask for the last entries of a node that match a regular expression."""

    job_id: str
    node: int
    count: int
    pattern: str = ""


class Entries(DebugMessage):
    """Entries of a node, sorted by time; `processes` has the process of each text."""

    texts: tuple[str, ...]
    processes: tuple[str, ...]


MAX_LINE = 64 << 20
"""Most bytes of a reply."""
CODEC: Codec[DebugMessage] = Codec(*DebugMessage.__subclasses__(), max_line=MAX_LINE)
encode, messages = CODEC.encode, CODEC.messages


def reply(request: ReadEntries) -> Entries:
    """Return the entries that a request asks for, from the files on this machine."""
    entries = last(node_entries(request.job_id, request.node), request.count, request.pattern)
    return Entries(
        tuple(entry.text for entry in entries), tuple(entry.process for entry in entries)
    )
