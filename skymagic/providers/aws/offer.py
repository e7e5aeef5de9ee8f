"""What can be rented: a machine's type in a zone, with what it has and costs; a pure value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """Machines of one type in one zone, on demand or spot.

    Attributes:
        price: dollars per hour of one machine; None where nobody told it.
        priced: where the price is from: ``"spot history"``, ``"price list"``, ``"estimate of 2026-11-01"``, or ``""``.
        gpu: canonical name of its GPUs; None without. gpus: how many. gpu_memory: GB of one of them.
        vcpus: virtual CPUs, as quotas count them. memory: GB.
        network: Gbit/s of the whole machine, 0 where unknown. cards: network cards; with several it takes no public address.
        nvme: GB on disks of the machine itself, which are lost with it.
        architecture: ``"x86_64"`` or ``"arm64"``.
        reservation: ``"cr-…"``: the reserved capacity that it is of; "" for none. block: whether that is a capacity block.
    """

    region: str
    zone: str
    instance_type: str
    spot: bool = False
    price: float | None = None
    priced: str = ""
    gpu: str | None = None
    gpus: int = 0
    gpu_memory: float = 0.0
    vcpus: int = 0
    memory: float = 0.0
    network: float = 0.0
    cards: int = 1
    nvme: float = 0.0
    efa: bool = False
    architecture: str = "x86_64"
    reservation: str = ""
    block: bool = False
