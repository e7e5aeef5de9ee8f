"""Processes: which module one starts in another, how one is signalled that is known by its number alone, and how one ended, in words.

``python -m`` runs the first nine modules, each in a process of its own; a rank is forked, and what it runs is imported there.
`tests/test_house.py` reads this table of process boundaries, which no import shows: no other module names one of ours in a string.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymagic.wire.agent import RankExited

AGENT = "skymagic.kernels.agent.agent"
"""A node's agent on this machine: started by the notebook (`providers.local`)."""
ATTACH = "skymagic.kernels.daemon.attach"
"""The way to a node's daemon, which keeps its agent: started over each SSH connection (`providers.ssh`)."""
READERS_ONLY = "--read"
"""Its first argument where it leads past the daemon, to the agent, for those who only read logs (`api.logs`)."""
HOLDER = "SKYMAGIC_HOLDER"
"""The environment variable that names the folder of a node's holder, which starts daemons (`kernels.daemon.attach`)."""
SITE = "SKYMAGIC_SITE"
"""The environment variable of a holder that has run a site's prologue, whose PATH daemons have as well."""
CONTROLLER = "skymagic.kernels.agent.controller"
"""ipyparallel's controller: started by the head's agent."""
VALUES = "skymagic.kernels.store.server"
"""A node's value server: started by the notebook (`pool.resources`)."""
FILES = "skymagic.kernels.files"
"""A node's end of copying files: started by the notebook, once for each copy (`pool`)."""
CHECK = "skymagic.kernels.check"
"""A node's end of a check: started by the notebook, once for each check (`cluster.checking`)."""
NOTEBOOK = "skymagic.kernels.daemon.notebook"
"""Notebook jobs on a pool's head: started by the client, once for each request (`api.notebooks`)."""
NOTEBOOK_JOB = "SKYMAGIC_NOTEBOOK_JOB"
"""The environment variable that names the folder of the notebook job that a process belongs to."""
NOTEBOOK_KERNEL = "kernel"
"""A file in that folder, in which the kernel names its process (`pool.making`)."""
NOTEBOOK_CLOSED = "closed"
"""A file in that folder, made when the notebook itself ends its pool (`pool.registry`)."""
RELAY = "skymagic.kernels.relay"
"""What starts processes on another node for the head, where a notebook is executed (`api.notebooks`)."""
RANK = "skymagic.kernels.rank.entry"
"""What a rank runs: imported by a node's forkserver before it forks."""
SCRIPT = "skymagic.kernels.script.script"
"""What a cell of %%sky_sh runs on a rank (`jobs.script`)."""


# -- which machine, and which boot of it -----------------------------------------------------------


def boot_id() -> str:
    """Equal for all processes of one running system; changes when it boots. Where the system has none: its name."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return f"{socket.gethostname()} {sys.platform}"


# -- signals ---------------------------------------------------------------------------------------


def started(pid: int) -> int:
    """When a process was started, in the system's ticks since its boot; 0 if it has gone, or the system does not tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # a name may hold blanks and brackets
        return (
            0 if fields[0] in b"ZX" else int(fields[19])
        )  # one that its parent has not waited for yet has ended too
    return 0


def send_signal(pid: int, begun: int, signum: int) -> bool:
    """Signal the process that was started at `begun` (`started`); whether it was still there.

    Raises:
        OSError: there is no such signal.
    """
    if not hasattr(os, "pidfd_open"):  # nor is there a start time
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            return True
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started(pid) != begun:
            return False
        signal.pidfd_send_signal(process, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


# -- how a process ended ---------------------------------------------------------------------------


UNFIT = "skymagic: this rank could not send replies any more, and has exited"
"""The beginning of the last line that such a rank writes."""


def describe(exited: RankExited) -> str:
    """How a rank's process ended."""
    last = exited.tail.rstrip().rpartition("\n")[2]
    if last.startswith(UNFIT):
        return f"it could not send replies any more{last.removeprefix(UNFIT)}"
    return status_words(exited.status, exited.out_of_memory)


def status_words(status: int | None, out_of_memory: bool = False) -> str:
    """An exit status as `subprocess` gives it: an exit code, or negative for a signal; None where it is not known."""
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
    """ "SIGKILL"; "signal 40" for one without a name, such as the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
