"""What Linux tells of processes (proc(5)), and asks of them (prctl(2)).

Resource trackers (of multiprocessing and loky) delete what others have left in shared memory, and end once all are gone that hold the other
end of their pipe: whoever ends processes gives them time for that.
"""

from __future__ import annotations

import contextlib
import os
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TRACKER_SECONDS = 3.0
"""For which resource trackers may delete what the killed have left in shared memory: gigabytes take one. Less than the agent waits for
the forkserver, which gives them the same time."""
MAX_COMMAND_LINE = 120
"""Characters of a command line that are told."""


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def status(pid: int | str) -> list[bytes]:
    """What the system tells of a process, or of a thread (``PID/task/TID``), from its state on (``/proc/PID/stat``). Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # a name may hold blanks and brackets


def processor_seconds(fields: list[bytes]) -> float:
    """Seconds on the processor, of a `status`."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told(pid: int, name: str) -> bytes:
    """What the system tells of a process in ``/proc/PID/NAME``; nothing where it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def is_tracker(pid: int) -> bool:
    """Whether it is a resource tracker."""
    return b"resource_tracker" in told(pid, "cmdline")


def command_line(pid: int) -> str:
    """What a process was started as, shortened; its number where the system does not tell."""
    if words := " ".join(told(pid, "cmdline").decode(errors="replace").split("\0")).strip():
        return words if len(words) <= MAX_COMMAND_LINE else words[: MAX_COMMAND_LINE - 1] + "…"
    return f"process {pid}"


def marked(mark: bytes, group: int, since: int) -> dict[int, tuple[int, int]]:
    """The living processes (pid → start, process group) that were started from `since` on, with an entry in the environment or in a
    process group."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, member_of, *_ = fields = status(name)
            if state in (b"Z", b"X") or (begun := int(fields[19])) < since:
                continue
            if int(member_of) == group or mark in told(int(name), "environ").split(b"\0"):
                found[int(name)] = begun, int(member_of)
    return found
