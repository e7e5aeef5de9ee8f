"""What an agent has on disk: its folders, made for the owner alone, locked while somebody uses them and swept when nobody does any more; and the
record that tells others on its machine what it serves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import skymagic
from skymagic.data.store import store
from skymagic.plan.limits import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire.processes import boot_id
from skymagic.wire.record import ENDED, RECORD, AgentRecord, ended_by, identity

PREFIX = "skymagic-"
LOCK = ".agent"
"""The file in each folder whose lock the agent holds as long as it lives."""
SHM = Path("/dev/shm")


class Directories:
    """The agent's folder, with logs and connection files, and the node's store, in memory where that is possible."""

    def __init__(self, job_id: str) -> None:
        name = f"{PREFIX}{job_id}-"
        self.work, work_lock = _locked_folder(name, tempfile.gettempdir())
        shm = SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else self.work
        self.store, store_lock = _locked_folder(name, shm)
        self.locks = {work_lock, store_lock}
        """Descriptors: a process that is forked must close them, or holds the locks too."""

    def restore(self) -> list[Path]:
        """Make again those that somebody has deleted, as cleaners of temporary folders do on long runs; which."""
        gone = [path for path in (self.work, self.store) if not path.is_dir()]
        for path in gone:
            path.mkdir(mode=0o700)
            self.locks.add(_lock(path))
        return gone

    def touch(self) -> None:
        """Make all files young: such cleaners go by age."""
        for top in (self.work, self.store):
            for folder, _, names in os.walk(top):
                for name in (".", *names):
                    with contextlib.suppress(OSError):
                        os.utime(os.path.join(folder, name), follow_symlinks=False)

    def remove(self) -> None:
        """Delete what the node has written; twice is safe."""
        store.remove(self.store)
        shutil.rmtree(self.work, ignore_errors=True)


def sweep() -> None:
    """Delete the folders of agents that were killed: nobody holds their locks."""
    for path in _abandoned():
        store.remove(path)


def _abandoned() -> Iterator[Path]:
    for parent in {SHM, Path(tempfile.gettempdir())}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if entry.name.startswith(PREFIX) and _is_abandoned(Path(entry.path)):
                    yield Path(entry.path)


def _is_abandoned(path: Path) -> bool:
    """Whether it is an agent's folder of this user's which no agent uses."""
    lock = path / LOCK
    try:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _locked_folder(name: str, parent: str | Path) -> tuple[Path, int]:
    """(A new folder, the descriptor of its lock), which appears under its name when it is locked: none is swept in between."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}", dir=parent))
    descriptor = _lock(hidden)
    return hidden.rename(hidden.with_name(hidden.name[1:])), descriptor


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    with contextlib.suppress(
        OSError
    ):  # a file system without locks: its folders are not swept by others either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


CODE = Path(skymagic.__file__).parents[1]
"""The folder that skymagic is imported from."""
WRITE_INTERVAL = 1.0
"""Seconds between two writes: cells may follow each other faster."""


class RecordFile:
    """The agent's record as a file. A folder that cannot be written keeps no record, and says nothing.

    Args:
        path: where it is; None for an agent that ends with its notebook, which nobody needs to find.
        spec: what the agent was told.
    """

    def __init__(self, path: str | None, spec: wire.AgentSpec) -> None:
        self.path = None if path is None else Path(path)
        self._identity = identity()
        self._written_at = float("-inf")
        self._state: tuple[bool, bool, Mapping[int, int]] = (False, False, {})
        self.due: float | None = (
            None  # when it is to be written again (monotonic seconds); None while it is up to date
        )
        now = time.time()
        self._record = AgentRecord(
            version=spec.version, pool=spec.pool, job_id=spec.job_id, node=spec.node, nodes=spec.nodes, client=spec.client,
            hostname=socket.gethostname(), boot=boot_id(), pid=os.getpid(), started=now, idle_since=now,
            devices=spec.devices, uses=folders_in_use() if path else (), idle_timeout=spec.idle_timeout, max_lifetime=spec.max_lifetime, detached_timeout=spec.detached_timeout,
        )  # fmt: skip
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.with_name(ENDED).unlink()  # it is about the agent before
            self._write(self.path)

    def ended_by(self) -> str:
        """Return who has ended this agent from outside, or "" if nobody has said so."""
        return "" if self.path is None else ended_by(self.path.parent)

    def update(self, lifetime: Lifetime, pids: Callable[[], Mapping[int, int]]) -> None:
        """Note what has changed, and write it if the last time is long enough ago."""
        if self.path is None:
            return
        busy, away, ranks = lifetime.busy, lifetime.away, pids()
        if (busy, away, ranks) != self._state:
            now = time.time()
            was_busy, was_away, _ = self._state
            record = replace(self._record, ranks={str(rank): pid for rank, pid in ranks.items()})
            if busy != was_busy:
                record = replace(
                    record, busy_since=now if busy else 0.0, idle_since=0.0 if busy else now
                )
            if away != was_away:
                record = replace(record, away_since=now if away else 0.0)
            self._record = record
            self._state = busy, away, dict(ranks)
            self.due = self._written_at + WRITE_INTERVAL
        if self.due is not None and time.monotonic() >= self.due:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        self._written_at, self.due = time.monotonic(), None
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(f"{self._identity}\n".encode() + RECORD.encode(self._record))
            part.replace(path)


def folders_in_use() -> tuple[str, ...]:
    """The folders that this process needs. What skymagic has made of them is marked as used now."""
    prefix = Path(sys.prefix)
    marks = [prefix / ".ready"] if prefix.parent.name == "env" else []
    marks += [CODE] if CODE.parent.name == "code" else []
    for mark in marks:
        with contextlib.suppress(OSError):
            os.utime(mark)
    return (str(prefix), str(CODE))
