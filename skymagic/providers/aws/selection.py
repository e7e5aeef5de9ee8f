"""Which types serve a request, which offers that makes, and in what order; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from skymagic.errors import RequestError
from skymagic.plan.accelerators import NOT_CUDA, kind, matches
from skymagic.plan.requests import PoolRequest
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import AtLeast
from skymagic.providers.aws.catalogue import Catalogue, InstanceType
from skymagic.providers.aws.prices import Prices


@dataclass(frozen=True)
class MachineOffer:
    """Machines of one type in one zone, on demand or spot.

    Attributes:
        price: dollars per hour of one machine; None where nobody told it.
        priced: where the price is from: ``"spot history"``, ``"price list"``, or ``""``.
        gpu: canonical name of its GPUs; None without. gpus: how many. gpu_memory: GB of one of them.
        vcpus: virtual CPUs. memory: GB.
        network: Gbit/s of the whole machine, 0 where unknown. cards: network cards; with several it takes no public address.
        architecture: ``"x86_64"`` or ``"arm64"``.
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
    efa: bool = False
    architecture: str = "x86_64"


ARCHITECTURE = "x86_64"
"""The architecture of most notebooks, whose packages the nodes get."""
LEAST_CPUS, LEAST_MEMORY = 2, 8.0
"""What a machine without GPUs has at least where nothing is said: Python, torch and a little data have room."""
MOST_TYPES = 40
"""So many of the smallest types without GPUs are compared by price."""
_ROUNDING = 0.01  # of memory, as a share: 1152 GB may be told as 1152.0 or 1151.9


BEFORE_OPEN = ("K80", "M60", "P4", "P40", "P100", "V100", "V100-32GB")
"""GPUs that NVIDIA's open kernel module does not serve (Kepler to Volta): the image's driver has that module alone."""


def wanted(request: PoolRequest, types: Iterable[InstanceType]) -> list[InstanceType]:
    """The types that serve a request, best known first; none where nothing does.

    With GPUs: those with exactly so many, or where there is none the smallest number that is larger. Without: this
    generation's machines for general use, the smallest first, never one whose processor is held back after a while (burstable, flex).
    """
    usable = [one for one in types if _had(request, one) and _enough(request, one)]
    if request.accelerator is None:
        plain = [one for one in usable if not one.gpus and one.general]
        # x and u7 have the most memory, and a price to match: only where nothing else has as much
        common = [one for one in plain if re.match(r"[cmr]\d", one.name)]
        large = [one for one in plain if re.match(r"x\d|u7", one.name)]
        return sorted(
            common or large, key=lambda one: (one.vcpus, one.memory, -one.generation, one.name)
        )[:MOST_TYPES]
    name, count = request.accelerator.name, request.accelerator.count
    having = [one for one in usable if one.gpu and one.gpus >= count and _is(name, one.gpu)]
    fewest = min((one.gpus for one in having), default=0)
    return sorted((one for one in having if one.gpus == fewest), key=lambda one: one.name)


def _is(asked: str, gpu: str) -> bool:
    """Whether a GPU is what was asked for; one that only EC2 has a name for is nothing that can be asked for."""
    return asked == gpu or matches(asked, gpu)


def _had(request: PoolRequest, one: InstanceType) -> bool:
    return (
        one.architecture == ARCHITECTURE
        and not one.accelerated
        and (one.spot if request.spot else one.on_demand)
    )


def _enough(request: PoolRequest, one: InstanceType) -> bool:
    cpus, memory = request.cpus, request.memory
    if request.accelerator is None:
        cpus = cpus or AtLeast(max(LEAST_CPUS, request.procs_per_node or 1), or_more=True)
        memory = memory or AtLeast(LEAST_MEMORY, or_more=True)
    return serves(cpus, one.vcpus) and serves(memory, one.memory)


def serves(asked: AtLeast | None, has: float) -> bool:
    """Whether an amount is what was asked for: exactly, or at least."""
    if asked is None:
        return True
    return (
        has >= asked.amount * (1 - _ROUNDING)
        if asked.or_more
        else abs(has - asked.amount) <= asked.amount * _ROUNDING
    )


def offers_of(request: PoolRequest, there: Catalogue, prices: Prices) -> list[MachineOffer]:
    """An offer for each type that serves a request, in each zone that has it."""
    return [
        offer(there.region, zone, one, request.spot, prices)
        for one in wanted(request, there.types.values())
        for zone in there.zones_of(one.name)
    ]


def offer(region: str, zone: str, one: InstanceType, spot: bool, prices: Prices) -> MachineOffer:
    """Machines of a type in a zone."""
    price, priced = prices.price(one.name, zone, spot)
    same = [
        "gpu",
        "gpus",
        "gpu_memory",
        "vcpus",
        "memory",
        "network",
        "cards",
        "efa",
        "architecture",
    ]
    values = {name: getattr(one, name) for name in same}
    return MachineOffer(region, zone, one.name, spot=spot, price=price, priced=priced, **values)


def by_price(found: Iterable[MachineOffer], regions: Sequence[str] = ()) -> list[MachineOffer]:
    """The cheapest first, those without a price last; at one price the faster network, then the regions as they were named."""
    place = {region: index for index, region in enumerate(regions)}

    def key(one: MachineOffer) -> tuple[object, ...]:
        unknown = one.price is None
        # without prices the smaller machine is the cheaper one, as a rule
        return (
            unknown, one.price or 0.0, (one.gpus, one.vcpus, one.memory) if unknown else (0, 0, 0.0), -one.network,
            place.get(one.region, len(place)), one.region, one.instance_type, one.zone,
        )  # fmt: skip

    return sorted(found, key=key)


def per_hour(one: MachineOffer, nodes: int) -> float | None:
    """Dollars per hour of a pool of so many machines; None where the price is not known."""
    return None if one.price is None else one.price * nodes


def check_served(request: PoolRequest) -> None:
    """Raise RequestError for accelerators that no type serves, whatever a region has."""
    if request.accelerator is None:
        return
    device = kind(request.accelerator.name)
    if not device.cuda:
        raise RequestError(f"{device.name} is not supported on EC2: {NOT_CUDA}")
    if device.name in BEFORE_OPEN and not request.cloud.image_id:
        raise RequestError(
            f"{device.name} does not work with the image for GPUs on EC2: its driver has NVIDIA's open kernel module, which serves Turing and "
            "later (T4, A10G, L4, A100, …). Take one of those, or your own image with the proprietary module: "
            "%config SkyMagic.aws = {'image_id': 'ami-…'}"
        )
    if device.name in ("T4G", "GH200", "GB200", "GB300"):
        raise RequestError(
            f"{device.name} comes with ARM processors on EC2, and nodes are {ARCHITECTURE} as most notebooks: T4 or L4 instead"
        )


def nothing(request: PoolRequest, there: Mapping[str, Catalogue]) -> list[str]:
    """Why no type in any of these regions serves a request, with what comes near."""
    regions = " or ".join(there)
    types = [
        one
        for catalogue in there.values()
        for one in catalogue.types.values()
        if _had(request, one)
    ]
    how = " on spot" if request.spot else ""
    gpu = request.accelerator
    if gpu is None:
        asked = " and ".join(_amounts(request))
        exactly = any(one is not None and not one.or_more for one in (request.cpus, request.memory))
        exact = "; write 8+ for at least 8" if exactly else ""
        return [f"no type of machine in {regions} has {asked}{how}{exact}"]
    same = sorted({one.gpus for one in types if one.gpu and _is(gpu.name, one.gpu)})
    if not same:
        names = sorted({one.gpu for one in types if one.gpu})
        nearest = did_you_mean(gpu.name, names) or f"; available: {', '.join(names) or 'none'}"
        return [f"no machine in {regions} has {gpu.name}{how}{nearest}"]
    if same[-1] < gpu.count:
        counts = ", ".join(map(str, same))
        return [
            f"no machine in {regions} has {gpu.count} × {gpu.name}{how}: they have {counts}; take more nodes of fewer GPUs"
        ]
    has = sorted(
        {
            (one.vcpus, one.memory, one.name)
            for one in types
            if one.gpu and _is(gpu.name, one.gpu) and one.gpus >= gpu.count
        }
    )
    words = "; ".join(
        f"{name} has {vcpus} CPUs and {memory:.12g} GB" for vcpus, memory, name in has[:4]
    )
    return [
        f"no machine in {regions} has {gpu} and {' and '.join(_amounts(request))}{how}: {words}"
    ]


def _amounts(request: PoolRequest) -> Iterator[str]:
    for asked, unit in ((request.cpus, "CPUs"), (request.memory, "GB")):
        if asked is not None:
            yield f"{'at least' if asked.or_more else 'exactly'} {asked.amount:.12g} {unit}"
