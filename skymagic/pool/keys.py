"""Keys, which let another notebook of this user attach to a pool whose notebook was killed.

A key holds the secrets of the pool's daemons and everything else that the notebook knew: its plan,
where its nodes are. It is stored in the pool's record for as long as the pool lives. A second file
records how far the notebook has shown the current run: it is written for each message, and also by
a notebook that does not know yet that another one has taken the pool.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import platform
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import skymagic
from skymagic.errors import PoolError
from skymagic.plan.plans import Plan
from skymagic.plan.units import rank_words
from skymagic.pool import records
from skymagic.pool.records import SavedKey

LINE_BYTES = 64
"""Bytes per rank's line in the display record: rank, run, settled, begun (see `DisplayRecord`)."""
DELIVERED = -1
"""Sentinel: the run is over, and its results were delivered."""


@dataclass(frozen=True)
class PoolKey:
    """Everything another notebook needs to attach to a pool, besides its record.

    Attributes:
        accesses: for each machine, how to reach its agent (`cluster.Node.access`).
        addresses: for each machine, the address for the other machines, and its own hostname.
        port: a free port on the head for process groups.
    """

    plan: Plan
    accesses: tuple[Any, ...]
    addresses: tuple[tuple[str, str], ...]
    port: int

    def saved(self) -> SavedKey:
        """Return the key as a record stores it."""
        pickled = base64.b64encode(pickle.dumps(self)).decode()
        return SavedKey(skymagic.__version__, platform.python_version(), sys.executable, pickled)


def pool_words(record: records.PoolRecord) -> str:
    """Describe a pool in a line, with the runs that its notebook had not shown to the end."""
    going = DisplayRecord(record.job_id).going()
    still = f"; {rank_words(going, 'run')} was still running when last shown" if going else ""
    return records.record_text(record) + still


def read(job_id: str) -> PoolKey:
    """Read the key of a pool.

    Raises:
        PoolError: the key is missing, other users could have written it, or another version of
            skymagic wrote it; the message names the next step.
    """
    return _unpacked(_saved(job_id), job_id)


def attachable(job_id: str) -> PoolKey:
    """Read the key of a pool whose ranks run this notebook's Python.

    Values and functions are pickled between them.

    Raises:
        PoolError: as for `read`, or the ranks run another Python, which the message names.
    """
    saved = _saved(job_id)
    own = platform.python_version()
    # With another version of skymagic, `_unpacked` below names that version, and the Python that
    # comes with it may be another one too.
    if saved.version == skymagic.__version__ and saved.minor != own.split(".")[:2]:
        raise PoolError(
            f"the ranks of {job_id} run Python {saved.python}, and this is Python {own}: attach "
            f"with Python {'.'.join(saved.minor)}, as {saved.interpreter} is; {_otherwise(job_id)}",
            code="other-python",
            names=[job_id],
        )
    return _unpacked(saved, job_id)


def _saved(job_id: str) -> SavedKey:
    try:
        saved = records.private(job_id).key
    except records.UNREADABLE as problem:
        # only an OSError has `strerror`
        reason = getattr(problem, "strerror", None) or "its record is damaged"
        raise PoolError(
            f"the key of {job_id} is not here ({reason}): {_otherwise(job_id)}",
            code="key-missing",
            names=[job_id],
        ) from None
    if saved is None:
        raise PoolError(
            f"the key of {job_id} is not here: the pool never became ready, or an earlier version "
            f"of skymagic wrote its record; {_otherwise(job_id)}",
            code="key-missing",
            names=[job_id],
        )
    return saved


def _unpacked(saved: SavedKey, job_id: str) -> PoolKey:
    # Checked before the key is unpickled: its classes are ours, and differ between versions.
    if saved.version != skymagic.__version__:
        raise PoolError(
            f"{job_id} was made by skymagic {saved.version or '?'}, and this is "
            f"{skymagic.__version__}: attach with that version; {_otherwise(job_id)}",
            code="other-version",
            names=[job_id],
        )
    try:
        key = pickle.loads(base64.b64decode(saved.pickle, validate=True))
    # a damaged pickle may raise anything
    except Exception as problem:
        raise PoolError(
            f"the key of {job_id} is damaged ({type(problem).__name__}): {_otherwise(job_id)}",
            code="key-damaged",
            names=[job_id],
        ) from None
    if not isinstance(key, PoolKey):
        raise PoolError(
            f"the key of {job_id} is damaged: {_otherwise(job_id)}",
            code="key-damaged",
            names=[job_id],
        )
    return key


def _otherwise(job_id: str) -> str:
    return f"%sky_status --hosts … shows what runs, %sky_down {job_id} --hosts … ends it"


class DisplayRecord:
    """File that records how far this notebook has shown each rank's latest run.

    The file outlives the notebook; each line is written by one system call.

    Output reaches the screen at least once. Each rank has two sequence numbers: messages up to
    `settled` are on the screen; no message after `begun` was sent to it. Another notebook repeats
    the messages in between, and marks them as possibly shown before.

    Args:
        job_id: job ID of the pool; None if no notebook can attach, and then nothing is recorded.
    """

    def __init__(self, job_id: str | None) -> None:
        self._path = None if job_id is None else records.folder() / f"{job_id}.shown"
        self._file: int | None = None
        self._marks: dict[int, tuple[int, int, int]] = {}  # rank → (run, settled, begun)
        self._lock = threading.Lock()

    def read(self, run: int) -> dict[int, tuple[int, int]]:
        """Return rank → (settled, begun) of this run, and continue from there.

        The values are those of the previous notebook.
        """
        self._marks = self._lines()
        return {
            rank: (settled, begun)
            for rank, (number, settled, begun) in self._marks.items()
            if number == run
        }

    def delivered(self, run: int, ranks: Iterable[int]) -> bool:
        """Return True if the user has the values or the error of this run."""
        # from the file: the notebook that has shown the run is another process
        lines = self._lines()
        return all(lines.get(rank, (0, 0, 0))[:2] == (run, DELIVERED) for rank in ranks)

    def going(self) -> list[int]:
        """List the runs whose values or errors the user does not have yet."""
        return sorted({run for run, settled, _ in self._lines().values() if settled != DELIVERED})

    def begin(self, run: int, rank: int, seq: int) -> None:
        """Record that this message of a rank is about to be sent to the screen."""
        self._write(rank, run, begun=seq)

    def mark(self, run: int, rank: int, seq: int) -> None:
        """Record that a rank's messages up to this one are on the screen.

        See `display.screen.Settling`.
        """
        self._write(rank, run, settled=seq)

    def become(self, text: str) -> None:
        """Replace the file with the record of another process that had the pool."""
        with contextlib.suppress(OSError):
            if self._path is not None and text:
                with open(
                    os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w"
                ) as file:
                    file.write(text)

    def deliver(self, run: int, ranks: Iterable[int]) -> None:
        """Record that the user has the values or the error of this run.

        Output that is still on its way to the screen no longer matters.
        """
        for rank in ranks:
            self._write(rank, run, DELIVERED)

    def _write(self, rank: int, run: int, settled: int = 0, begun: int = 0) -> None:
        if self._path is None:
            return
        with self._lock, contextlib.suppress(OSError):
            before = self._marks.get(rank, (0, 0, 0))
            _, done, last = before if before[0] == run else (run, 0, 0)
            # Threads of several runs write here, and a late message of an earlier run must not undo
            # the line of a later one, nor a message that arrives late the delivery of the results.
            if before[0] > run or done == DELIVERED:
                return
            self._marks[rank] = (
                run,
                DELIVERED if settled == DELIVERED else max(done, settled),
                max(last, begun),
            )
            # not truncated: the lines of ranks that have no run now are still the previous
            # notebook's
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            # A line of fixed length at a fixed place is replaced by one call of 64 bytes, which
            # takes microseconds; another process sees the old line or the new one. It is not
            # synced: the file has to survive the kernel's death, and not the machine's.
            line = " ".join(map(str, (rank, *self._marks[rank]))).ljust(LINE_BYTES - 1) + "\n"
            os.pwrite(self._file, line.encode(), rank * LINE_BYTES)

    def _lines(self) -> dict[int, tuple[int, int, int]]:
        """Return rank → (run, settled, begun)."""
        marks = {}
        with contextlib.suppress(OSError, ValueError):
            # ranks that have not written yet leave a hole of zero bytes before later ranks' lines
            text = b"" if self._path is None else self._path.read_bytes().replace(b"\0", b" ")
            for line in text.decode().splitlines():
                rank, run, settled, begun = map(int, line.split())
                marks[rank] = run, settled, begun
        return marks

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
