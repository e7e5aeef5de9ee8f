"""What the ranks of a node use: processor time, memory, and their GPUs by nvidia-ml-py, measured when the notebook asks; and which GPUs are theirs.

The kernel's files are read at once. A driver's answer may take long, or never come: GPUs are asked on a thread of their own, which
sleeps until a measurement is asked for; a reply has what the thread has found before, as long as that is not old.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skymagic.errors import PoolError
from skymagic.kernels.proc import processor_seconds, status
from skymagic.plan.gpus import HOLD
from skymagic.runtime import usage
from skymagic.wire import agent as wire

RSS = 21
"""Place in /proc/PID/stat, counted from the state, which follows the name."""
OLDEST = 10.0
"""Seconds for which what a driver has answered is told: a GPU may fall off its bus, a driver hang or be unloaded."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Measurements:
    """The measurements of a node's ranks."""

    def __init__(self) -> None:
        self._gpus: Gpus | None = None

    def reply(self, message: wire.Measure, pids: Mapping[int, int]) -> wire.RankReply:
        """The reply of this node: the time, its memory in bytes, and of each rank that has a process processor seconds, bytes in
        memory, then, where they are known, of its GPUs the share of time in use, and bytes in use and there.
        """
        devices = {int(rank): tuple(mine) for rank, mine in message.devices.items()}
        gpus = self._asked({device for mine in devices.values() for device in mine})
        ranks = {}
        for rank in message.ranks:
            if (found := process_use(pids[rank]) if rank in pids else None) is not None:
                ranks[str(rank)] = [*found, *of_devices(devices.get(rank, ()), gpus)]
        memory = min((limit for limit, _ in usage.memory_limits()), default=0)
        return wire.RankReply(
            message.ranks[0],
            message.number,
            {"at": time.monotonic(), "memory": memory, "ranks": ranks},
        )

    def _asked(self, devices: Iterable[str]) -> dict[str, tuple[float, float, float]]:
        """What is known of GPUs; they are asked again."""
        if not (devices := set(devices)):
            return {}
        self._gpus = self._gpus or Gpus()
        return self._gpus.latest(devices)

    def close(self) -> None:
        """Ask no more; twice is safe."""
        if self._gpus is not None:
            self._gpus.close()


def process_use(pid: int) -> tuple[float, float] | None:
    """Seconds of processor time and bytes in memory of a process; None where it is not known, or gone."""
    try:
        fields = status(pid)
    except OSError:
        return None
    return processor_seconds(fields), int(fields[RSS]) * PAGE


def of_devices(
    devices: Sequence[str], gpus: Mapping[str, tuple[float, float, float]]
) -> list[float]:
    """Several GPUs of one rank as one: the mean of their use, the sums of their memory."""
    known = [gpus[device] for device in devices if device in gpus]
    if not known:
        return []
    use, used, there = zip(*known, strict=True)
    return [sum(use) / len(known), sum(used), sum(there)]


class HeldGpus:
    """The GPUs of a pool on this machine: two pools do not take the same ones. Owns a pair of abstract sockets for each.

    The kernel closes them with this process, however it ends: no file is left that says that a GPU is taken.

    Args:
        job_id, pool: whose they are, for those who look for free ones in /proc/net/unix.
    """

    def __init__(self, job_id: str, pool: str) -> None:
        self._label = f"{job_id}/{pool}"[:50]
        self._sockets: dict[str, list[socket.socket]] = {}

    def take(self, uuids: Iterable[str]) -> None:
        """Hold these too. Raises PoolError where another pool has one."""
        for uuid in dict.fromkeys(uuids):
            if uuid in self._sockets or sys.platform != "linux":
                continue
            mine = self._sockets[uuid] = [socket.socket(socket.AF_UNIX) for _ in range(2)]
            try:
                mine[0].bind(f"\0{HOLD}{uuid}")
            except OSError as problem:
                raise PoolError(
                    f"another pool has taken {uuid} just now: start this one again"
                ) from problem
            mine[1].bind(f"\0{HOLD}{uuid}/{self._label}")

    def close(self) -> None:
        """Hold none; twice is safe."""
        for mine in self._sockets.values():
            for one in mine:
                one.close()
        self._sockets.clear()


class Gpus:
    """Asks NVML on a thread, each time that somebody wants to know."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self._found: tuple[dict[str, tuple[float, float, float]], float] = {}, -math.inf
        """What was found last, and when: replaced as one, for another thread reads it."""
        self._asked = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="skymagic-gpus", daemon=True)
        if importlib.util.find_spec("pynvml") is not None:  # nvidia-ml-py's module
            self._thread.start()

    def latest(self, devices: Iterable[str]) -> dict[str, tuple[float, float, float]]:
        """By device what was found last: share of time in use, bytes in use, bytes there. Without those that do not tell any more."""
        self._wanted.update(devices)
        self._asked.set()
        found, at = self._found
        return found if time.monotonic() - at < OLDEST else {}

    def close(self) -> None:
        """End the thread, once the driver has answered; twice is safe."""
        self._over = True
        self._asked.set()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # no driver: nothing is ever found
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            while self._asked.wait() and not self._over:
                self._asked.clear()
                found = {
                    device: known
                    for device in sorted(self._wanted)
                    if (known := _look(pynvml, device))
                }
                self._found = found, time.monotonic()


def _look(nvml: Any, device: str) -> tuple[float, float, float] | None:
    """One GPU, by its UUID or the number that its machine counts it by; None where it does not tell, as parts of a GPU do not."""
    try:
        by_number = device.isdigit()
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(device))
            if by_number
            else nvml.nvmlDeviceGetHandleByUUID(device)
        )
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return (
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            float(memory.used),
            float(memory.total),
        )
    except nvml.NVMLError:
        return None


MIB = 1 << 20
IN_USE_BYTES = 256 * MIB
"""Bytes in use on a GPU that are more than a driver's own."""


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


def gpus_in_use(visible: str) -> str:
    """A line on the GPUs of this machine whose memory is in use; empty when none is, or there is none.

    Args:
        visible: CUDA_VISIBLE_DEVICES; empty for all.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [
        program,
        "--query-gpu=index,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        rows = [
            [int(cell) for cell in line.split(",")] for line in answer.splitlines() if line.strip()
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    chosen = {int(index) for index in visible.split(",") if index.strip().isdigit()}
    taken = [
        f"GPU {index}: {used * MIB / 1e9:.1f} of {total * MIB / 1e9:.0f} GB"
        for index, used, total in rows
        if used * MIB >= IN_USE_BYTES and (not chosen or index in chosen)
    ]
    words = "in use already, by the pool's ranks or others; %sky_restart frees what the ranks hold"
    return f"{', '.join(taken)} {words}" if taken else ""
