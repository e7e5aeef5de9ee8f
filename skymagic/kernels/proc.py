"""Linux's information about processes (proc(5)), and requests to it (prctl(2)).

Resource trackers (of multiprocessing and loky) delete the leftovers of other processes in shared
memory, and end once all holders of the other end of their pipe are gone: code that ends processes
gives them time for that.
"""

from __future__ import annotations

import contextlib
import os
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TRACKER_SECONDS = 3.0
"""Seconds for resource trackers to delete the shared memory of killed processes.

Gigabytes take one second. This is less than the agent waits for the forkserver, which gives
trackers the same time.
"""
MAX_COMMAND_LINE = 120
"""Maximum number of characters of a command line that are reported."""


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def status(pid: int | str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on. Raises OSError.

    Args:
        pid: a process, or a thread as ``PID/task/TID``.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # a name may contain blanks and brackets


def processor_seconds(fields: list[bytes]) -> float:
    """Return the processor seconds in a `status`."""
    # utime and stime, in clock ticks
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_proc(pid: int, name: str) -> bytes:
    """Return the contents of ``/proc/PID/NAME``, b"" if it is not readable."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def is_tracker(pid: int) -> bool:
    """Return True for a resource tracker."""
    # multiprocessing's command: python -c "from multiprocessing.resource_tracker import main;…"
    return b"resource_tracker" in read_proc(pid, "cmdline")


def command_line(pid: int) -> str:
    """Return the shortened command line of a process, or its number if unknown."""
    if text := " ".join(read_proc(pid, "cmdline").decode(errors="replace").split("\0")).strip():
        return text if len(text) <= MAX_COMMAND_LINE else text[: MAX_COMMAND_LINE - 1] + "…"
    return f"process {pid}"


def processes_with_mark(mark: bytes, group: int, since: int) -> dict[int, tuple[int, int]]:
    """Return the live processes (pid → start time, process group) with a mark or in a group.

    Args:
        mark: entry in the environment.
        group: process group.
        since: earliest start time.
    """
    processes = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, member_of, *_ = fields = status(name)
            # skip zombies; field 19 is the start time in clock ticks since boot
            if state in (b"Z", b"X") or (start_time := int(fields[19])) < since:
                continue
            if int(member_of) == group or mark in read_proc(int(name), "environ").split(b"\0"):
                processes[int(name)] = start_time, int(member_of)
    return processes
