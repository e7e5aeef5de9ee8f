"""What the kernel tells of limits: fields of its files, and what cgroups leave to this process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60
"""What is above this stands for no limit, as cgroups of version 1 write it."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def text(path: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def field(told: str, name: str) -> int | None:
    """A number behind a name, as ``/proc/meminfo`` and ``memory.stat`` have them."""
    found = re.search(rf"^{name}:?\s+(\d+)", told, re.MULTILINE)
    return int(found[1]) if found else None


def of_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) in this process's own cgroup and in each above it, where there is a limit.

    Args:
        controller: ``memory``, in bytes, or ``pids``.
    """
    for line in text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, most, now, cache = cgroups, f"{controller}.max", f"{controller}.current", "inactive_file"
        elif controller in controllers.split(","):
            top, cache = cgroups / controller, "total_inactive_file"
            most, now = ("pids.max", "pids.current") if controller == "pids" else (
                "memory.limit_in_bytes", "memory.usage_in_bytes"
            )  # fmt: skip
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit, used = text(folder / most).strip(), text(folder / now).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
                # the kernel gives up this cache before it refuses memory
                given_up = (field(text(folder / "memory.stat"), cache) or 0) * (controller == "memory")
                yield int(limit), int(limit) - int(used) + given_up


def memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[tuple[int, int]]:
    """(limit, what is left of it) in bytes: of this machine, and of the cgroups that this process is in."""
    told = text(proc / "meminfo")
    total, left = field(told, "MemTotal"), field(told, "MemAvailable")
    machine = [] if total is None or left is None else [(total * 1024, left * 1024)]
    return [*machine, *of_groups("memory", proc, cgroups)]
