"""An agent's files: its folders, and the record that shows other processes on this machine what it
serves.

The folders are private to the user, locked while an agent uses them, and swept once no agent does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
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
from skymagic.content import store
from skymagic.plan.limits import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire.processes import boot_id
from skymagic.wire.record import ENDED, RECORD, AgentRecord, ended_by, identity

logger = logging.getLogger(__name__)

PREFIX = "skymagic-"
LOCK = ".agent"
"""File in each folder whose lock the agent holds as long as it lives."""
SHM = Path("/dev/shm")


class Directories:
    """The agent's folder, with logs and connection files, and the node's store, in memory if
    possible.
    """

    def __init__(self, job_id: str) -> None:
        name = f"{PREFIX}{job_id}-"
        self.work, work_lock = _locked_folder(name, tempfile.gettempdir())
        shm = SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else self.work
        self.store, store_lock = _locked_folder(name, shm)
        self.locks = {work_lock, store_lock}
        """Descriptors of the locks. A forked process must close them, or it holds the locks too."""

    def restore(self) -> list[Path]:
        """Recreate deleted folders and return them; cleaners of temporary folders delete them on
        long runs.
        """
        missing = [path for path in (self.work, self.store) if not path.is_dir()]
        for path in missing:
            path.mkdir(mode=0o700)
            self.locks.add(_lock(path))
        return missing

    def touch(self) -> None:
        """Update the time stamps of all files, because cleaners of temporary folders go by age."""
        for top in (self.work, self.store):
            for folder, _, names in os.walk(top):
                for name in (".", *names):
                    with contextlib.suppress(OSError):
                        os.utime(os.path.join(folder, name), follow_symlinks=False)

    def remove(self) -> None:
        """Delete all files that the node has written; twice is safe."""
        store.remove(self.store)
        shutil.rmtree(self.work, ignore_errors=True)


def sweep() -> None:
    """Delete the folders of agents that were killed, which no process locks."""
    for path in _abandoned_folders():
        logger.info("folder of a killed agent is removed: path=%s", path)
        store.remove(path)


def _abandoned_folders() -> Iterator[Path]:
    for parent in {SHM, Path(tempfile.gettempdir())}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if entry.name.startswith(PREFIX) and _is_abandoned(Path(entry.path)):
                    yield Path(entry.path)


def _is_abandoned(path: Path) -> bool:
    """Return True if a path is an agent's folder of this user that no agent uses."""
    lock = path / LOCK
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            return False
        # other users can write to /tmp too: do not follow their links
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
    """Create a locked folder and return it with the descriptor of its lock.

    It gets its final name only when it is locked, so that no other agent sweeps it in between.
    """
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}", dir=parent))
    descriptor = _lock(hidden)
    return hidden.rename(hidden.with_name(hidden.name[1:])), descriptor


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    # on a file system without locks, other agents do not sweep its folders either
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


CODE = Path(skymagic.__file__).parents[1]
"""Folder that skymagic is imported from."""
WRITE_INTERVAL = 1.0
"""Minimum seconds between two writes: cells may follow each other faster."""


class RecordFile:
    """The agent's record as a file.

    A folder that is not writable gets no record, without an error.

    Args:
        path: of the file; None for an agent that ends with its notebook, which no other process
            needs to find.
        spec: the agent's specification.
    """

    def __init__(self, path: str | None, spec: wire.AgentSpec) -> None:
        self.path = None if path is None else Path(path)
        self._identity = identity()
        self._written_at = float("-inf")
        self._state: tuple[bool, bool, Mapping[int, int]] = (False, False, {})
        # when the next write is due (monotonic seconds); None while it is up to date
        self.due: float | None = None
        now = time.time()
        self._record = AgentRecord(
            version=spec.version,
            pool=spec.pool,
            job_id=spec.job_id,
            node=spec.node,
            nodes=spec.nodes,
            client=spec.client,
            hostname=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            started=now,
            idle_since=now,
            devices=spec.devices,
            uses=folders_in_use() if path else (),
            idle_timeout=spec.idle_timeout,
            max_lifetime=spec.max_lifetime,
            detached_timeout=spec.detached_timeout,
        )
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.with_name(ENDED).unlink()  # it is about the previous agent
            self._write(self.path)

    def ended_by(self) -> str:
        """Return who ended this agent from outside, or "" if unknown."""
        return "" if self.path is None else ended_by(self.path.parent)

    def update(self, lifetime: Lifetime, pids: Callable[[], Mapping[int, int]]) -> None:
        """Record what has changed, and write the file unless the last write was too recent."""
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
            # renamed, so that no reader finds half of a record
            part.replace(path)


def folders_in_use() -> tuple[str, ...]:
    """Return the folders that this process needs, and mark those that skymagic made as used now."""
    prefix = Path(sys.prefix)
    marks = [prefix / ".ready"] if prefix.parent.name == "env" else []
    marks += [CODE] if CODE.parent.name == "code" else []
    for mark in marks:
        with contextlib.suppress(OSError):
            os.utime(mark)
    return (str(prefix), str(CODE))
