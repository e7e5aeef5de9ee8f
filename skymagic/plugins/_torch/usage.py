"""What may slow a training with torch down: waiting for a ``DataLoader``, and a GPU that is full or at rest."""

from __future__ import annotations

import functools
import math
import threading
import time
import types
from typing import Any

from skymagic.plugins._torch import devices
from skymagic.runtime import usage
from skymagic.runtime.on_import import when_imported


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

    @functools.wraps(plain)
    def timed(self: Any) -> Any:
        if threading.current_thread() is not main:
            return plain(self)
        begun = clock()
        if (last := getattr(self, "_skymagic_step", None)) is not None:
            waited, since = last
            step(waited, begun - since)
        batch = plain(self)
        # of the first batch its workers' start is a part: the second step begins the count
        self._skymagic_step = (clock() - begun, begun) if last is not None or not self._num_workers else (0.0, begun)
        return batch

    iterator.__next__ = timed


def gpu() -> tuple[float, float]:
    """Shares of this rank's GPU: memory that holds tensors or is others', and time in use; NaN where CUDA was not used yet.

    CUDA's current device is each thread's own, and this is not the cell's: the device is the one that the plugin has set there.
    """
    import torch

    if not torch.cuda.is_initialized():
        return math.nan, math.nan
    if (device := devices.number()) is None:
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
