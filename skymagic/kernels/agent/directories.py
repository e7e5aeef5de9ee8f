"""The folders of a node's agent: made for the owner alone, locked while somebody uses them, and swept when nobody does any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from skymagic.data.store import store

PREFIX = "skymagic-"
LOCK = ".agent"
"""The file in each folder whose lock the agent holds as long as it lives."""
SHM = Path("/dev/shm")


class Directories:
    """Owns the agent's folder, with logs and connection files, and the node's store, in memory where that is possible.

    Args:
        job_id: part of their names.
    """

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
    with contextlib.suppress(OSError):  # a file system without locks: its folders are not swept by others either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
