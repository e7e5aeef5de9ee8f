"""Whether the system has killed processes for want of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, in this cgroup and on this machine."""
    count = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    count += int(value)
    return count
