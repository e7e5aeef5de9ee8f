"""Machine types that serve a request, the resulting offers, and their order. Pure."""

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
        price: dollars per hour for one machine; None if unknown.
        priced: source of the price: ``"spot history"``, ``"price list"``, or ``""``.
        gpu: canonical name of its GPUs; None without GPUs.
        gpus: number of GPUs.
        gpu_memory: GB per GPU.
        vcpus: virtual CPUs.
        memory: GB.
        network: Gbit/s of the whole machine; 0 if unknown.
        cards: number of network cards; with several it takes no public address.
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
"""Architecture of most notebooks, whose packages are installed on the nodes."""
LEAST_CPUS, LEAST_MEMORY = 2, 8.0
"""Default minimum of CPUs and GB for a machine without GPUs.

Leaves room for Python, torch and a little data.
"""
MOST_TYPES = 40
"""Number of the smallest types without GPUs that are compared by price."""
_ROUNDING = 0.01  # relative, for memory: 1152 GB may be reported as 1152.0 or 1151.9


BEFORE_OPEN = ("K80", "M60", "P4", "P40", "P100", "V100", "V100-32GB")
"""GPUs that NVIDIA's open kernel module does not support (Kepler to Volta).

The image's driver only has that module.
"""


def matching_types(request: PoolRequest, types: Iterable[InstanceType]) -> list[InstanceType]:
    """Return the types that serve a request, the best-known first; an empty list if none does.

    With GPUs: types with exactly that many, or else the smallest larger number. Without: this
    generation's general-purpose machines, the smallest first, but never types whose CPU is
    throttled after a while (burstable, flex).
    """
    usable = [
        spec for spec in types if _can_be_rented(request, spec) and _is_large_enough(request, spec)
    ]
    if request.accelerator is None:
        plain = [spec for spec in usable if not spec.gpus and spec.general]
        # x and u7 have the most memory at a high price: only if no other type has as much
        common = [spec for spec in plain if re.match(r"[cmr]\d", spec.name)]
        large = [spec for spec in plain if re.match(r"x\d|u7", spec.name)]
        return sorted(
            common or large, key=lambda spec: (spec.vcpus, spec.memory, -spec.generation, spec.name)
        )[:MOST_TYPES]
    name, count = request.accelerator.name, request.accelerator.count
    having = [
        spec
        for spec in usable
        if spec.gpu and spec.gpus >= count and _is_requested_gpu(name, spec.gpu)
    ]
    fewest = min((spec.gpus for spec in having), default=0)
    return sorted((spec for spec in having if spec.gpus == fewest), key=lambda spec: spec.name)


def _is_requested_gpu(requested: str, gpu: str) -> bool:
    """Return True if a GPU is the requested one.

    A GPU that only EC2 has a name for cannot be requested.
    """
    return requested == gpu or matches(requested, gpu)


def _can_be_rented(request: PoolRequest, instance_type: InstanceType) -> bool:
    return (
        instance_type.architecture == ARCHITECTURE
        and not instance_type.accelerated
        and (instance_type.spot if request.spot else instance_type.on_demand)
    )


def _is_large_enough(request: PoolRequest, instance_type: InstanceType) -> bool:
    cpus, memory = request.cpus, request.memory
    if request.accelerator is None:
        cpus = cpus or AtLeast(max(LEAST_CPUS, request.procs_per_node or 1), or_more=True)
        memory = memory or AtLeast(LEAST_MEMORY, or_more=True)
    return meets(cpus, instance_type.vcpus) and meets(memory, instance_type.memory)


def meets(requested: AtLeast | None, has: float) -> bool:
    """Return True if an amount meets the request: exactly, or at least."""
    if requested is None:
        return True
    return (
        has >= requested.amount * (1 - _ROUNDING)
        if requested.or_more
        else abs(has - requested.amount) <= requested.amount * _ROUNDING
    )


def offers_of(request: PoolRequest, catalogue: Catalogue, prices: Prices) -> list[MachineOffer]:
    """Return an offer for each type that serves the request, in each zone that has it."""
    return [
        offer(catalogue.region, zone, instance_type, request.spot, prices)
        for instance_type in matching_types(request, catalogue.types.values())
        for zone in catalogue.zones_of(instance_type.name)
    ]


def offer(
    region: str, zone: str, instance_type: InstanceType, spot: bool, prices: Prices
) -> MachineOffer:
    """Return the offer for a type in a zone."""
    price, priced = prices.price(instance_type.name, zone, spot)
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
    values = {name: getattr(instance_type, name) for name in same}
    return MachineOffer(
        region, zone, instance_type.name, spot=spot, price=price, priced=priced, **values
    )


def by_price(offers: Iterable[MachineOffer], regions: Sequence[str] = ()) -> list[MachineOffer]:
    """Sort offers by price, those without a price last.

    At equal prices the faster network comes first, then the order of the regions.
    """
    ranks = {region: index for index, region in enumerate(regions)}

    def key(offer: MachineOffer) -> tuple[object, ...]:
        unknown = offer.price is None
        # without prices, assume that the smaller machine is cheaper
        return (
            unknown,
            offer.price or 0.0,
            (offer.gpus, offer.vcpus, offer.memory) if unknown else (0, 0, 0.0),
            -offer.network,
            ranks.get(offer.region, len(ranks)),
            offer.region,
            offer.instance_type,
            offer.zone,
        )

    return sorted(offers, key=key)


def per_hour(offer: MachineOffer, nodes: int) -> float | None:
    """Return the price of a pool of `nodes` machines in dollars per hour; None if unknown."""
    return None if offer.price is None else offer.price * nodes


def check_served(request: PoolRequest) -> None:
    """Raise RequestError for accelerators that no type serves in any region."""
    if request.accelerator is None:
        return
    device = kind(request.accelerator.name)
    if not device.cuda:
        raise RequestError(f"{device.name} is not supported on EC2: {NOT_CUDA}")
    if device.name in BEFORE_OPEN and not request.cloud.image_id:
        raise RequestError(
            f"{device.name} does not work with the image for GPUs on EC2: "
            "its driver has NVIDIA's open kernel module, which serves Turing and "
            "later (T4, A10G, L4, A100, …). "
            "Take one of those, or your own image with the proprietary module: "
            "%config SkyMagic.aws = {'image_id': 'ami-…'}"
        )
    if device.name in ("T4G", "GH200", "GB200", "GB300"):
        raise RequestError(
            f"{device.name} comes with ARM processors on EC2, "
            f"and nodes are {ARCHITECTURE} as most notebooks: T4 or L4 instead"
        )


def explain_no_offer(request: PoolRequest, catalogues: Mapping[str, Catalogue]) -> list[str]:
    """Explain why no type in these regions serves the request, and suggest what comes close."""
    regions = " or ".join(catalogues)
    types = [
        instance_type
        for catalogue in catalogues.values()
        for instance_type in catalogue.types.values()
        if _can_be_rented(request, instance_type)
    ]
    how = " on spot" if request.spot else ""
    gpu = request.accelerator
    if gpu is None:
        amounts = " and ".join(_amounts(request))
        exactly = any(
            amount is not None and not amount.or_more for amount in (request.cpus, request.memory)
        )
        exact = "; write 8+ for at least 8" if exactly else ""
        return [f"no type of machine in {regions} has {amounts}{how}{exact}"]
    same = sorted(
        {
            instance_type.gpus
            for instance_type in types
            if instance_type.gpu and _is_requested_gpu(gpu.name, instance_type.gpu)
        }
    )
    if not same:
        names = sorted({instance_type.gpu for instance_type in types if instance_type.gpu})
        nearest = did_you_mean(gpu.name, names) or f"; available: {', '.join(names) or 'none'}"
        return [f"no machine in {regions} has {gpu.name}{how}{nearest}"]
    if same[-1] < gpu.count:
        counts = ", ".join(map(str, same))
        return [
            f"no machine in {regions} has {gpu.count} × {gpu.name}{how}: "
            f"they have {counts}; take more nodes of fewer GPUs"
        ]
    has = sorted(
        {
            (instance_type.vcpus, instance_type.memory, instance_type.name)
            for instance_type in types
            if instance_type.gpu
            and _is_requested_gpu(gpu.name, instance_type.gpu)
            and instance_type.gpus >= gpu.count
        }
    )
    examples = "; ".join(
        f"{name} has {vcpus} CPUs and {memory:.12g} GB" for vcpus, memory, name in has[:4]
    )
    return [
        f"no machine in {regions} has {gpu} and {' and '.join(_amounts(request))}{how}: {examples}"
    ]


def _amounts(request: PoolRequest) -> Iterator[str]:
    for amount, unit in ((request.cpus, "CPUs"), (request.memory, "GB")):
        if amount is not None:
            yield f"{'at least' if amount.or_more else 'exactly'} {amount.amount:.12g} {unit}"
