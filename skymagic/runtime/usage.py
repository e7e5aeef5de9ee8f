"""What may slow a rank down, measured where it happens: waiting for batches, memory near its limit, a GPU at rest; and the limits that the kernel tells.

::

    main thread   a loader's next batch ──▶ Loading ─┐
    plugins       what a GPU does ──────────▶ Gpu ───┼── sample, every INTERVAL ◀── the rank's flusher thread ──▶ agent
    kernel        memory of the machine, of cgroups ─┘
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import sysconf
from pathlib import Path

from skymagic.wire.metrics import USAGE, Names, import_names

INTERVAL = 1.0
"""Seconds between two samples."""
NOTABLE_MEMORY = 0.9
"""Share of a memory in use from which it is told of."""

Gpu = Callable[[], tuple[float, float]]
"""Shares between 0 and 1 of a GPU's memory that hold values, and of the time in which it computes; NaN where nobody knows."""


@dataclass
class Loading:
    """Seconds that the main thread has waited for batches, of the seconds of the steps that took them. A step goes from one batch
    being asked for to the next of the same loader; the first has the start of its workers in it and counts as none."""

    waited: float = 0.0
    stepped: float = 0.0

    def step(self, waited: float, seconds: float) -> None:
        """A step is over, which began with waiting for its batch."""
        self.waited += waited
        self.stepped += seconds


loading = Loading()
"""Since the cell began."""
_gpu: Gpu | None = None
_began = _sampled = 0.0
_import: tuple[int, str] | None = None
"""The import that was under way at the last sample: the identity of its frame, and the package."""
_import_reported = False
_node = 0


def begin(node: int) -> None:
    """A cell begins on a rank of this node; the rank's kernel calls it."""
    global _began, _sampled, _node, _import, _import_reported
    _import, _import_reported = None, False
    loading.waited = loading.stepped = 0.0
    _began = _sampled = time.perf_counter()
    _node = node


def watch_gpu(gpu: Gpu) -> None:
    """Where to ask for this rank's GPU: a plugin knows. Called on another thread than the cell's."""
    global _gpu
    _gpu = gpu


def sample() -> dict[Names, array[float]]:
    """Return how it is now, as rows of `wire.metrics`; nothing if nothing is notable, or the last sample is not old enough."""
    global _sampled
    now = time.perf_counter()
    if now - _sampled < INTERVAL:
        return {}
    _sampled = now
    return _resources(now) | _imports(now)


def _imports(now: float) -> dict[Names, array[float]]:
    """Return a row for a module whose import was under way at the last sample too, and one when such an import is over."""
    global _import, _import_reported
    before, _import = _import, import_under_way()
    lasting = _import[1] if _import is not None and _import == before else ""
    if not (lasting or _import_reported):
        return {}
    _import_reported = bool(lasting)
    return {import_names(lasting): array("d", (now - _began, 0.0, math.nan, 1.0))}


def import_under_way() -> tuple[int, str] | None:
    """Return the outermost import of the main thread: the identity of its frame, and the package; None if it imports nothing."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename == "<frozen importlib._bootstrap>":
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    return id(found), str(found.f_locals.get("name", "")).partition(".")[0]


def _resources(now: float) -> dict[Names, array[float]]:
    memory, held = memory_use()
    gpu_memory, gpu_use = math.nan, math.nan
    if _gpu is not None:
        with contextlib.suppress(Exception):  # a driver that does not tell
            gpu_memory, gpu_use = _gpu()
    if not (
        loading.stepped
        or memory >= NOTABLE_MEMORY
        or gpu_use == gpu_use
        or gpu_memory == gpu_memory
    ):
        return {}
    numbers = (float(_node), loading.waited, loading.stepped, memory, held, gpu_memory, gpu_use)
    return {USAGE: array("d", (now - _began, 0.0, math.nan, *numbers))}


def memory_use() -> tuple[float, float]:
    """Shares of the memory that may be used here: what is in use by all, and by this process; 0 where nobody knows.

    Of several limits (the machine's, a container's) the one that is nearest.
    """
    known = [(1 - left / limit, limit) for limit, left in memory_limits() if limit]
    if not known:
        return 0.0, 0.0
    used, limit = max(known)
    resident = kernel_text(PROC / "self/statm").split()[1:2]
    return used, sum(int(pages) for pages in resident) * sysconf("SC_PAGE_SIZE") / limit


UNLIMITED = 1 << 60  # what is above this stands for no limit, as cgroups of version 1 write it
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def kernel_text(path: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def kernel_field(told: str, name: str) -> int | None:
    """A number behind a name, as ``/proc/meminfo`` and ``memory.stat`` have them."""
    found = re.search(rf"^{name}:?\s+(\d+)", told, re.MULTILINE)
    return int(found[1]) if found else None


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) in bytes in this process's own cgroup and in each above it, where there is a limit."""
    for line in kernel_text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, most, now, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, most, now = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit, used = kernel_text(folder / most).strip(), kernel_text(folder / now).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
                # the kernel gives up this cache before it refuses memory
                given_up = kernel_field(kernel_text(folder / "memory.stat"), cache) or 0
                yield int(limit), int(limit) - int(used) + given_up


def memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[tuple[int, int]]:
    """(limit, what is left of it) in bytes: of this machine, and of the cgroups that this process is in."""
    told = kernel_text(proc / "meminfo")
    total, left = kernel_field(told, "MemTotal"), kernel_field(told, "MemAvailable")
    machine = [] if total is None or left is None else [(total * 1024, left * 1024)]
    return [*machine, *_cgroup_limits(proc, cgroups)]
