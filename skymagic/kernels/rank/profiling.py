"""torch's profiler around a cell (``--profile``): its trace and its longest operations, as plain values for the notebook."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_OPERATIONS = 10
GLOO, NCCL = "gloo:", ("ncclDevKernel", "ncclKernel")
"""How collectives begin in a profile: their time is mostly waiting for the slowest rank."""


@contextlib.contextmanager
def profiled(wanted: bool, rank: int) -> Iterator[dict[str, Any]]:
    """Profile what runs inside, if that is wanted; the dictionary holds ``trace`` (bytes of a gzip file), ``operations`` (name, calls and
    seconds, the longest first), ``seconds`` of all operations and ``collectives`` of those, once it has ended.

    Raises:
        RuntimeError: torch is not installed here.
    """
    found: dict[str, Any] = {}
    if not wanted:
        yield found
        return
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError(
            f"--profile is torch's profiler, and rank {rank} has no torch: %sky_pip install torch"
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints its own doings into the cell
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with profile(activities=activities) as profiler:
        yield found
    found.update(_summary(profiler, on_gpu=len(activities) > 1))


def _summary(profiler: Any, *, on_gpu: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(file))
        trace = file.read_bytes()

    def seconds(operation: Any) -> float:
        # without what it calls, so that no time counts twice; a launch on the processor is nothing beside its kernel
        microseconds = operation.self_device_time_total if on_gpu else operation.self_cpu_time_total
        return float(microseconds) / 1e6

    operations = sorted(profiler.key_averages(), key=seconds, reverse=True)
    return {
        "trace": trace,
        "operations": [
            (each.key, each.count, seconds(each)) for each in operations[:LONGEST_OPERATIONS]
        ],
        "seconds": sum(map(seconds, operations)),
        "collectives": sum(map(_in_collectives, operations)),
    }


def _in_collectives(operation: Any) -> float:
    """Seconds. What gloo does goes on beside the thread that waits for it, so that torch counts none of its time as the operation's own."""
    if operation.key.startswith(GLOO):
        return float(operation.cpu_time_total) / 1e6
    return float(operation.self_device_time_total) / 1e6 if operation.key.startswith(NCCL) else 0.0
