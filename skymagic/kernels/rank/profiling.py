"""torch's profiler around a cell (``--profile``): trace and longest operations, as plain values."""

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
"""Prefixes of collectives in a profile: most of their time is a wait for the slowest rank."""


@contextlib.contextmanager
def profiled(enabled: bool, rank: int) -> Iterator[dict[str, Any]]:
    """Profile the code inside the context, if `enabled`.

    The yielded dictionary is filled at the end: ``trace`` (bytes of a gzip file), ``operations``
    (name, calls and seconds, the longest first), ``seconds`` of all operations, and
    ``collectives``, the seconds of those.

    Raises:
        RuntimeError: torch is not installed here.
    """
    profile_data: dict[str, Any] = {}
    if not enabled:
        yield profile_data
        return
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError(
            f"--profile is torch's profiler, and rank {rank} has no torch: %sky_pip install torch"
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs into the cell's output
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with profile(activities=activities) as profiler:
        yield profile_data
    profile_data.update(_summary(profiler, on_gpu=len(activities) > 1))


def _summary(profiler: Any, *, on_gpu: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(file))
        trace = file.read_bytes()

    def seconds(operation: Any) -> float:
        # excludes callees, so that no time counts twice; a launch on the processor is negligible
        # compared to its kernel
        microseconds = operation.self_device_time_total if on_gpu else operation.self_cpu_time_total
        return float(microseconds) / 1e6

    operations = sorted(profiler.key_averages(), key=seconds, reverse=True)
    return {
        "trace": trace,
        "operations": [
            (operation_stats.key, operation_stats.count, seconds(operation_stats))
            for operation_stats in operations[:LONGEST_OPERATIONS]
        ],
        "seconds": sum(map(seconds, operations)),
        "collectives": sum(map(_in_collectives, operations)),
    }


def _in_collectives(operation: Any) -> float:
    """Return the seconds that an operation spends in collectives.

    gloo works on another thread than the one that waits for it, so torch attributes none of its
    time to the operation itself.
    """
    if operation.key.startswith(GLOO):
        return float(operation.cpu_time_total) / 1e6
    return float(operation.self_device_time_total) / 1e6 if operation.key.startswith(NCCL) else 0.0
