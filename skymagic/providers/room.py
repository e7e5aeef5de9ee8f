"""What this machine has left for more processes, by the limits that the kernel, the user's session and a container set."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from skymagic.plan.capacity import MOST_DESCRIPTORS, Room

UNLIMITED = 1 << 60
"""What is above this stands for no limit, as cgroups of version 1 write it."""
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 1 << 21, 1 << 24
"""Who has one of these is not held to RLIMIT_NPROC."""


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """What is left here now; nothing is known where there is no /proc.

    Args:
        proc, cgroups: where the kernel tells.
    """
    memory = [_free_memory(proc), *_left(proc, cgroups, "memory")]
    tasks = [_tasks_of_user(proc), *_left(proc, cgroups, "pids")]
    return Room(
        tasks=min((n for n in tasks if n is not None), default=None),
        nbytes=min((n for n in memory if n is not None), default=None),
        descriptors=descriptors(),
    )


def descriptors() -> int:
    """How many files a process that a pool starts may have open: its agent raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:?\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def _free_memory(proc: Path) -> int | None:
    kilobytes = _field(_text(proc / "meminfo"), "MemAvailable")
    return None if kilobytes is None else kilobytes * 1024


def _tasks_of_user(proc: Path) -> int | None:
    """What RLIMIT_NPROC leaves, which counts the threads of all processes of this user."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)", _text(proc / "self/status"), re.MULTILINE)
    if limit == resource.RLIM_INFINITY or capable is None or int(capable[1], 16) & (CAP_SYS_ADMIN | CAP_SYS_RESOURCE):
        return None
    statuses = (_text(path) for path in proc.glob("[0-9]*/status"))
    mine = (_field(text, "Threads") or 0 for text in statuses if _field(text, "Uid") == os.getuid())
    return limit - sum(mine)


def _left(proc: Path, cgroups: Path, controller: str) -> Iterator[int]:
    """What a controller of cgroups leaves to this process, in its own group and in each above it."""
    for line in _text(proc / "self/cgroup").splitlines():
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
            limit, used = _text(folder / most).strip(), _text(folder / now).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
                # the kernel gives up this cache before it refuses memory
                yield (
                    int(limit)
                    - int(used)
                    + (_field(_text(folder / "memory.stat"), cache) or 0) * (controller == "memory")
                )
