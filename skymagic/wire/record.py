"""What a node's agent writes about itself next to its daemon's socket, for logins that know nothing of its pool.

The file is two lines: ``PID TICKS BOOT`` of the agent, by which a shell sees whether it lives still, and the record as JSON.
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
"""The record's name in a daemon's run directory."""
SOCKET = "socket"
"""The name there of what the daemon listens on."""
CONNECT_TIMEOUT = 10.0
"""Seconds in which a daemon accepts a connection; it does nothing else meanwhile, so that only a stopped one takes longer."""
ENDED = "ended"
"""The name there of the file in which whoever ends the agent from outside says who that is, before the agent is signalled."""
MAX_ENDED = 500
"""Bytes that are read of it."""
READERS = "read"
"""The name there of the agent's socket for those who only read."""


def folders(daemon: str) -> list[str]:
    """Where a daemon's run directory may lie on its node, the best first."""
    name = f"skymagic-daemon-{os.getuid()}-{daemon}"
    # - /tmp is first although anybody can make such a folder there: `why_unsafe` passes over it, and `connect` asks who listens.
    # - Not XDG_RUNTIME_DIR, nor TMPDIR first: they may belong to one login, and are removed when that ends; a daemon outlives it.
    # - Not the home first: hosts may share one over NFS, where a Unix socket works on the host that made it alone, flock may be missing,
    #   and two hosts' folders of one job lie side by side. With a long home's path a socket's has no room (108 bytes on Linux).
    # Also listed in sh, which reads the records without Python: bootstrap/running.py, providers/aws/watchdog.py.
    run = str(Path("~/.skymagic/run").expanduser())
    parents = ["/tmp", run, os.environ.get("TMPDIR", "/var/tmp")]
    return [f"{parent}/{name}" for parent in dict.fromkeys(parents)]


def why_unsafe(folder: str) -> str | None:
    """Why a run directory must not be used: anybody can make one in a shared place. None if it is this user's alone."""
    try:
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
    """A connection to the daemon that listens in a run directory of this user's; None where none does, or not in time."""
    if why_unsafe(folder) is not None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(
            CONNECT_TIMEOUT
        )  # connect(2) waits for ever where nobody accepts and the backlog is full
        sock.connect(f"{folder}/{SOCKET}")
        sock.settimeout(None)
        # in a shared place without the sticky bit, others can exchange folders after the check
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
    """Whether a daemon of this user's with this name listens on this machine."""
    for folder in folders(daemon):
        if (sock := connect(folder)) is not None:
            sock.close()
            return True
    return False


class AgentRecord(FrozenMessage):
    """One node of a pool. Times are seconds since 1970 by the node's clock; 0 where something is not so."""

    version: str
    """skymagic's."""
    pool: str
    job_id: str
    node: int
    nodes: int
    """How many the pool has."""
    client: str
    """Who started it, and where: ``ann@laptop``."""
    hostname: str
    boot: str
    """The machine's boot id: two names of one machine have the same."""
    pid: int
    started: float
    busy_since: float = 0.0
    """Since when a run is at work."""
    idle_since: float = 0.0
    away_since: float = 0.0
    """Since when its notebook is not connected."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Rank → process id."""
    devices: tuple[int, ...] = ()
    """The GPUs that its ranks see, as their machine counts them."""
    uses: tuple[str, ...] = ()
    """Folders on its disk that must stay: its environment, skymagic's code."""
    idle_timeout: float | None = None
    max_lifetime: float | None = None
    detached_timeout: float | None = None


RECORD: Codec[AgentRecord] = Codec(AgentRecord, max_line=1 << 20)


def read(line: str) -> AgentRecord | None:
    """The record in a file's second line; what another version has added is left out. None where it says too little.

    Its texts come from a host and go to terminals, so that control characters in them are escaped.
    """
    try:
        kind, values = json.loads(line)
        known = {one.name for one in fields(AgentRecord)}
        texts = {
            k: sanitized_line(v) if isinstance(v, str) else v
            for k, v in values.items()
            if k in known
        }
        return RECORD.decode(json.dumps([kind, texts]).encode())
    except (ValueError, TypeError, AttributeError):
        return None


def ended_by(folder: Path) -> str:
    """Return who has ended the agent of this run directory from outside, or "" if nobody has said so."""
    with contextlib.suppress(OSError), open(folder / ENDED, "rb") as file:
        return sanitized_line(file.read(MAX_ENDED).decode(errors="replace").strip())
    return ""


def identity(pid: int | None = None) -> str:
    """``PID TICKS BOOT``: a process (this one by default), told from a later one of the same number. TICKS is 0 outside Linux."""
    pid = os.getpid() if pid is None else pid
    return f"{pid} {started(pid)} {boot_id().replace(' ', '-')}"
