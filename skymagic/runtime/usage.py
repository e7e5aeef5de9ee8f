"""Possible bottlenecks of a rank: waiting for batches, memory near its limit, an idle GPU.

::

    main thread   a loader's next batch ──▶ Loading ─┐
    plugins       GPU measurements ─────────▶ Gpu ───┼── sample, every INTERVAL
    kernel        memory of machine, cgroups ────────┘        ▲
                                                     the rank's flusher thread ──▶ agent

Also reads the memory limits that the kernel reports.
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
"""Fraction of memory in use from which it is reported."""

Gpu = Callable[[], tuple[float, float]]
"""Fraction (0 to 1) of a GPU's memory that holds values, and of the time that it computes; NaN if
unknown.
"""


@dataclass
class Loading:
    """Seconds that the main thread has waited for batches, and seconds of the steps that used them.

    A step lasts from the request for one batch to the next request of the same loader. The first
    step includes the start of the loader's workers, and does not count.
    """

    waited: float = 0.0
    stepped: float = 0.0

    def step(self, waited: float, seconds: float) -> None:
        """Add a step, which began with waiting for its batch."""
        self.waited += waited
        self.stepped += seconds


loading = Loading()
"""Totals since the cell started."""
_gpu: Gpu | None = None
_began = _sampled = 0.0
_import: tuple[int, str] | None = None
"""The import in progress at the last sample: the identity of its frame, and the package."""
_import_reported = False
_node = 0


def begin(node: int) -> None:
    """Start a cell on a rank of this node; called by the rank's kernel."""
    global _began, _sampled, _node, _import, _import_reported
    _import, _import_reported = None, False
    loading.waited = loading.stepped = 0.0
    _began = _sampled = time.perf_counter()
    _node = node


def watch_gpu(gpu: Gpu) -> None:
    """Set the function that measures this rank's GPU; called by a plugin.

    It runs on another thread than the cell.
    """
    global _gpu
    _gpu = gpu


def sample() -> dict[Names, array[float]]:
    """Return the current state as rows of `wire.metrics`.

    Returns nothing if nothing is notable, or the last sample is too recent.
    """
    global _sampled
    now = time.perf_counter()
    if now - _sampled < INTERVAL:
        return {}
    _sampled = now
    return _resources(now) | _imports(now)


def _imports(now: float) -> dict[Names, array[float]]:
    """Return a row for a module that was being imported at the last sample too, and one when the
    import is over.
    """
    global _import, _import_reported
    before, _import = _import, current_import()
    lasting = _import[1] if _import is not None and _import == before else ""
    if not (lasting or _import_reported):
        return {}
    _import_reported = bool(lasting)
    return {import_names(lasting): array("d", (now - _began, 0.0, math.nan, 1.0))}


def current_import() -> tuple[int, str] | None:
    """Return the main thread's outermost import: the identity of its frame, and the package; None
    if there isn't one.
    """
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    import_frame = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename == "<frozen importlib._bootstrap>":
            import_frame = frame
        frame = frame.f_back
    if import_frame is None:
        return None
    return id(import_frame), str(import_frame.f_locals.get("name", "")).partition(".")[0]


def _resources(now: float) -> dict[Names, array[float]]:
    memory, held = memory_use()
    gpu_memory, gpu_use = math.nan, math.nan
    if _gpu is not None:
        with contextlib.suppress(Exception):  # a driver that does not report it
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
    """Return the fractions of the usable memory that all processes and this process use; 0 if
    unknown.

    Of several limits (the machine's, a container's), the one closest to being reached counts.
    """
    fractions = [(1 - available / limit, limit) for limit, available in memory_limits() if limit]
    if not fractions:
        return 0.0, 0.0
    used, limit = max(fractions)
    resident = kernel_text(PROC / "self/statm").split()[1:2]
    return used, sum(int(pages) for pages in resident) * sysconf("SC_PAGE_SIZE") / limit


# Higher values mean no limit, as in cgroups version 1.
UNLIMITED = 1 << 60
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def kernel_text(path: Path) -> str:
    """Return the content of a kernel file; empty if it does not exist."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def kernel_field(text: str, name: str) -> int | None:
    """Return the number that follows a name, as in ``/proc/meminfo`` and ``memory.stat``."""
    match = re.search(rf"^{name}:?\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, remainder) in bytes for each limited cgroup of this process, from its own
    upwards.
    """
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
                # The kernel drops this cache before it refuses memory.
                given_up = kernel_field(kernel_text(folder / "memory.stat"), cache) or 0
                yield int(limit), int(limit) - int(used) + given_up


def memory_limits(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[tuple[int, int]]:
    """Return (limit, remainder) in bytes: of this machine, and of this process's cgroups."""
    meminfo = kernel_text(proc / "meminfo")
    total, available = kernel_field(meminfo, "MemTotal"), kernel_field(meminfo, "MemAvailable")
    machine = [] if total is None or available is None else [(total * 1024, available * 1024)]
    return [*machine, *_cgroup_limits(proc, cgroups)]
