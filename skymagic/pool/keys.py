"""What lets another notebook of this user attach to a pool whose notebook was killed: a file beside the pool's record, while the pool lives.

The file holds the secrets of the pool's daemons and whatever else its notebook knew (its plan, where its nodes are); the user alone can
read it. Beside it lies a file that says how far the notebook has shown the run that is under way. Notebooks that are executed on pools'
heads have such a file too, until the executed notebook is taken; it outlives the pool."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import stat
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import skymagic
from skymagic.errors import PoolError
from skymagic.plan.plans import Plan
from skymagic.plan.units import rank_words
from skymagic.pool import records
from skymagic.wire import atomic

T = TypeVar("T")
MAGIC = "skymagic key"
LINE_BYTES = 64
"""Bytes of each rank's line in the file that says what was shown: rank, run, settled, begun (see `DisplayRecord`)."""
DELIVERED = -1
"""Sentinel: the run is over, and its results were delivered."""


@dataclass(frozen=True)
class PoolKey:
    """What another notebook must know of a pool.

    Attributes:
        accesses: of each machine, what leads to its agent (`cluster.Node.access`).
        addresses: of each machine, where the others reach it, and its own name for itself.
        port: a port of the head that is free for process groups.
    """

    name: str
    job_id: str
    plan: Plan
    accesses: tuple[Any, ...]
    addresses: tuple[tuple[str, str], ...]
    port: int


@dataclass(frozen=True)
class Heading:
    """The first line of a file of secrets, which any version of skymagic and of Python can read.

    Attributes:
        version: skymagic's. python: Python's, "" where an earlier version has not written it. interpreter: whose it is.
    """

    version: str
    python: str = ""
    interpreter: str = ""

    @classmethod
    def own(cls) -> Heading:
        """Heading of a file that this process writes."""
        return cls(skymagic.__version__, platform.python_version(), sys.executable)

    @classmethod
    def parse(cls, line: bytes) -> Heading:
        """Heading of a file, from its first line."""
        return cls(*line.decode(errors="replace").strip().removeprefix(MAGIC).strip().split(" ", 2))

    def line(self) -> bytes:
        """As it is written."""
        return (
            f"{MAGIC} {self.version} {self.python} {self.interpreter}".encode(errors="replace")
            + b"\n"
        )

    @property
    def minor(self) -> list[str]:
        """3 and 11 of 3.11.2; code and classes of another one cannot be unpickled."""
        return self.python.split(".")[:2]


def pool_words(record: records.PoolRecord) -> str:
    """A pool in a line, with the runs that its notebook had begun to show and not shown to their end."""
    going = DisplayRecord(record.job_id).going()
    still = f"; {rank_words(going, 'run')} was still running when last shown" if going else ""
    return records.words(record) + still


def path(job_id: str) -> Path:
    """Where a pool's key is."""
    return records.folder() / f"{job_id}.key"


def write(key: PoolKey) -> None:
    """Keep a key; a home that cannot be written keeps none, and nobody attaches."""
    keep(path(key.job_id), key)


def keep(target: Path, secret: object) -> None:
    """Keep what may hold secrets in a file that the user alone can read, whole or not at all; a home that cannot be written keeps nothing."""
    atomic.keep(target, packed(secret))


def packed(secret: object) -> bytes:
    """Return the content of such a file."""
    return Heading.own().line() + pickle.dumps(secret)


def read(job_id: str) -> PoolKey:
    """The key of a pool.

    Raises:
        PoolError: there is none here, others could have written it, or it is another version's; says what to do.
    """
    return kept(path(job_id), job_id, PoolKey)


def attachable(job_id: str) -> PoolKey:
    """The key of a pool whose ranks run this notebook's Python: values and functions are pickled between them.

    Raises:
        PoolError: as `read` does, or they run another one; names it.
    """
    with contextlib.suppress(OSError), open(path(job_id), "rb") as file:
        theirs, own = Heading.parse(file.readline()), Heading.own()
        if theirs.version == own.version and theirs.python and theirs.minor != own.minor:
            raise PoolError(
                f"the ranks of {job_id} run Python {theirs.python}, and this is Python {own.python}: attach with Python "
                f"{'.'.join(theirs.minor)}, as {theirs.interpreter or 'its notebook'} is; {_otherwise(job_id)}"
            )
    return read(job_id)


def kept(source: Path, job_id: str, kind: type[T]) -> T:
    """What `keep` has kept of a pool. Raises as `read` does."""
    try:
        with open(source, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise PoolError(
                    f"{source} is open to other users and is not used: chmod 600 it if nobody has changed it"
                )
            heading, text = file.readline(), file.read()
    except OSError as problem:
        raise PoolError(
            f"the key of {job_id} is not here ({problem.strerror}): {_otherwise(job_id)}"
        ) from None
    version = Heading.parse(heading).version
    if version != skymagic.__version__:
        raise PoolError(
            f"{job_id} was made by skymagic {version or '?'}, and this is {skymagic.__version__}: attach with that version; "
            f"{_otherwise(job_id)}"
        )
    try:
        secret = pickle.loads(text)
    except Exception as problem:
        raise PoolError(
            f"the key of {job_id} is damaged ({type(problem).__name__}): {_otherwise(job_id)}"
        ) from None
    if not isinstance(secret, kind):
        raise PoolError(f"the key of {job_id} is damaged: {_otherwise(job_id)}")
    return secret


def _otherwise(job_id: str) -> str:
    return f"%sky_status --hosts … shows what runs, %sky_down {job_id} --hosts … ends it"


class DisplayRecord:
    """How far this notebook has shown each rank's last run: a file that outlives it, each line of which is written by one system call.

    Output reaches the screen at least once. Of each rank there are two numbers of contents: those up to `settled` are on the screen; none
    after `begun` was sent to it. Another notebook shows what lies between once more, and says that it may have been shown before.

    Args:
        job_id: the pool's; None where nobody can attach, and nothing is kept.
    """

    def __init__(self, job_id: str | None) -> None:
        self._path = None if job_id is None else path(job_id).with_suffix(".shown")
        self._file: int | None = None
        self._marks: dict[int, tuple[int, int, int]] = {}  # rank → (run, settled, begun)
        self._lock = threading.Lock()

    def read(self, run: int) -> dict[int, tuple[int, int]]:
        """Rank → (settled, begun) of this run, as the notebook before has left it; this one goes on from there."""
        self._marks = self._lines()
        return {
            rank: (settled, begun)
            for rank, (of, settled, begun) in self._marks.items()
            if of == run
        }

    def delivered(self, run: int, ranks: Iterable[int]) -> bool:
        """Whether the user has the values of this run, or its error."""
        lines = self._lines()
        return all(lines.get(rank, (0, 0, 0))[:2] == (run, DELIVERED) for rank in ranks)

    def going(self) -> list[int]:
        """Runs of which the user does not have the values yet, or the error."""
        return sorted({run for run, settled, _ in self._lines().values() if settled != DELIVERED})

    def begin(self, run: int, rank: int, seq: int) -> None:
        """Record that this content of a rank is about to be sent to the screen."""
        self._write(rank, run, begun=seq)

    def mark(self, run: int, rank: int, seq: int) -> None:
        """A rank's contents up to this one are on the screen (`display.screen.Settling`)."""
        self._write(rank, run, settled=seq)

    def become(self, text: str) -> None:
        """Another process has had the pool, and kept this."""
        with contextlib.suppress(OSError):
            if self._path is not None and text:
                with open(
                    os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w"
                ) as file:
                    file.write(text)

    def deliver(self, run: int, ranks: Iterable[int]) -> None:
        """The user has the values of this run, or its error; what is still on its way to the screen is no news then."""
        for rank in ranks:
            self._write(rank, run, DELIVERED)

    def _write(self, rank: int, run: int, settled: int = 0, begun: int = 0) -> None:
        if self._path is None:
            return
        with self._lock, contextlib.suppress(OSError):
            before = self._marks.get(rank, (0, 0, 0))
            _, done, last = before if before[0] == run else (run, 0, 0)
            if before[0] > run or done == DELIVERED:
                return
            self._marks[rank] = (
                run,
                DELIVERED if settled == DELIVERED else max(done, settled),
                max(last, begun),
            )
            if self._file is None:
                self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            line = " ".join(map(str, (rank, *self._marks[rank]))).ljust(LINE_BYTES - 1) + "\n"
            os.pwrite(self._file, line.encode(), rank * LINE_BYTES)

    def _lines(self) -> dict[int, tuple[int, int, int]]:
        """Rank → (run, settled, begun)."""
        found = {}
        with contextlib.suppress(OSError, ValueError):
            text = b"" if self._path is None else self._path.read_bytes().replace(b"\0", b" ")
            for line in text.decode().splitlines():
                rank, run, settled, begun = map(int, line.split())
                found[rank] = run, settled, begun
        return found

    def close(self) -> None:
        """Close the file; twice is safe."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
