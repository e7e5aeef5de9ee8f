"""The logs of the ranks of a node: bounded, read for the notebook, followed; and where each run stands in them.

The oldest part of a log is given back to the file system, and every position in it stays what it was. A log has several writers (the agent; a
rank, for what user code silences) and readers that know positions in it, so it is neither renamed nor begun anew. Its beginning becomes a
hole instead (``fallocate`` with FALLOC_FL_PUNCH_HOLE: ext4, xfs, btrfs, tmpfs, NFS 4.2). Readers find where it ends by SEEK_DATA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from skymagic.kernels.agent.children import Sink
from skymagic.wire import agent as wire
from skymagic.wire.agent import HEAD_CHARACTERS, HEAD_LINES, KEPT_CHARACTERS, KEPT_LINES, WHOLE_LOG

PIECE = 1 << 20
"""Bytes of a log that are read at once."""
LOST = "[earlier output was dropped: SkyMagic.log_limit]\n"
"""Stands in the place of what was trimmed off."""
TAIL_BYTES = 1 << 15
KNOWN_RUNS = 1000
"""How many of the last runs are found in a log."""


class Spans:
    """Where each of the last runs stands in a rank's log, in bytes; the log goes on when the rank is started anew."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int | None]] = {}
        self._cells: dict[int, int] = {}
        self._current = 0

    def begin(self, run: int, start: int, cell: int = 0) -> None:
        """What follows is this run's, of this cell; 0 is none."""
        self.end(start)  # of a rank that was replaced amidst it
        self._current = run
        if run:
            self._spans[run], self._cells[run] = (start, None), cell
            for old in list(self._spans)[:-KNOWN_RUNS]:
                del self._spans[old], self._cells[old]

    def skip(self, start: int) -> None:
        """What was written of the run so far is not its own: a heading."""
        if self._current:
            self._spans[self._current] = start, None

    def end(self, end: int) -> None:
        """The run is over; twice is safe."""
        if self._current:
            self._spans[self._current] = self._spans[self._current][0], end
        self._current = 0

    def find(self, run: int) -> tuple[int, int | None] | None:
        """(start, end) of a run, the end None while it goes on; None where it is not known. `WHOLE_LOG` is all there is."""
        return (0, None) if run == WHOLE_LOG else self._spans.get(run)

    def listed(self) -> dict[str, Any]:
        """``runs``: [run, cell] of each that is known, the oldest first."""
        return {"runs": [[run, self._cells[run]] for run in self._spans]}


def last(path: str, lines: int) -> dict[str, Any]:
    """The last lines of a log as ``text``, and where it ended, as ``end``; a log that is not there is empty."""
    try:
        with open(path, "rb") as log:
            begin, end = begins(log), log.seek(0, os.SEEK_END)
            found, length = b"", min(end - begin, PIECE)
            while length and found.count(b"\n") <= lines and len(found) < end - begin:
                log.seek(end - length)
                found = log.read(length)
                length = min(end - begin, 4 * length)
    except FileNotFoundError:
        return {"text": "", "end": 0}
    text = b"\n".join(
        found.split(b"\n")[-lines - found.endswith(b"\n") :]
    )  # a bar's states are one line
    return {"text": text.decode(errors="replace"), "end": end}


def kept_tails(folder: Path) -> Iterator[tuple[int, str]]:
    """(rank, the last lines of its log) of all logs in a folder: what the notebook has after the pool's end."""
    for path in sorted(folder.glob("rank-*.log")):
        rank = int(path.stem.removeprefix("rank-"))
        lines, limit = (KEPT_LINES, KEPT_CHARACTERS) if rank else (HEAD_LINES, HEAD_CHARACTERS)
        yield rank, last(str(path), lines)["text"][-limit:]


def since(path: str, start: int) -> dict[str, Any]:
    """What a log holds from byte `start` on, in whole lines: ``text``, and where it ends: ``end``."""
    try:
        with open(path, "rb") as log:
            start = max(start, begins(log))
            log.seek(start)
            found = log.read(PIECE)
    except FileNotFoundError:
        found = b""
    if len(found) < PIECE:
        found = found[: found.rfind(b"\n") + 1]
    return {"text": found.decode(errors="replace"), "end": start + len(found)}


def of_run(path: str, span: tuple[int, int | None] | None, start: int | None) -> dict[str, Any]:
    """A piece of what a run wrote: ``text``, where it ends: ``end``, whether there is ``more``, and whether the run is ``known`` and ``over``."""
    if span is None:
        return {"text": "", "end": 0, "more": False, "known": False, "over": True}
    first, last = span
    lost, start = start is None, first if start is None else start
    try:
        with open(path, "rb") as log:
            begin, end = begins(log), log.seek(0, os.SEEK_END) if last is None else last
            lost, start = lost and begin > start, min(max(start, begin), max(start, end))
            log.seek(start)
            found = log.read(min(PIECE, max(0, end - start)))
    except FileNotFoundError:
        end, found, lost = start, b"", False
    if more := start + len(found) < end:
        found = found[: found.rfind(b"\n") + 1] or found  # a character is not cut in two
    return {
        "text": LOST * lost + found.decode(errors="replace"),
        "end": start + len(found),
        "more": more,
        "known": True,
        "over": last is not None,
    }


KEEP_SIZE, PUNCH_HOLE = 1, 2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
BLOCK = 4096
"""A hole has whole blocks."""


def trim(fd: int, limit: int) -> bool:
    """Keep the last seven eighths of `limit` bytes of a file that is longer than `limit`; whether it is within its limit then."""
    length = os.fstat(fd).st_size - limit * 7 // 8
    begin, length = first_byte(fd), length // BLOCK * BLOCK
    if os.fstat(fd).st_size - begin <= limit:
        return True
    if sys.platform != "linux":
        return False
    import ctypes  # only where a log has become that long

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, KEEP_SIZE | PUNCH_HOLE, 0, length) == 0)


def first_byte(fd: int) -> int:
    """Where a file's data begins: behind the hole at its beginning, 0 where there is none."""
    here = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):  # an empty file, or a system that does not tell
        return 0
    finally:
        os.lseek(fd, here, os.SEEK_SET)


def begins(log: BinaryIO) -> int:
    """Where the first whole line of an open log begins; 0 of one that was never trimmed."""
    start = first_byte(log.fileno())
    if start:
        log.seek(start)
        start += len(log.readline(1 << 20))
    return start


class RankLog:
    """One rank's log, open for what its agent writes: where the present request begins in it, its heading, its limit.

    Args:
        rank: whose it is.
        path: made anew readable for the owner only.
        spans: is told where each run stands in it.
        limit: bytes that it may have; None for no limit.
        tell: called with a sentence for the user: it cannot be written.
    """

    def __init__(
        self, rank: int, path: Path, spans: Spans, limit: int | None, tell: Callable[[str], None]
    ) -> None:
        self.path, self._rank, self._spans, self._tell = path, rank, spans, tell
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        self._file: BinaryIO = open(fd, "r+b", buffering=0)  # noqa: SIM115  # close() closes it
        self._fails = False
        self._limit, self._unlooked = limit, 0
        self._since = self.size  # where the present request begins, in bytes
        self._heading: str | None = None  # what stands above its first line, once it has one
        self._open_line = False  # whether the last line has no end yet

    @property
    def size(self) -> int:
        """Bytes; by its descriptor, for somebody may have deleted the file."""
        return os.fstat(self._file.fileno()).st_size

    def begin(self, run: int, cell: int) -> None:
        """What follows is this run's, of this cell; 0 is none."""
        self._since = self.size
        number = f" run {run}," if run else ""
        self._heading = f"── cell {cell},{number} {time.strftime('%H:%M:%S')} ──" if cell else None
        self._spans.begin(run, self._since, cell)

    def end(self) -> None:
        """The run is over."""
        self._spans.end(self.size)
        self.trim()

    def write(self, data: bytes) -> None:
        """Append, below the heading of the request."""
        if data:
            self.write_heading()
            self._append(data)
            self._open_line = not data.endswith(b"\n")

    def write_heading(self) -> None:
        """Append the heading, where it is not there yet."""
        if self._heading is not None:
            heading, self._heading = "\n" * self._open_line + self._heading + "\n", None
            self._append(heading.encode())
            self._since, self._open_line = self.size, False
            self._spans.skip(self._since)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        self._unlooked += len(data)
        try:
            while view:
                view = view[self._file.write(view) :]
            self._fails = False
            if self._limit is not None and self._unlooked > self._limit // 16:
                self.trim()
        except OSError as problem:  # a full disk must not stop the run
            if not self._fails:
                self._fails = True
                why = f"{self.path} cannot be written: {problem.strerror}"
                self._tell(
                    f"what rank {self._rank} prints is not kept, and only the screen has what it shows: {why}"
                )

    def trim(self) -> None:
        """Keep it within its limit, also of what the rank itself has written there."""
        self._unlooked = 0
        if self._limit is None or self.size <= self._limit:
            return
        if not trim(self._file.fileno(), self._limit):
            self._tell(
                f"the log of rank {self._rank} grows beyond its limit: the file system of {self.path} cannot drop its beginning"
            )
            self._limit = None

    def tail(self, lines: int) -> str:
        """The last lines, of at most `TAIL_BYTES`, of the present request, or the one before."""
        data = os.pread(self._file.fileno(), TAIL_BYTES, max(self._since, self.size - TAIL_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Close the file; twice is safe."""
        self._file.close()


class RankLogs:
    """Answers what is asked of the logs."""

    def __init__(self, directory: Path, send: Sink) -> None:
        self._directory, self._send = directory, send
        self._spans: dict[int, Spans] = {}  # by rank: where its runs stand in its log
        self._followers: dict[tuple[int, int], wire.ReadLog] = {}
        """By rank and who asks (0: the notebook, else a reader): who follows its log."""

    def path(self, number: int) -> Path:
        """A rank's log."""
        return self._directory / f"rank-{number}.log"

    def spans(self, number: int) -> Spans:
        """Where the runs of a rank stand in its log."""
        return self._spans.setdefault(number, Spans())

    def read(self, message: wire.ReadLog, asker: int) -> None:
        """Send the last lines of a rank's log, which runs it has, a piece of what one wrote there, or follow it."""
        path, spans = str(self.path(message.rank)), self.spans(message.rank)
        if message.runs:
            found = spans.listed()
        elif message.run:
            found = of_run(path, spans.find(message.run), message.start)
        elif message.start is None:
            found = last(path, message.lines)
        else:
            self._followers[message.rank, asker] = message
            self.follow(message.rank)
            return
        self._send(wire.RankReply(message.rank, message.number, found))

    def follow(self, number: int) -> None:
        """Send what is new in a log to those who follow it, once there is something."""
        for key in [key for key in self._followers if key[0] == number]:
            request = self._followers[key]
            found = since(str(self.path(number)), request.start or 0)
            if found["text"]:
                del self._followers[key]
                self._send(wire.RankReply(number, request.number, found))

    def forget(self, asker: int) -> None:
        """Who asked is gone; twice is safe."""
        self._followers = {
            key: request for key, request in self._followers.items() if key[1] != asker
        }
