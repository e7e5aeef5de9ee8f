"""Backends of the default group: ranks post what they compute on, and rank 0 decides for all; which leg of a composite one serves whom. Pure.

rank R   what it has (`Posted`) ─▶ store ─▶ rank 0: `choose` ─▶ store ─▶ "cpu:gloo,cuda:nccl", or why not, for each rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skymagic.plan.units import rank_words

GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"
SHARED = "cpu:gloo,cuda:gloo"
CPU_BACKENDS = ("gloo", "mpi")


@dataclass(frozen=True)
class Posted:
    """What a rank says of itself.

    Attributes:
        machine: told from all others.
        gpu: UUID of its device, "" for none. name: the device's. cuda: what its torch is built for, "" for CPUs.
    """

    machine: str
    gpu: str = ""
    name: str = ""
    cuda: str = ""


def choose(asked: str | None, posted: Sequence[Posted]) -> str:
    """The backend of a group of these ranks.

    Args:
        asked: what the user has said; None for what fits.

    Raises:
        ValueError: it cannot be; names the ranks.
    """
    without = [rank for rank, one in enumerate(posted) if not one.gpu]
    if without and len(without) < len(posted):
        having = [rank for rank in range(len(posted)) if rank not in without]
        raise ValueError(
            f"{rank_words(having)} {'has' if len(having) == 1 else 'have'} a GPU and {rank_words(without)} {'has' if len(without) == 1 else 'have'} none"
            f"{_why(posted[without[0]])}: a process group cannot combine them. Leave those machines out, or take CPUs everywhere (--gpu none)"
        )
    twins = shared(posted)
    if asked is not None:
        if twins and "nccl" in legs(asked).values():
            device = posted[twins[0][0]]
            raise ValueError(
                f"{rank_words(twins[0])} share one GPU ({device.name or 'GPU'} {device.gpu}), and NCCL refuses that: leave backend= out, which "
                "takes gloo, or ask for one rank per GPU"
            )
        return asked
    if without:
        return GLOO
    parts = any(one.gpu.startswith("MIG-") for one in posted)
    return SHARED if twins or parts else NCCL


def shared(posted: Sequence[Posted]) -> list[list[int]]:
    """Ranks that are on one device, for each device with several."""
    on: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(posted):
        if one.gpu:
            on.setdefault((one.machine, one.gpu), []).append(rank)
    return [together for together in on.values() if len(together) > 1]


def legs(backend: str) -> dict[str, str]:
    """Device → backend: of ``"cpu:gloo,cuda:nccl"``; a name alone serves what torch lets it serve."""
    if ":" in backend:
        return dict(pair.strip().split(":", 1) for pair in backend.lower().split(","))
    return {"nccl": {"cuda": "nccl"}}.get(
        backend.lower(), dict.fromkeys(("cpu", "cuda"), backend.lower())
    )


def device_for_talk(legs_of_group: Mapping[str, str]) -> str:
    """The device on which ranks tell each other what they must: the CPU where a leg serves it, else the first that is served.

    Never none: what is told first is the proof of membership, and a backend that is not known here must not pass without it.
    """
    if legs_of_group.get("cpu") in CPU_BACKENDS or "cuda" not in legs_of_group:
        return "cpu" if "cpu" in legs_of_group else next(iter(legs_of_group))
    return "cuda"


def _why(rank: Posted) -> str:
    return "" if rank.cuda else " (its torch is built without CUDA)"
