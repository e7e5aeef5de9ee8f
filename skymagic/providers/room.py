"""What this machine has left for more processes, by the limits that the kernel, the user's session and a container set."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from skymagic.plan.limits import MOST_DESCRIPTORS, Room
from skymagic.runtime import usage

CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 1 << 21, 1 << 24
"""Who has one of these is not held to RLIMIT_NPROC."""


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """What is left here now; nothing is known where there is no /proc.

    Args:
        proc, cgroups: where the kernel tells.
    """
    memory = [left for _, left in usage.memory_limits(proc, cgroups)]
    tasks = [_tasks_of_user(proc), *(left for _, left in usage.cgroup_limits("pids", proc, cgroups))]
    return Room(
        tasks=min((n for n in tasks if n is not None), default=None),
        nbytes=min(memory, default=None),
        descriptors=descriptors(),
    )


def descriptors() -> int:
    """How many files a process that a pool starts may have open: its agent raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)


def _tasks_of_user(proc: Path) -> int | None:
    """What RLIMIT_NPROC leaves, which counts the threads of all processes of this user."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)", usage.kernel_text(proc / "self/status"), re.MULTILINE)
    if limit == resource.RLIM_INFINITY or capable is None or int(capable[1], 16) & (CAP_SYS_ADMIN | CAP_SYS_RESOURCE):
        return None
    statuses = (usage.kernel_text(path) for path in proc.glob("[0-9]*/status"))
    mine = (
        usage.kernel_field(text, "Threads") or 0 for text in statuses if usage.kernel_field(text, "Uid") == os.getuid()
    )
    return limit - sum(mine)
