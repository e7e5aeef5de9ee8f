"""The GPU of a rank: its number, what other ranks learn of it, and measurements of slow training.

The measurements show time spent waiting for a ``DataLoader``, and a GPU that is full or idle.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import types
from typing import Any

from skymagic.plugins._torch.backends import RankHardware
from skymagic.runtime import info, usage
from skymagic.runtime.on_import import when_imported, wraps
from skymagic.wire.processes import boot_id


def number() -> int | None:
    """Return the number of this rank's GPU in its process, or None without one.

    Does not initialize CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    # Not the position in a run on some ranks: a process keeps its GPU.
    gpus = info.instance_info().gpus_of_rank(torch.cuda.device_count())
    return gpus[0] if len(gpus) else None


def take() -> RankHardware:
    """Make this rank's GPU the current device of its main thread, and return its hardware.

    Raises:
        RuntimeError: the pool has GPUs and this process cannot use them. The message says why.
    """
    import torch

    machine, cuda = boot_id(), str(torch.version.cuda or "")
    device = number()
    if device is None:
        if info.instance_info().accelerators:
            raise RuntimeError(_unusable(torch, cuda))
        return RankHardware(machine, cuda=cuda)
    torch.cuda.set_device(device)
    return RankHardware(machine, uuid(device), torch.cuda.get_device_name(device), cuda)


def uuid(device: int) -> str:
    """Return the UUID of a device of this process, as nvidia-smi writes it.

    For a part of a GPU (MIG) it is the part's UUID. CUDA may report the whole GPU's instead.
    """
    import torch

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device < len(visible_devices) and visible_devices[device].startswith(("GPU-", "MIG-")):
        return visible_devices[device]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _unusable(torch: Any, cuda: str) -> str:
    if not cuda:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA, and the pool has GPUs: "
            "install a build for CUDA on the nodes, or take CPUs (--gpu none)"
        )
    try:
        torch.cuda.init()
        why = "none is visible"
    except Exception as problem:
        why = str(problem).partition("\n")[0]
    return (
        f"CUDA {cuda} of PyTorch {torch.__version__} cannot use this node's GPUs ({why}): update "
        "the driver, or take CPUs (--gpu none)"
    )


@functools.cache  # once per process
def watch() -> None:
    """Measure the data loaders and the GPU of this process. torch must be imported."""
    when_imported("torch.utils.data.dataloader", _loaders)
    usage.watch_gpu(gpu)


def _loaders(module: types.ModuleType) -> None:
    """Measure the time that the main thread waits for each batch.

    This costs a few tenths of a microsecond per batch.
    """
    iterator = module._BaseDataLoaderIter
    plain = iterator.__next__
    main = threading.main_thread()
    clock, step = time.perf_counter, usage.loading.step

    @wraps(plain)
    def timed(self: Any) -> Any:
        if threading.current_thread() is not main:
            return plain(self)
        start = clock()
        if (last := getattr(self, "_skymagic_step", None)) is not None:
            waited, since = last
            step(waited, start - since)
        batch = plain(self)
        # The first batch includes the start of the workers, so counting begins with the second
        # step.
        self._skymagic_step = (
            (clock() - start, start) if last is not None or not self._num_workers else (0.0, start)
        )
        return batch

    iterator.__next__ = timed


def gpu() -> tuple[float, float]:
    """Return the shares of this rank's GPU that are in use: memory and time.

    Memory counts if it holds tensors or belongs to others. Both are NaN if CUDA has not been used
    yet. CUDA's current device is per thread, and this thread is not the cell's. Therefore the
    device is the one that the plugin has set there.
    """
    import torch

    if not torch.cuda.is_initialized():
        return math.nan, math.nan
    if (device := number()) is None:
        return math.nan, math.nan
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 1 - (free + cached) / total, _in_use(device)


def _in_use(device: int) -> float:
    """Return the GPU's utilization as measured by nvidia-ml-py, if it is installed."""
    import torch

    try:
        return float(torch.cuda.utilization(device)) / 100
    except Exception:
        # The package is missing, or the driver does not report it.
        return math.nan
