"""The system's count of out-of-memory kills, and the GPUs that are in use already."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

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
    command = [program, "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        rows = [[int(cell) for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
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
