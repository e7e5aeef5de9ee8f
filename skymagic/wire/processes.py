"""Processes: modules that they start in one another, signals by pid, descriptions of exit statuses.

``python -m`` runs each of the first ten modules in a separate process. A rank is forked and
imports its module after that. `tests/test_layers.py` reads this table of process boundaries, which
imports do not show: no other module names one of skymagic's modules in a string.
"""

from __future__ import annotations

import calendar
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymagic.wire.agent import RankExited

AGENT = "skymagic.kernels.agent.agent"
"""A node's agent on this machine; started by the notebook (`providers.local`)."""
ATTACH = "skymagic.kernels.daemon.attach"
"""Connection to a node's daemon, which keeps its agent; started over each SSH connection
(`providers.ssh`).
"""
READERS_ONLY = "--read"
"""First argument of `ATTACH` to bypass the daemon and connect to the agent, for readers of logs
(`api.logs`).
"""
HOLDER = "SKYMAGIC_HOLDER"
"""Environment variable with the folder of a node's holder, which starts daemons
(`kernels.daemon.attach`).
"""
SITE = "SKYMAGIC_SITE"
"""Environment variable of a holder that has run a site's prologue; daemons inherit its PATH."""
VALUES = "skymagic.kernels.store.server"
"""A node's value server; started by the notebook (`pool.resources`)."""
TRANSFER_SERVER = "skymagic.kernels.transfer_server"
"""A node's end of a file copy; started by the notebook, once for each copy (`pool`)."""
CHECK = "skymagic.kernels.check"
"""A node's end of a check; started by the notebook, once for each check (`cluster.checking`)."""
DEBUG_ENTRIES = "skymagic.kernels.debug_entries"
"""Reader of a node's debug logs; started by the notebook, once for each request
(`api.debug_logs`).
"""
NOTEBOOK = "skymagic.kernels.daemon.notebook"
"""Notebook jobs on a pool's head; started by the client, once for each request (`api.notebooks`).
"""
NOTEBOOK_JOB = "SKYMAGIC_NOTEBOOK_JOB"
"""Environment variable with the folder of the notebook job that a process belongs to."""
NOTEBOOK_KERNEL = "kernel"
"""A file in that folder that identifies the kernel's process (`pool.launch`)."""
NOTEBOOK_CLOSED = "closed"
"""A file in that folder, created when the notebook itself ends its pool (`pool.registry`)."""
RELAY = "skymagic.kernels.relay"
"""Starts processes on another node for the head while it executes a notebook (`api.notebooks`)."""
RANK = "skymagic.kernels.rank.entry"
"""Main module of a rank; imported by a node's forkserver before it forks."""
SCRIPT = "skymagic.kernels.script.script"
"""Runs a %%sky_sh cell on a rank (`jobs.script`)."""


# -- which machine, and which boot of it -----------------------------------------------------------


def boot_id() -> str:
    """Return an id shared by all processes of one running system, which changes at each boot.

    Falls back to the host name if the system has no boot id.
    """
    # Also equal in all containers of a machine, which usually have different host names.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return f"{socket.gethostname()} {sys.platform}"


# -- signals ---------------------------------------------------------------------------------------


def started(pid: int) -> int:
    """Return a process's start time, or 0 if it has ended or the time is unknown.

    A zombie, which its parent has not waited for yet, counts as ended. The unit is a tick since
    boot on Linux, and a second since 1970 elsewhere.
    """
    # macOS has no /proc, and no call of Python's tells the start time of another process.
    if sys.platform != "linux":
        return _started_by_ps(pid)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # the process name may contain blanks and brackets
        fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in b"ZX" else int(fields[19])
    return 0


def _started_by_ps(pid: int) -> int:
    """Return the start time that ps prints, as in ``Ss   Sat Nov 28 19:30:12 2026``."""
    # LC_ALL and TZ: else the date is in the user's language, and changes with daylight saving time
    words = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    ).stdout.split(maxsplit=1)
    if len(words) != 2 or words[0].startswith("Z"):
        return 0
    return calendar.timegm(time.strptime(words[1].strip(), "%a %b %d %H:%M:%S %Y"))


def send_signal(pid: int, start_time: int, signum: int) -> bool:
    """Signal the process that started at `start_time` (see `started`).

    Returns:
        True if it still existed.

    Raises:
        OSError: the signal does not exist.
    """
    if not hasattr(os, "pidfd_open"):
        # The pid may be reused between the comparison and the signal, which only Linux can avoid.
        with contextlib.suppress(ProcessLookupError):
            if not start_time or started(pid) == start_time:
                os.kill(pid, signum)
                return True
        return False
    try:
        # Pin the process before its start time is compared: the pid could be reused in between.
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started(pid) != start_time:
            return False
        signal.pidfd_send_signal(process, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


# -- how a process ended ---------------------------------------------------------------------------


UNFIT = "skymagic: this rank could not send replies any more, and has exited"
"""Start of the last line written by such a rank."""


def describe(exited: RankExited) -> str:
    """Describe how a rank's process ended."""
    last = exited.tail.rstrip().rpartition("\n")[2]
    # The rank itself gave the reason before it exited.
    if last.startswith(UNFIT):
        return f"it could not send replies any more{last.removeprefix(UNFIT)}"
    return status_words(exited.status, exited.out_of_memory)


def status_words(status: int | None, out_of_memory: bool = False) -> str:
    """Describe an exit status of `subprocess`: a code, negative for a signal, None if unknown."""
    if status is None:
        return "it is unknown how"
    if status >= 0:
        return f"exit code {status}"
    name = signal_name(-status)
    hints = {
        "SIGSEGV": "a segmentation fault in native code",
        "SIGBUS": "often a full /dev/shm",
        "SIGABRT": "native code called abort()",
        "SIGKILL": "the machine ran out of memory"
        if out_of_memory
        else "killed from outside, or out of memory",
    }
    return f"{name}: {hints[name]}" if name in hints else name


def signal_name(number: int) -> str:
    """Return a signal's name, or "signal 40" for one without a name, such as real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
