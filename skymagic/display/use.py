"""What a rank uses, in words; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skymagic.plan.units import size


@dataclass(frozen=True)
class RankUse:
    """What one rank uses.

    Attributes:
        cpu: processors in use, 1.0 for one of them; NaN while there was one measurement only.
        memory: bytes of its process. node_memory: bytes that its node has.
        gpu: share of the time in which its GPU computes. gpu_memory, gpu_total: bytes in use on it by all, and there. NaN for no GPU.
    """

    cpu: float = math.nan
    memory: float = math.nan
    node_memory: float = math.nan
    gpu: float = math.nan
    gpu_memory: float = math.nan
    gpu_total: float = math.nan


def short(use: RankUse) -> str:
    """In a cell: ``97% 31G`` of its GPU where it has one, else of processors and memory."""
    share, held = (use.gpu, use.gpu_memory) if use.gpu_total == use.gpu_total else (use.cpu, use.memory)
    return " ".join(filter(None, (_percent(share), _letters(held))))


def words(use: RankUse) -> str:
    """In full: ``GPU 97%, 31 of 80 GB; CPU 110%, memory 2.1 GB of 64.0 GB``."""
    gpu = [f"GPU {_percent(use.gpu)}", f"{_bytes(use.gpu_memory)} of {_bytes(use.gpu_total)}"]
    cpu = [f"CPU {_percent(use.cpu)}" if use.cpu == use.cpu else "", f"memory {_bytes(use.memory)}{_of(use)}"]
    parts = [gpu if use.gpu_total == use.gpu_total else [], cpu if use.memory == use.memory else []]
    return "; ".join(", ".join(filter(None, part)) for part in parts if part)


def together(uses: Sequence[RankUse], nodes: int = 1) -> str:
    """Of several ranks in few words: ``GPU 93–99%, 248.0 GB of 320.0 GB`` or ``CPU 797%, 12.0 GB of 64.0 GB``.

    Args:
        nodes: how many nodes have them; of more than one the memory is not told.
    """
    gpus = [use for use in uses if use.gpu_total == use.gpu_total]
    if gpus:
        low, high = _percent(min(use.gpu for use in gpus)), _percent(max(use.gpu for use in gpus))
        held, there = sum(use.gpu_memory for use in gpus), sum(use.gpu_total for use in gpus)
        return f"GPU {low if low == high else f'{low[:-1]}–{high}'}, {_bytes(held)} of {_bytes(there)}"
    known = [use for use in uses if use.memory == use.memory]
    if not known:
        return ""
    cpu = sum(use.cpu for use in known)
    memory = _bytes(sum(use.memory for use in known)) + (_of(known[0]) if nodes == 1 else "")
    return ", ".join(filter(None, (f"CPU {_percent(cpu)}" if cpu == cpu else "", memory)))


def _of(use: RankUse) -> str:
    return f" of {_bytes(use.node_memory)}" if use.node_memory > 0 else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == share else ""


def _letters(nbytes: float) -> str:
    """Bytes where there is little room: ``31G``, ``2.1G``, ``45M``."""
    if nbytes != nbytes:
        return ""
    amount, letter = (nbytes / 1e9, "G") if nbytes >= 1e9 else (nbytes / 1e6, "M")
    return f"{amount:.{1 if amount < 10 else 0}f}{letter}"


def _bytes(nbytes: float) -> str:
    return size(int(nbytes)) if nbytes == nbytes else ""
