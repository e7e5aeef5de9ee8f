"""Log files of a node's ranks: bounded, read for the notebook, followed, with the position of each
run.

The oldest part of a log is given back to the file system without changing any position in it. A log
has several writers (the agent, and the rank, for output that user code silences) and readers that
know positions in it, so it is neither renamed nor truncated. Its beginning becomes a hole instead
(``fallocate`` with FALLOC_FL_PUNCH_HOLE: ext4, xfs, btrfs, tmpfs, NFS 4.2). Readers find the end of
the hole with SEEK_DATA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from skymagic.kernels.agent.children import Sink
from skymagic.wire import agent as wire
from skymagic.wire.agent import HEAD_CHARACTERS, HEAD_LINES, KEPT_CHARACTERS, KEPT_LINES, WHOLE_LOG

PIECE = 1 << 20
"""Bytes of a log that are read at once."""
LOST = "[earlier output was dropped: SkyMagic.log_limit]\n"
"""Replaces the part of a run that was trimmed off."""
TAIL_BYTES = 1 << 15
KNOWN_RUNS = 1000
"""Number of latest runs whose positions are known."""


class Spans:
    """Positions in bytes of the last runs in a rank's log, which continues when the rank is
    restarted.
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int | None]] = {}
        self._cells: dict[int, int] = {}
        self._current = 0

    def begin(self, run: int, start: int, cell: int = 0) -> None:
        """Start the span of a run, and of its cell; 0 for none."""
        self.end(start)  # the run of a rank that was replaced during it
        self._current = run
        if run:
            self._spans[run], self._cells[run] = (start, None), cell
            for old in list(self._spans)[:-KNOWN_RUNS]:
                del self._spans[old], self._cells[old]

    def skip(self, start: int) -> None:
        """Move the start of the current run behind its heading."""
        if self._current:
            self._spans[self._current] = start, None

    def end(self, end: int) -> None:
        """End the span of the current run; twice is safe."""
        if self._current:
            self._spans[self._current] = self._spans[self._current][0], end
        self._current = 0

    def find(self, run: int) -> tuple[int, int | None] | None:
        """Return (start, end) of a run, or None if unknown; the end is None while it runs.

        `WHOLE_LOG` is the whole log.
        """
        return (0, None) if run == WHOLE_LOG else self._spans.get(run)

    def known_runs(self) -> tuple[tuple[int, int], ...]:
        """Return the known runs, each with its cell's number, the oldest first."""
        return tuple((run, self._cells[run]) for run in self._spans)


def last_lines(path: str, lines: int) -> wire.LogPiece:
    """Return the last lines of a log; empty if it is missing."""
    try:
        with open(path, "rb") as log:
            begin, end = first_line_position(log), log.seek(0, os.SEEK_END)
            data, length = b"", min(end - begin, PIECE)
            # only the end is read, in growing pieces until it has enough lines
            while length and data.count(b"\n") <= lines and len(data) < end - begin:
                log.seek(end - length)
                data = log.read(length)
                length = min(end - begin, 4 * length)
    except FileNotFoundError:
        return wire.LogPiece("", 0)
    # split at newlines only: the states of a progress bar are one line
    text = b"\n".join(data.split(b"\n")[-lines - data.endswith(b"\n") :])
    return wire.LogPiece(text.decode(errors="replace"), end)


def log_tails(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield (rank, last lines) of all logs in a folder, which the notebook keeps after the pool's
    end.
    """
    for path in sorted(folder.glob("rank-*.log")):
        rank = int(path.stem.removeprefix("rank-"))
        lines, limit = (KEPT_LINES, KEPT_CHARACTERS) if rank else (HEAD_LINES, HEAD_CHARACTERS)
        yield rank, last_lines(str(path), lines).text[-limit:]


def output_since(path: str, start: int) -> wire.LogPiece:
    """Return the whole lines of a log from byte `start` on, up to a limit.

    Only a line that is longer than the limit is returned in parts.
    """
    try:
        with open(path, "rb") as log:
            start = max(start, first_line_position(log))
            log.seek(start)
            data = log.read(PIECE)
    except FileNotFoundError:
        data = b""
    whole_lines = data[: data.rfind(b"\n") + 1]
    # at the end of the log, the rest of an incomplete line is still to come
    data = whole_lines if len(data) < PIECE else whole_lines or data
    return wire.LogPiece(data.decode(errors="replace"), start + len(data))


def output_of_run(
    path: str, span: tuple[int, int | None] | None, start: int | None
) -> wire.LogPiece:
    """Return a piece of a run's output."""
    if span is None:
        return wire.LogPiece("", 0, known=False, over=True)
    first, last = span
    lost, start = start is None, first if start is None else start
    try:
        with open(path, "rb") as log:
            begin = first_line_position(log)
            end = log.seek(0, os.SEEK_END) if last is None else last
            lost, start = lost and begin > start, min(max(start, begin), max(start, end))
            log.seek(start)
            data = log.read(min(PIECE, max(0, end - start)))
    except FileNotFoundError:
        end, data, lost = start, b"", False
    if more := start + len(data) < end:
        data = data[: data.rfind(b"\n") + 1] or data  # cut at a newline, not within a character
    return wire.LogPiece(
        LOST * lost + data.decode(errors="replace"),
        start + len(data),
        more=more,
        over=last is not None,
    )


KEEP_SIZE, PUNCH_HOLE = 1, 2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
BLOCK = 4096
"""Holes consist of whole blocks of this many bytes."""


def trim(fd: int, limit: int) -> bool:
    """Cut a file longer than `limit` bytes to its last seven eighths of `limit`.

    Returns True if it is within its limit afterwards.
    """
    # an eighth below the limit, so that not every new line causes a cut
    length = os.fstat(fd).st_size - limit * 7 // 8
    begin, length = first_byte(fd), length // BLOCK * BLOCK
    if os.fstat(fd).st_size - begin <= limit:
        return True
    if sys.platform != "linux":
        return False
    import ctypes  # imported only once a log is that long

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, KEEP_SIZE | PUNCH_HOLE, 0, length) == 0)


def first_byte(fd: int) -> int:
    """Return the position behind the hole at a file's beginning, 0 if it has none."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):  # an empty file, or a system without SEEK_DATA
        return 0
    finally:
        os.lseek(fd, position, os.SEEK_SET)


def first_line_position(log: BinaryIO) -> int:
    """Return the position of the first whole line of an open log, 0 if it was never trimmed."""
    start = first_byte(log.fileno())
    if start:
        log.seek(start)
        start += len(log.readline(1 << 20))
    return start


class RankLog:
    """Log of one rank, open for its agent to write.

    Keeps the start and the heading of the current request, and the size limit.

    Args:
        rank: its rank.
        path: created readable for the owner only.
        spans: records the position of each run.
        limit: maximum bytes; None for no limit.
        tell: called with a sentence for the user if it cannot be written.
    """

    def __init__(
        self, rank: int, path: Path, spans: Spans, limit: int | None, tell: Callable[[str], None]
    ) -> None:
        self.path, self._rank, self._spans, self._tell = path, rank, spans, tell
        # O_APPEND, because the rank writes to the same file: neither overwrites the other's text
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        self._file: BinaryIO = open(fd, "r+b", buffering=0)  # noqa: SIM115  # close() closes it
        self._fails = False
        self._limit, self._unlooked = limit, 0
        self._since = self.size  # start of the current request, in bytes
        self._heading: str | None = None  # written before the request's first line
        self._open_line = False  # whether the last line is incomplete

    @property
    def size(self) -> int:
        """Length in bytes, from the descriptor because the file may have been deleted."""
        return os.fstat(self._file.fileno()).st_size

    def begin(self, run: int, cell: int) -> None:
        """Start the log of a run and its cell; 0 for none."""
        self._since = self.size
        number = f" run {run}," if run else ""
        self._heading = f"── cell {cell},{number} {time.strftime('%H:%M:%S')} ──" if cell else None
        self._spans.begin(run, self._since, cell)

    def end(self) -> None:
        """End the log of the run."""
        self._spans.end(self.size)
        self.trim()

    def write(self, data: bytes) -> None:
        """Append data below the heading of the request."""
        if data:
            self.write_heading()
            self._append(data)
            self._open_line = not data.endswith(b"\n")

    def write_heading(self) -> None:
        """Append the heading, unless it was written already."""
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
            # check the size only once per sixteenth of the limit
            if self._limit is not None and self._unlooked > self._limit // 16:
                self.trim()
        except OSError as problem:  # a full disk must not stop the run
            if not self._fails:
                self._fails = True
                why = f"{self.path} cannot be written: {problem.strerror}"
                self._tell(
                    f"what rank {self._rank} prints is not kept, "
                    f"and only the screen has what it shows: {why}"
                )

    def trim(self) -> None:
        """Keep the log within its limit, including text that the rank itself has written."""
        self._unlooked = 0
        if self._limit is None or self.size <= self._limit:
            return
        if not trim(self._file.fileno(), self._limit):
            self._tell(
                f"the log of rank {self._rank} grows beyond its limit: "
                f"the file system of {self.path} cannot drop its beginning"
            )
            self._limit = None

    def tail(self, lines: int) -> str:
        """Return the last lines of the current or latest request, at most `TAIL_BYTES`."""
        data = os.pread(self._file.fileno(), TAIL_BYTES, max(self._since, self.size - TAIL_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Close the file; twice is safe."""
        self._file.close()


class RankLogs:
    """Logs of all ranks, with the requests to read and follow them."""

    def __init__(self, directory: Path, send: Sink) -> None:
        self._directory, self._send = directory, send
        self._spans: dict[int, Spans] = {}  # by rank: positions of its runs in its log
        self._followers: dict[tuple[int, int], wire.ReadLog] = {}
        """Open follow requests by rank and asker (0: the notebook, else a reader)."""

    def path(self, number: int) -> Path:
        """Return the path of a rank's log."""
        return self._directory / f"rank-{number}.log"

    def spans(self, number: int) -> Spans:
        """Return the positions of a rank's runs in its log."""
        return self._spans.setdefault(number, Spans())

    def read(self, message: wire.ReadLog, asker: int) -> None:
        """Answer a request for a log's last lines, its list of runs, or a piece of a run; or follow
        the log.
        """
        path, spans = str(self.path(message.rank)), self.spans(message.rank)
        if message.runs:
            self._send(wire.LoggedRuns(message.rank, message.number, spans.known_runs()))
            return
        if message.run:
            piece = output_of_run(path, spans.find(message.run), message.start)
        elif message.start is None:
            piece = last_lines(path, message.lines)
        else:
            self._followers[message.rank, asker] = message
            self.follow(message.rank)
            return
        self._send(wire.LogReply(message.rank, message.number, piece))

    def follow(self, number: int) -> None:
        """Send new lines of a log to its followers, once there are any."""
        for key in [key for key in self._followers if key[0] == number]:
            request = self._followers[key]
            news = output_since(str(self.path(number)), request.start or 0)
            if news.text:
                del self._followers[key]
                self._send(wire.LogReply(number, request.number, news))

    def forget(self, asker: int) -> None:
        """Drop the requests of an asker that is gone; twice is safe."""
        self._followers = {
            key: request for key, request in self._followers.items() if key[1] != asker
        }
