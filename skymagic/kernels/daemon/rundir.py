"""The run directory of a daemon: its socket, its log, and the checks that it is ours alone.

It is named after the user and the daemon, mode 0700. Anybody can make a folder in a shared place, so one that is not
ours, or that others can enter, is passed over and the next place is tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator

from skymagic.wire.record import FILE, READERS, SOCKET, connect, folders, why_unsafe

MAX_SOCKET_PATH = 100
"""Bytes that a Unix socket's path may have on every system."""
STALE_AFTER = 3600.0
"""Seconds for which the folder of a daemon that was killed is kept: it may hold the reason."""
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class RunDirectoryError(Exception):
    """No run directory for the daemon; says why and what to do."""


class RunDirectory:
    """The run directory of one daemon: a folder that exists and is ours."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = os.path.join(path, SOCKET)
        self.errors = os.path.join(path, "agent.err")
        self.log = os.path.join(path, "daemon.log")
        self.record = os.path.join(
            path, FILE
        )  # what the agent tells others on this machine of itself
        self.readers = os.path.join(path, READERS)  # where the agent serves those who only read

    def connect(self) -> socket.socket | None:
        """A connection to the daemon; None if there is none of ours."""
        return connect(self.path)

    def listen(self) -> socket.socket:
        """A socket for a new daemon to accept on, in the place of one that is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.socket)
        sock.listen(8)
        return sock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Serialize starts of the same daemon, where the file system has locks.

        NFS has none where no lockd runs, and never of folders. Two daemons of one name may start there when the notebook
        has tried again while its first attempt was under way; nobody attaches to the earlier one, which ends by itself.
        """
        import fcntl

        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def log_tail(self) -> str:
        """The end of the daemon's log, which is empty unless it failed."""
        with contextlib.suppress(OSError), open(self.log, errors="replace") as file:
            return file.read()[-4000:].strip()
        return ""

    def remove(self) -> None:
        """Delete the folder; twice is safe."""
        with contextlib.suppress(OSError):
            for entry in os.listdir(self.path):
                os.unlink(os.path.join(self.path, entry))
            os.rmdir(self.path)


def candidates(name: str) -> list[str]:
    """Where a daemon's run directory may lie, the best first."""
    if not NAME_PATTERN.fullmatch(name):
        raise RunDirectoryError(
            f"{name!r} cannot name a daemon: letters, digits, '.', '_' and '-' only, 80 at most"
        )
    return folders(name)


def find(name: str) -> RunDirectory | None:
    """The folder of a daemon that was started; None if there is none of ours."""
    return next((RunDirectory(path) for path in candidates(name) if why_unsafe(path) is None), None)


def make(name: str) -> RunDirectory:
    """A folder for a new daemon, or the one that an earlier start has made.

    Raises:
        RunDirectoryError: none of the candidates will do; says why, one by one.
    """
    refusals: list[str] = []
    for path in candidates(name):
        if len(os.fsencode(path)) + len("/socket") > MAX_SOCKET_PATH:
            refusals.append(f"{path}: too long for a socket's path")
            continue
        try:
            if "/.skymagic/" in path:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        except OSError as problem:
            refusals.append(f"{path}: {problem.strerror}")
            continue
        if (reason := why_unsafe(path)) is None:
            return RunDirectory(path)
        refusals.append(f"{path}: {reason}")
    raise RunDirectoryError("no place for the daemon's folder: " + "; ".join(refusals))


def sweep(own_directory: RunDirectory, now: float) -> None:
    """Remove folders beside this one whose daemons were killed, or ended with their machine, a while ago."""
    parent, own = os.path.split(own_directory.path)
    prefix = own[: own.index("-", len("skymagic-daemon-")) + 1]
    for path in [entry.path for entry in os.scandir(parent) if entry.name.startswith(prefix)]:
        with contextlib.suppress(OSError):
            if (
                path == own_directory.path
                or why_unsafe(path) is not None
                or os.stat(path).st_mtime > now - STALE_AFTER
            ):
                continue
            other = RunDirectory(path)
            with other.locked():
                if (sock := other.connect()) is None:
                    other.remove()
                else:
                    sock.close()
