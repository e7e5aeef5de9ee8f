"""Signals to processes that are known by their number alone, which is another process's when theirs has ended.

A pidfd holds one process; that it is the one meant is told by its start time, which no later process of that number shares.
"""

from __future__ import annotations

import contextlib
import os
import signal


def started(pid: int) -> int:
    """When a process was started, in the system's ticks since its boot; 0 if it has gone, or the system does not tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # a name may hold blanks and brackets
        return 0 if fields[0] in b"ZX" else int(fields[19])  # one that its parent has not waited for yet has ended too
    return 0


def send(pid: int, begun: int, signum: int) -> bool:
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
