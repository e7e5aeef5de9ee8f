"""What a region has: its name, its types of machines with GPUs under the names that users write, and their zones.

Types and zones are kept on disk, for both change seldom.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from skymagic.errors import CloudError, RequestError
from skymagic.plan.accelerators import canonical, kind
from skymagic.plan.suggest import did_you_mean
from skymagic.providers.aws.cache import Cache, optional
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients

MIB_PER_GB = 1024  # EC2 counts memory in binary units, and so do the numbers that it is known by: 64 GB are 65536 MiB
_RATE = re.compile(r"(?:(\d+)x )?([\d.]+) Gigabit")


@dataclass(frozen=True)
class InstanceType:
    """A type of machine, wherever it is offered.

    Attributes:
        gpu: canonical name, EC2's own where nobody else has one; None without. gpus: how many whole ones.
        gpu_memory: GB of one. memory: GB.
        network: Gbit/s, the most where it is "up to"; 0 where EC2 has words instead.
        cards: network cards.
        accelerated: whether it has devices that are no GPUs (Trainium, Inferentia, FPGA), or parts of one.
        general: whether it may stand for "a machine": this generation, no metal, no CPU credits, no reduced rate (flex).
        spot, on_demand: whether it can be had so.
    """

    name: str
    architecture: str
    vcpus: int
    memory: float
    gpu: str | None = None
    gpus: int = 0
    gpu_memory: float = 0.0
    network: float = 0.0
    cards: int = 1
    efa: bool = False
    accelerated: bool = False
    general: bool = True
    spot: bool = True
    on_demand: bool = True

    @property
    def generation(self) -> int:
        """7 of m7i.large."""
        found = re.match(r"[a-z]+-?(\d+)", self.name)
        return int(found[1]) if found else 0


def instance_type(info: Mapping[str, Any]) -> InstanceType:
    """One entry of DescribeInstanceTypes; what it leaves out counts as none."""
    network, usage = info.get("NetworkInfo") or {}, info.get("SupportedUsageClasses") or ["on-demand"]
    name, architectures = (
        str(info["InstanceType"]),
        (info.get("ProcessorInfo") or {}).get("SupportedArchitectures") or [],
    )
    whole, device, memory, parted = _gpus(info)
    special = any(
        info.get(key) for key in ("NeuronInfo", "InferenceAcceleratorInfo", "FpgaInfo", "MediaAcceleratorInfo")
    )
    odd = info.get("BurstablePerformanceSupported") or info.get("BareMetal") or "-flex." in name
    return InstanceType(
        name,
        architecture="x86_64" if "x86_64" in architectures or not architectures else str(architectures[0]),
        vcpus=int((info.get("VCpuInfo") or {}).get("DefaultVCpus") or 0),
        memory=float((info.get("MemoryInfo") or {}).get("SizeInMiB") or 0) / MIB_PER_GB,
        gpu=device,
        gpus=whole,
        gpu_memory=memory,
        network=rate(str(network.get("NetworkPerformance") or "")),
        cards=int(network.get("MaximumNetworkCards") or 1),
        efa=bool(network.get("EfaSupported")),
        accelerated=bool(special or parted),
        general=bool(info.get("CurrentGeneration", True)) and not odd,
        spot="spot" in usage,
        on_demand="on-demand" in usage,
    )  # fmt: skip


def _gpus(info: Mapping[str, Any]) -> tuple[int, str | None, float, bool]:
    """(whole GPUs, their name, GB of one, whether there are parts of one or several kinds)."""
    listed = (info.get("GpuInfo") or {}).get("Gpus") or []
    if not listed:
        return 0, None, 0.0, False
    first = listed[0]
    count, mib = int(first.get("Count") or 0), float((first.get("MemoryInfo") or {}).get("SizeInMiB") or 0)
    if len(listed) > 1 or not count:  # g6f: an eighth of an L4 has a count of 0
        return 0, None, 0.0, True
    name = gpu_name(str(first.get("Name") or ""), mib)
    try:
        memory = float(kind(name).memory)  # an L4 tells 22888 MiB of its 24 GB
    except RequestError:
        memory = float(round(mib / MIB_PER_GB))
    return count, name, memory, False


def gpu_name(name: str, mib: float) -> str:
    """The canonical name of a GPU that EC2 calls `name`, by its memory where there are several; EC2's own where there is none."""
    for spelling in (f"{name}-{round(mib / MIB_PER_GB)}GB", name):
        try:
            return canonical(spelling)
        except RequestError:
            continue
    return name


def rate(text: str) -> float:
    """Gbit/s of EC2's words: ``"4x 100 Gigabit"`` is 400, ``"Up to 25 Gigabit"`` 25, ``"High"`` 0."""
    found = _RATE.search(text)
    return float(found[1] or 1) * float(found[2]) if found else 0.0


def used_regions(clients: AwsClients) -> list[str]:
    """The regions that the account uses. Raises CloudError."""
    return _described(clients, every=False)


def check_regions(names: Sequence[str], clients: AwsClients) -> None:
    """Refuse names of regions that there are not. One that boto3 does not know may be new: EC2 is asked.

    Raises:
        RequestError: with the nearest name for each.
    """
    unknown = [name for name in names if name not in clients.known_regions()]
    if not unknown:
        return
    try:
        there = _described(clients, every=True)
    except CloudError:  # whatever needs it asks again, and says what is wrong
        return
    mistakes = [f"AWS has no region {name!r}{did_you_mean(name, there)}" for name in unknown if name not in there]
    if mistakes:
        raise RequestError(mistakes)


def _described(clients: AwsClients, *, every: bool) -> list[str]:
    answer = clients.call("ec2", clients.region or DEFAULT_REGION, "DescribeRegions", AllRegions=every)
    return sorted(each["RegionName"] for each in answer["Regions"])


DAY = 86400.0


@dataclass(frozen=True)
class Catalogue:
    """What a region has.

    Attributes:
        types: by name. zones: zones of each; a type that has none is not offered. Empty where EC2 does not tell.
        notes: what it did not tell, and what stands for it.
    """

    region: str
    types: Mapping[str, InstanceType]
    zones: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def zones_of(self, name: str) -> tuple[str, ...]:
        """The zones that offer a type; one without a name where nobody tells."""
        return self.zones.get(name, ()) if self.zones else ("",)


def catalogue_of(clients: AwsClients, region: str, cache: Cache) -> Catalogue:
    """Types and zones of a region.

    Raises:
        CloudError: credentials are missing or refused, or may not ask for types; or there is no such region.
    """
    notes: list[str] = []
    label = cache_label(clients, region)
    types = cache.fresh(f"types-{label}", DAY, lambda: _types(clients, region))
    zones = optional(
        lambda: cache.fresh(f"zones-{label}", DAY, lambda: _zones(clients, region)),
        "ec2:DescribeInstanceTypeOfferings",
        notes,
    )
    return Catalogue(
        region,
        {one["name"]: InstanceType(**one) for one in types.value},
        {} if zones is None else {name: tuple(where) for name, where in zones.value.items()},
        tuple(notes),
    )


def cache_label(clients: AwsClients, region: str) -> str:
    """A region's name for the cache; with profile and endpoint, for accounts have zones and prices of their own."""
    profile = clients.profile or os.environ.get("AWS_PROFILE")
    address = clients.endpoint_url or os.environ.get("AWS_ENDPOINT_URL") or ""
    return "-".join(filter(None, (region, profile, urlsplit(address).netloc)))


def _types(clients: AwsClients, region: str) -> list[dict[str, Any]]:
    virtual = [{"Name": "bare-metal", "Values": ["false"]}]
    pages = clients.pages("ec2", region, "DescribeInstanceTypes", "InstanceTypes", Filters=virtual, MaxResults=100)
    return [asdict(instance_type(info)) for info in pages]


def _zones(clients: AwsClients, region: str) -> dict[str, list[str]]:
    offered: dict[str, list[str]] = {}
    by_zone = {"LocationType": "availability-zone", "MaxResults": 1000}
    for one in clients.pages("ec2", region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings", **by_zone):
        offered.setdefault(one["InstanceType"], []).append(one["Location"])
    return {name: sorted(where) for name, where in offered.items()}
