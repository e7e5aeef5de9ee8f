"""An agent's record about itself, for logins that know nothing about its pool.

The file has two lines: the agent's ``PID TICKS BOOT``, from which a shell can check that it is
still running, and the record as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from dataclasses import field, fields
from pathlib import Path

from skymagic.wire.codec import Codec, FrozenMessage
from skymagic.wire.processes import boot_id, started
from skymagic.wire.untrusted import sanitized_line

FILE = "record"
"""Name of the record in a daemon's run directory."""
SOCKET = "socket"
"""Name of the daemon's listening socket in its run directory."""
CONNECT_TIMEOUT = 10.0
"""Seconds that a daemon may take to accept a connection.

It does nothing else meanwhile, so only a stopped daemon takes longer.
"""
ENDED = "ended"
"""File in the run directory that names the user or program that ends the agent from outside,
written before the agent is signalled.
"""
MAX_ENDED = 500
"""Most bytes to read from that file."""
READERS = "read"
"""Name of the agent's socket for read-only clients in its run directory."""


def folders(daemon: str) -> list[str]:
    """Return the candidates for a daemon's run directory on its node, best first."""
    name = f"skymagic-daemon-{os.getuid()}-{daemon}"
    # - /tmp is first although anybody can create such a folder there: `why_unsafe` rejects those,
    #   and `connect` checks which user is listening.
    # - Not XDG_RUNTIME_DIR, nor TMPDIR first: they may belong to one login and be removed when it
    #   ends, and a daemon outlives its login.
    # - Not the home folder first: hosts may share one over NFS, where a Unix socket works only on
    #   the host that created it, flock may be missing, and two hosts' folders of one job lie side
    #   by side. A long home path also leaves no room for a socket's path (108 bytes on Linux).
    # Also listed in sh, which reads the records without Python: bootstrap/running.py,
    # providers/aws/watchdog.py.
    run = str(Path("~/.skymagic/run").expanduser())
    parents = ["/tmp", run, os.environ.get("TMPDIR", "/var/tmp")]
    return [f"{parent}/{name}" for parent in dict.fromkeys(parents)]


def why_unsafe(folder: str) -> str | None:
    """Return why a run directory must not be used, or None if it is this user's alone.

    Anybody can create one in a shared folder such as /tmp.
    """
    try:
        # Not `stat`: the owner of a link can point it elsewhere after this check.
        status = os.lstat(folder)
    except OSError as problem:
        return problem.strerror or "not there"
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder"
    if status.st_uid != os.getuid():
        return "belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "others can enter it"
    return None


def connect(folder: str) -> socket.socket | None:
    """Connect to the daemon that listens in this user's run directory.

    Return None if none does in time.
    """
    # Another user's socket must not pass for the daemon's.
    if why_unsafe(folder) is not None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # connect(2) blocks for ever if the backlog is full and nothing accepts
        sock.settimeout(CONNECT_TIMEOUT)
        sock.connect(f"{folder}/{SOCKET}")
        sock.settimeout(None)
        # In a shared folder without the sticky bit, others can swap folders after the check.
        if hasattr(socket, "SO_PEERCRED"):
            _, uid, _ = struct.unpack(
                "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if uid != os.getuid():
                raise PermissionError("another user listens there")
    except OSError:
        sock.close()
        return None
    return sock


def answers(daemon: str) -> bool:
    """Return True if this user's daemon with this name is listening on this machine."""
    for folder in folders(daemon):
        if (sock := connect(folder)) is not None:
            sock.close()
            return True
    return False


class AgentRecord(FrozenMessage):
    """Node of a pool. Times are seconds since 1970 by the node's clock; 0 if not applicable."""

    version: str
    """Version of skymagic."""
    pool: str
    job_id: str
    node: int
    nodes: int
    """Number of nodes in the pool."""
    client: str
    """User and machine that started it: ``ann@laptop``."""
    hostname: str
    boot: str
    """Boot id of the machine; equal for two names of one machine."""
    pid: int
    started: float
    busy_since: float = 0.0
    """Start of the current run."""
    idle_since: float = 0.0
    away_since: float = 0.0
    """Time since the notebook has been disconnected."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Rank → process id."""
    devices: tuple[int, ...] = ()
    """GPUs that its ranks see, numbered as their machine numbers them."""
    uses: tuple[str, ...] = ()
    """Folders on its disk that must not be deleted: its environment, skymagic's code."""
    idle_timeout: float | None = None
    max_lifetime: float | None = None
    detached_timeout: float | None = None


RECORD: Codec[AgentRecord] = Codec(AgentRecord, max_line=1 << 20)


def read(line: str) -> AgentRecord | None:
    """Return the record in a file's second line, or None if required fields are missing.

    Fields added by other versions are ignored. Control characters in texts are escaped, because
    they come from a host and are printed in terminals.
    """
    try:
        kind, values = json.loads(line)
        # Ignore fields that another version added.
        field_names = {attribute.name for attribute in fields(AgentRecord)}
        texts = {
            k: sanitized_line(v) if isinstance(v, str) else v
            for k, v in values.items()
            if k in field_names
        }
        return RECORD.decode(json.dumps([kind, texts]).encode())
    except (ValueError, TypeError, AttributeError):
        return None


def ended_by(folder: Path) -> str:
    """Return who ended the agent of this run directory from outside, or "" if not recorded."""
    with contextlib.suppress(OSError), open(folder / ENDED, "rb") as file:
        return sanitized_line(file.read(MAX_ENDED).decode(errors="replace").strip())
    return ""


def identity(pid: int | None = None) -> str:
    """Return ``PID START BOOT``, which identifies a process across pid reuse.

    Args:
        pid: the process; this one by default.
    """
    pid = os.getpid() if pid is None else pid
    # A machine without a boot id has a name with a blank instead, which would add a fourth word.
    return f"{pid} {started(pid)} {boot_id().replace(' ', '-')}"
