"""The GPU of a rank: one number, by its place among the ranks of its node; what the others are told of it; and what slows a training down:
waiting for a ``DataLoader``, a GPU that is full or at rest.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import types
from typing import Any

from skymagic.plugins._torch.backends import Posted
from skymagic.runtime import info, usage
from skymagic.runtime.on_import import when_imported, wraps
from skymagic.wire.processes import boot_id


def number() -> int | None:
    """This rank's GPU as its process counts them; None without one. CUDA is not initialised by it."""
    import torch

    if not torch.cuda.is_available():
        return None
    # not the place in a run of some ranks: a process keeps its GPU
    mine = info.instance_info().gpus_of_rank(torch.cuda.device_count())
    return mine[0] if len(mine) else None


def take() -> Posted:
    """Make this rank's GPU the current device of its main thread.

    Raises:
        RuntimeError: the pool has GPUs and this process cannot use them, in words.
    """
    import torch

    machine, cuda = boot_id(), str(torch.version.cuda or "")
    mine = number()
    if mine is None:
        if info.instance_info().accelerators:
            raise RuntimeError(_unusable(torch, cuda))
        return Posted(machine, cuda=cuda)
    torch.cuda.set_device(mine)
    return Posted(machine, uuid(mine), torch.cuda.get_device_name(mine), cuda)


def uuid(device: int) -> str:
    """The UUID of a device of this process, as nvidia-smi writes it. Of a part of a GPU (MIG) it is the part's, which CUDA may give as the GPU's."""
    import torch

    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device < len(words) and words[device].startswith(("GPU-", "MIG-")):
        return words[device]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _unusable(torch: Any, cuda: str) -> str:
    if not cuda:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA, and the pool has GPUs: install a build for CUDA on the nodes, or take "
            "CPUs (--gpu none)"
        )
    try:
        torch.cuda.init()
        why = "none is visible"
    except Exception as problem:
        why = str(problem).partition("\n")[0]
    return f"CUDA {cuda} of PyTorch {torch.__version__} cannot use this node's GPUs ({why}): update the driver, or take CPUs (--gpu none)"


@functools.cache  # once in a process
def watch() -> None:
    """Measure what this process's loaders and its GPU do; torch is imported."""
    when_imported("torch.utils.data.dataloader", _loaders)
    usage.watch_gpu(gpu)


def _loaders(module: types.ModuleType) -> None:
    """Take the time of each batch that the main thread waits for; a few tenths of a microsecond a batch."""
    iterator = module._BaseDataLoaderIter
    plain = iterator.__next__
    main = threading.main_thread()
    clock, step = time.perf_counter, usage.loading.step

    @wraps(plain)
    def timed(self: Any) -> Any:
        if threading.current_thread() is not main:
            return plain(self)
        begun = clock()
        if (last := getattr(self, "_skymagic_step", None)) is not None:
            waited, since = last
            step(waited, begun - since)
        batch = plain(self)
        # of the first batch its workers' start is a part: the second step begins the count
        self._skymagic_step = (
            (clock() - begun, begun) if last is not None or not self._num_workers else (0.0, begun)
        )
        return batch

    iterator.__next__ = timed


def gpu() -> tuple[float, float]:
    """Shares of this rank's GPU: memory that holds tensors or is others', and time in use; NaN where CUDA was not used yet.

    CUDA's current device is each thread's own, and this is not the cell's: the device is the one that the plugin has set there.
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
    """By nvidia-ml-py, where it is installed."""
    import torch

    try:
        return float(torch.cuda.utilization(device)) / 100
    except Exception:  # it is not, or the driver does not tell
        return math.nan
