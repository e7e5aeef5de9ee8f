"""Choose the backend of the default group. All functions are pure.

Ranks post their devices, and rank 0 decides for all, including which backend of a composite
one serves which device::

    rank R   its hardware (`RankHardware`) ─▶ store ─▶ rank 0: `choose` ─▶ store
             ─▶ each rank: "cpu:gloo,cuda:nccl", or an error
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
class RankHardware:
    """Hardware that a rank posts for the others.

    Attributes:
        machine: identifier that differs between machines.
        gpu: UUID of its device; "" for none.
        name: name of the device.
        cuda: CUDA version that its torch is built for; "" for CPUs.
    """

    machine: str
    gpu: str = ""
    name: str = ""
    cuda: str = ""


def choose(requested: str | None, posted: Sequence[RankHardware]) -> str:
    """Choose the backend of a group of these ranks.

    Args:
        requested: the user's choice; None for the backend that fits.
        posted: hardware of each rank, in rank order.

    Raises:
        ValueError: no backend is possible. Names the ranks.
    """
    without = [rank for rank, hardware in enumerate(posted) if not hardware.gpu]
    if without and len(without) < len(posted):
        having = [rank for rank in range(len(posted)) if rank not in without]
        raise ValueError(
            f"{rank_words(having)} {'has' if len(having) == 1 else 'have'} a GPU and "
            f"{rank_words(without)} {'has' if len(without) == 1 else 'have'} none"
            f"{_missing_cuda_reason(posted[without[0]])}: a process group cannot combine them. "
            "Leave those machines out, or take CPUs everywhere (--gpu none)"
        )
    sharing = ranks_sharing_devices(posted)
    if requested is not None:
        if sharing and "nccl" in backend_by_device(requested).values():
            device = posted[sharing[0][0]]
            raise ValueError(
                f"{rank_words(sharing[0])} share one GPU ({device.name or 'GPU'} {device.gpu}), "
                "and NCCL refuses that: leave backend= out, which takes gloo, or ask for one rank "
                "per GPU"
            )
        return requested
    if without:
        return GLOO
    # Ranks that share a GPU or have a part of one (MIG) use gloo.
    has_mig_devices = any(hardware.gpu.startswith("MIG-") for hardware in posted)
    return SHARED if sharing or has_mig_devices else NCCL


def ranks_sharing_devices(posted: Sequence[RankHardware]) -> list[list[int]]:
    """Return the ranks that use one device, for each device with several ranks."""
    ranks_by_device: dict[tuple[str, str], list[int]] = {}
    for rank, hardware in enumerate(posted):
        if hardware.gpu:
            ranks_by_device.setdefault((hardware.machine, hardware.gpu), []).append(rank)
    return [ranks for ranks in ranks_by_device.values() if len(ranks) > 1]


def backend_by_device(backend: str) -> dict[str, str]:
    """Return the backend by device, for example of ``"cpu:gloo,cuda:nccl"``.

    A single name serves all devices that torch lets it serve.
    """
    if ":" in backend:
        return dict(pair.strip().split(":", 1) for pair in backend.lower().split(","))
    return {"nccl": {"cuda": "nccl"}}.get(
        backend.lower(), dict.fromkeys(("cpu", "cuda"), backend.lower())
    )


def device_for_control_messages(group_backends: Mapping[str, str]) -> str:
    """Return the device for the messages that ranks must exchange.

    It is the CPU if a backend serves it, otherwise the first device that is served. There always is
    one: the first message proves membership, and a backend that is not known here must not skip it.
    """
    if group_backends.get("cpu") in CPU_BACKENDS or "cuda" not in group_backends:
        return "cpu" if "cpu" in group_backends else next(iter(group_backends))
    return "cuda"


def _missing_cuda_reason(rank: RankHardware) -> str:
    return "" if rank.cuda else " (its torch is built without CUDA)"
