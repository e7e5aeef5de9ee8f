"""Resource use of a node's ranks (processor time, memory, GPUs), and the claims of pools on GPUs.

The kernel's files are read at once. A GPU driver (asked by nvidia-ml-py) may answer late or never,
so a separate thread measures GPUs; it sleeps until a measurement is requested. A reply contains the
thread's previous results, unless they are too old.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
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

logger = logging.getLogger(__name__)

RSS_FIELD = 21
"""Index in /proc/PID/stat, counted from the state field, which follows the name."""
MAX_AGE = 10.0
"""Maximum age in seconds of a reported GPU measurement.

A GPU may fall off its bus; a driver may hang or be unloaded.
"""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Measurements:
    """Measurements of a node's ranks."""

    def __init__(self) -> None:
        self._gpus: Gpus | None = None

    def reply(self, message: wire.Measure, pids: Mapping[int, int]) -> wire.Measurement:
        """Return the time, this node's memory, and the usage of each running rank."""
        devices = message.devices
        gpus = self._latest_gpu_use(
            {device for rank_devices in devices.values() for device in rank_devices}
        )
        ranks = {}
        for rank in message.ranks:
            if (use := process_use(pids[rank]) if rank in pids else None) is not None:
                gpu = combined_gpu_use(devices.get(rank, ()), gpus)
                ranks[rank] = wire.RankUsage(use[0], use[1], tuple(gpu))
        memory = min((limit for limit, _ in usage.memory_limits()), default=0)
        return wire.Measurement(message.ranks[0], message.number, time.monotonic(), memory, ranks)

    def _latest_gpu_use(self, devices: Iterable[str]) -> dict[str, tuple[float, float, float]]:
        """Return the latest measurements of GPUs, and request new ones."""
        if not (devices := set(devices)):
            return {}
        self._gpus = self._gpus or Gpus()
        return self._gpus.latest(devices)

    def close(self) -> None:
        """Stop measuring; twice is safe."""
        if self._gpus is not None:
            self._gpus.close()


def process_use(pid: int) -> tuple[float, int] | None:
    """Return the processor seconds and bytes of memory of a process, or None if unknown."""
    try:
        fields = status(pid)
    except OSError:
        return None
    return processor_seconds(fields), int(fields[RSS_FIELD]) * PAGE


def combined_gpu_use(
    devices: Sequence[str], gpus: Mapping[str, tuple[float, float, float]]
) -> list[float]:
    """Combine a rank's GPUs into one: mean utilization, sums of memory."""
    measured = [gpus[device] for device in devices if device in gpus]
    if not measured:
        return []
    use, used, total = zip(*measured, strict=True)
    return [sum(use) / len(measured), sum(used), sum(total)]


class GpuClaims:
    """Claims on this machine's GPUs: two pools never use the same one.

    Owns two abstract sockets per GPU. The kernel closes them with this process, however it ends, so
    no stale file can claim a GPU.

    Args:
        job_id, pool: the owner, shown to others that look for free GPUs in /proc/net/unix.
    """

    def __init__(self, job_id: str, pool: str) -> None:
        self._label = f"{job_id}/{pool}"[:50]
        self._sockets: dict[str, list[socket.socket]] = {}

    def claim(self, uuids: Iterable[str]) -> None:
        """Claim further GPUs. Raises PoolError if another pool has claimed one of them."""
        for uuid in dict.fromkeys(uuids):
            if uuid in self._sockets or sys.platform != "linux":
                continue
            sockets = self._sockets[uuid] = [socket.socket(socket.AF_UNIX) for _ in range(2)]
            try:
                # binding this name fails if another pool holds the GPU
                sockets[0].bind(f"\0{HOLD}{uuid}")
            except OSError as problem:
                raise PoolError(
                    f"another pool has taken {uuid} just now: start this one again",
                    code="gpu-taken",
                    names=[uuid],
                ) from problem
            logger.info("GPU claimed: uuid=%s", uuid)
            # this name shows the owner in /proc/net/unix
            sockets[1].bind(f"\0{HOLD}{uuid}/{self._label}")

    def close(self) -> None:
        """Release all claims; twice is safe."""
        for sockets in self._sockets.values():
            for sock in sockets:
                sock.close()
        self._sockets.clear()


class Gpus:
    """Thread that queries NVML on request."""

    def __init__(self) -> None:
        self._devices: set[str] = set()
        self._latest: tuple[dict[str, tuple[float, float, float]], float] = {}, -math.inf
        """Latest results and their time; replaced as one object, because another thread reads it.
        """
        self._requested = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="skymagic-gpus", daemon=True)
        if importlib.util.find_spec("pynvml") is not None:  # nvidia-ml-py's module
            self._thread.start()

    def latest(self, devices: Iterable[str]) -> dict[str, tuple[float, float, float]]:
        """Return the latest results by device: utilization, bytes in use, bytes in total.

        Devices that no longer answer are omitted.
        """
        self._devices.update(devices)
        self._requested.set()
        latest, at = self._latest
        return latest if time.monotonic() - at < MAX_AGE else {}

    def close(self) -> None:
        """End the thread once the driver has answered; twice is safe."""
        self._closed = True
        self._requested.set()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # without a driver there are no results
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            while self._requested.wait() and not self._closed:
                # before the measurement: a request that arrives during it gets another one
                self._requested.clear()
                measured = {
                    device: values
                    for device in sorted(self._devices)
                    if (values := _measure_gpu(pynvml, device))
                }
                self._latest = measured, time.monotonic()


def _measure_gpu(nvml: Any, device: str) -> tuple[float, float, float] | None:
    """Measure one GPU, given by its UUID or by its index on this machine.

    Returns None if it does not answer. Partitions of a GPU never do.
    """
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
"""A GPU with more bytes in use than this counts as in use; a driver alone uses less."""


def oom_kills() -> int:
    """Count the processes that the kernel has killed for lack of memory, in this cgroup and
    machine.
    """
    count = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    count += int(value)
    return count


def gpus_in_use(visible: str) -> str:
    """Describe in one line the GPUs of this machine whose memory is in use, "" if all are free.

    Args:
        visible: CUDA_VISIBLE_DEVICES; "" for all.
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
    visible_indices = {int(index) for index in visible.split(",") if index.strip().isdigit()}
    in_use = [
        f"GPU {index}: {used * MIB / 1e9:.1f} of {total * MIB / 1e9:.0f} GB"
        for index, used, total in rows
        if used * MIB >= IN_USE_BYTES and (not visible_indices or index in visible_indices)
    ]
    explanation = (
        "in use already, by the pool's ranks or others; %sky_restart frees what the ranks hold"
    )
    return f"{', '.join(in_use)} {explanation}" if in_use else ""
