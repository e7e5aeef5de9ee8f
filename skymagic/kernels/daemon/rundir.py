"""The run directory of a daemon: socket, log, and the check that only this user can enter it.

It is named after the user and the daemon, mode 0700. Every user can make a folder in a shared
place, so a folder that belongs to another user, or that others can enter, is skipped, and the next
location is tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator

from skymagic.wire.record import FILE, READERS, SOCKET, connect, folders, why_unsafe

MAX_SOCKET_PATH = 100
"""Maximum length in bytes of a Unix socket's path that every system accepts."""
STALE_AFTER = 3600.0
"""Seconds to keep the folder of a killed daemon, because it may hold the reason."""
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class RunDirectoryError(Exception):
    """No usable run directory for the daemon; the message has the reason and what to do."""


class RunDirectory:
    """Run directory of one daemon: an existing folder that only this user can enter."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.socket = os.path.join(path, SOCKET)
        self.errors = os.path.join(path, "agent.err")
        self.log = os.path.join(path, "daemon.log")
        # the agent's record for other processes on this machine
        self.record = os.path.join(path, FILE)
        self.readers = os.path.join(path, READERS)  # the agent's socket for readers

    def connect(self) -> socket.socket | None:
        """Connect to the daemon, or return None if this user has none there."""
        return connect(self.path)

    def listen(self) -> socket.socket:
        """Create the socket of a new daemon, replacing one that is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self.socket)
        sock.listen(8)
        return sock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Serialize starts of the same daemon, if the file system has locks.

        NFS has none without lockd, and never on folders. There, two daemons of one name may start
        when the notebook retries during its first attempt; the earlier one gets no connection and
        ends by itself.
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
        """Return the end of the daemon's log, which is empty unless it failed."""
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
    """Return the possible paths of a daemon's run directory, the best first."""
    if not NAME_PATTERN.fullmatch(name):
        raise RunDirectoryError(
            f"{name!r} cannot name a daemon: letters, digits, '.', '_' and '-' only, 80 at most"
        )
    return folders(name)


def find(name: str) -> RunDirectory | None:
    """Return the folder of a daemon that was started, or None if this user has none."""
    return next((RunDirectory(path) for path in candidates(name) if why_unsafe(path) is None), None)


def make(name: str) -> RunDirectory:
    """Return the folder for a new daemon, which an earlier start may have made.

    Raises:
        RunDirectoryError: no candidate is usable; the message has the reason for each.
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
    """Remove neighboring folders of daemons that died a while ago.

    They were killed, or ended with their machine.
    """
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
            # a daemon that is being started there does not listen yet, but its starter has the lock
            with other.locked():
                if (sock := other.connect()) is None:
                    other.remove()
                else:
                    sock.close()
