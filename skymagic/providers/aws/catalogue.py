"""Machine types with GPUs that a region offers, their zones, and a built-in list of types.

Types and zones are cached on disk, because both rarely change. The built-in list serves users who
may query neither EC2 nor the price list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from skymagic.errors import CloudError, RequestError
from skymagic.plan.accelerators import canonical, kind
from skymagic.plan.suggest import did_you_mean
from skymagic.providers.aws.cache import Cache, optional
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients

MIB_PER_GB = 1024  # EC2's memory sizes are binary, also where it writes GB: 64 GB are 65536 MiB
_RATE = re.compile(r"(?:(\d+)x )?([\d.]+) Gigabit")


@dataclass(frozen=True)
class InstanceType:
    """A machine type, independent of where it is offered.

    Attributes:
        gpu: canonical GPU name, or EC2's own if it has no canonical one; None without GPUs.
        gpus: number of whole GPUs.
        gpu_memory: GB per GPU.
        memory: GB.
        network: Gbit/s, the maximum if EC2 says "up to"; 0 if EC2 gives only words.
        cards: number of network cards.
        accelerated: True if it has accelerators other than GPUs (Trainium, Inferentia, FPGA), or
            fractional GPUs.
        general: True if it may stand for "a machine": current generation, no bare metal, no CPU
            credits, no reduced rate (flex).
        spot: True if it is available as a spot instance.
        on_demand: True if it is available on demand.
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
        """Generation of the type: 7 for m7i.large."""
        match = re.match(r"[a-z]+-?(\d+)", self.name)
        return int(match[1]) if match else 0


def instance_type(info: Any) -> InstanceType:
    """Convert an entry of DescribeInstanceTypes. Missing fields count as zero."""
    network, usage = (
        info.get("NetworkInfo") or {},
        info.get("SupportedUsageClasses") or ["on-demand"],
    )
    name, architectures = (
        str(info["InstanceType"]),
        (info.get("ProcessorInfo") or {}).get("SupportedArchitectures") or [],
    )
    gpu_count, device, memory, parted = _gpus(info)
    special = any(
        info.get(key)
        for key in ("NeuronInfo", "InferenceAcceleratorInfo", "FpgaInfo", "MediaAcceleratorInfo")
    )
    odd = info.get("BurstablePerformanceSupported") or info.get("BareMetal") or "-flex." in name
    return InstanceType(
        name,
        architecture="x86_64"
        if "x86_64" in architectures or not architectures
        else str(architectures[0]),
        vcpus=int((info.get("VCpuInfo") or {}).get("DefaultVCpus") or 0),
        memory=float((info.get("MemoryInfo") or {}).get("SizeInMiB") or 0) / MIB_PER_GB,
        gpu=device,
        gpus=gpu_count,
        gpu_memory=memory,
        network=rate(str(network.get("NetworkPerformance") or "")),
        cards=int(network.get("MaximumNetworkCards") or 1),
        efa=bool(network.get("EfaSupported")),
        accelerated=bool(special or parted),
        general=bool(info.get("CurrentGeneration", True)) and not odd,
        spot="spot" in usage,
        on_demand="on-demand" in usage,
    )


def _gpus(info: Any) -> tuple[int, str | None, float, bool]:
    """Parse the GPUs of a type.

    Returns:
        The number of whole GPUs, their name, GB per GPU, and True if they are fractional or of
        several kinds.
    """
    listed = (info.get("GpuInfo") or {}).get("Gpus") or []
    if not listed:
        return 0, None, 0.0, False
    first = listed[0]
    count, mib = (
        int(first.get("Count") or 0),
        float((first.get("MemoryInfo") or {}).get("SizeInMiB") or 0),
    )
    if len(listed) > 1 or not count:  # g6f: an eighth of an L4 has a count of 0
        return 0, None, 0.0, True
    name = gpu_name(str(first.get("Name") or ""), mib)
    try:
        memory = float(kind(name).memory)  # an L4 reports 22888 MiB of its 24 GB
    except RequestError:
        memory = float(round(mib / MIB_PER_GB))
    return count, name, memory, False


def gpu_name(name: str, mib: float) -> str:
    """Return the canonical name of the GPU that EC2 calls `name`, or EC2's own name without one.

    Variants that differ in memory are distinguished by their memory.
    """
    for spelling in (f"{name}-{round(mib / MIB_PER_GB)}GB", name):
        try:
            return canonical(spelling)
        except RequestError:
            continue
    return name


def rate(text: str) -> float:
    """Parse EC2's network speed to Gbit/s: ``"4x 100 Gigabit"`` → 400, ``"High"`` → 0.

    ``"Up to 25 Gigabit"`` is 25.
    """
    match = _RATE.search(text)
    return float(match[1] or 1) * float(match[2]) if match else 0.0


ESTIMATED = "2025-07-01"
"""Date of these on-demand prices for Linux in us-east-1."""
ESTIMATE = f"estimate of {ESTIMATED}"

# type, dollars per hour, vCPUs, GB, GPU:count, Gbit/s, network cards, EFA
_TABLE = """
g4dn.xlarge      0.526      4    16  T4:1         25   1  -
g4dn.2xlarge     0.752      8    32  T4:1         25   1  -
g4dn.4xlarge     1.204     16    64  T4:1         25   1  -
g4dn.8xlarge     2.176     32   128  T4:1         50   1  efa
g4dn.16xlarge    4.352     64   256  T4:1         50   1  efa
g4dn.12xlarge    3.912     48   192  T4:4         50   1  efa
g5.xlarge        1.006      4    16  A10G:1       10   1  -
g5.2xlarge       1.212      8    32  A10G:1       10   1  -
g5.4xlarge       1.624     16    64  A10G:1       25   1  -
g5.8xlarge       2.448     32   128  A10G:1       25   1  efa
g5.16xlarge      4.096     64   256  A10G:1       25   1  efa
g5.12xlarge      5.672     48   192  A10G:4       40   1  efa
g5.24xlarge      8.144     96   384  A10G:4       50   1  efa
g5.48xlarge     16.288    192   768  A10G:8      100   1  efa
g6.xlarge        0.8048     4    16  L4:1         10   1  -
g6.2xlarge       0.9776     8    32  L4:1         10   1  -
g6.4xlarge       1.3232    16    64  L4:1         25   1  -
g6.8xlarge       2.0144    32   128  L4:1         25   1  efa
g6.16xlarge      3.3968    64   256  L4:1         25   1  efa
g6.12xlarge      4.6016    48   192  L4:4         40   1  efa
g6.24xlarge      6.6752    96   384  L4:4         50   1  efa
g6.48xlarge     13.3504   192   768  L4:8        100   1  efa
g6e.xlarge       1.861      4    32  L40S:1       20   1  -
g6e.2xlarge      2.24208    8    64  L40S:1       20   1  -
g6e.4xlarge      3.00424   16   128  L40S:1       20   1  -
g6e.8xlarge      4.52856   32   256  L40S:1       25   1  efa
g6e.16xlarge     7.57719   64   512  L40S:1       35   1  efa
g6e.12xlarge    10.49264   48   384  L40S:4      100   1  efa
g6e.24xlarge    15.06559   96   768  L40S:4      200   2  efa
g6e.48xlarge    30.13118  192  1536  L40S:8      400   4  efa
p3dn.24xlarge   31.212     96   768  V100-32GB:8 100   1  efa
p4d.24xlarge    21.957642  96  1152  A100:8      400   4  efa
p4de.24xlarge   27.447075  96  1152  A100-80GB:8 400   4  efa
p5.4xlarge       6.88      16   256  H100:1      100   1  efa
p5.48xlarge     55.04     192  2048  H100:8     3200  32  efa
p5en.48xlarge   63.296    192  2048  H200:8     3200  16  efa
p6-b200.48xlarge 113.9328 192  2048  B200:8     3200   8  efa
"""


def _estimate(line: str) -> tuple[InstanceType, float]:
    name, price, vcpus, memory, gpu, network, cards, efa = line.split()
    device, _, count = gpu.partition(":")
    return InstanceType(
        name,
        "x86_64",
        int(vcpus),
        float(memory),
        gpu=device if count else None,
        gpus=int(count or 0),
        gpu_memory=float(kind(device).memory) if count else 0.0,
        network=float(network),
        cards=int(cards),
        efa=efa == "efa",
    ), float(price)


def _plain(family: str, price: float, memory: int) -> Iterator[tuple[InstanceType, float]]:
    """Yield types without GPUs.

    vCPUs, memory (`memory` GB per vCPU) and price double from size to size.
    """
    for step, size in enumerate(("large", "xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")):
        vcpus, network = 2 << step, 25.0 if size == "16xlarge" else 12.5
        yield (
            InstanceType(f"{family}.{size}", "x86_64", vcpus, memory * vcpus, network=network),
            round(price * 2**step, 6),
        )


_ROWS = [
    *(_estimate(line) for line in _TABLE.strip().splitlines()),
    *_plain("c7i", 0.08925, 2),
    *_plain("m7i", 0.1008, 4),
    *_plain("r7i", 0.1323, 8),
]
TYPES = {machine_type.name: machine_type for machine_type, _ in _ROWS}
"""Machine types by name."""
PRICES = {machine_type.name: price for machine_type, price in _ROWS}
"""On-demand price in us-east-1 by type, in dollars per hour for one machine."""


def used_regions(clients: AwsClients) -> list[str]:
    """Return the regions that the account uses. Raises CloudError."""
    return _region_names(clients, include_all=False)


def check_regions(names: Sequence[str], clients: AwsClients) -> None:
    """Refuse unknown region names. A region unknown to boto3 may be new, so EC2 is queried.

    Raises:
        RequestError: suggests the nearest name for each.
    """
    unknown = [name for name in names if name not in clients.known_regions()]
    if not unknown:
        return
    try:
        existing = _region_names(clients, include_all=True)
    except CloudError:  # later calls query EC2 again and report the problem
        return
    mistakes = [
        f"AWS has no region {name!r}{did_you_mean(name, existing)}"
        for name in unknown
        if name not in existing
    ]
    if mistakes:
        raise RequestError(mistakes)


def _region_names(clients: AwsClients, *, include_all: bool) -> list[str]:
    answer = clients.call(
        "ec2", clients.region or DEFAULT_REGION, "DescribeRegions", AllRegions=include_all
    )
    return sorted(region["RegionName"] for region in answer["Regions"])


DAY = 86400.0


@dataclass(frozen=True)
class Catalogue:
    """Machine types and zones of a region.

    Attributes:
        types: types by name.
        zones: zones by type; a type without zones is not offered. Empty if EC2 does not answer.
        notes: unanswered queries, and what is used instead.
    """

    region: str
    types: Mapping[str, InstanceType]
    zones: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def zones_of(self, name: str) -> tuple[str, ...]:
        """Return the zones that offer a type, or one nameless zone if they are unknown."""
        return self.zones.get(name, ()) if self.zones else ("",)


def catalogue_of(clients: AwsClients, region: str, cache: Cache) -> Catalogue:
    """Return types and zones of a region. Uses the built-in list if EC2's types may not be queried.

    Raises:
        CloudError: credentials are missing or refused, or the region does not exist.
    """
    notes: list[str] = []
    label = cache_label(clients, region)
    types = optional(
        lambda: cache.fresh(
            f"types-{label}", DAY, lambda: list(map(asdict, _types(clients, region)))
        ),
        "ec2:DescribeInstanceTypes",
        notes,
    )
    if types is None:
        notes[0] += f"; types are those of a built-in list of {ESTIMATED}"
    zones = optional(
        lambda: cache.fresh(f"zones-{label}", DAY, lambda: _zones(clients, region)),
        "ec2:DescribeInstanceTypeOfferings",
        notes,
    )
    return Catalogue(
        region,
        TYPES
        if types is None
        else {fields["name"]: InstanceType(**fields) for fields in types.value},
        {} if zones is None else {name: tuple(names) for name, names in zones.value.items()},
        tuple(notes),
    )


def cache_label(clients: AwsClients, region: str) -> str:
    """Return a region's name in the cache.

    Includes profile and endpoint, because each account has different zones and prices.
    """
    profile = clients.profile or os.environ.get("AWS_PROFILE")
    address = clients.endpoint_url or os.environ.get("AWS_ENDPOINT_URL") or ""
    return "-".join(filter(None, (region, profile, urlsplit(address).netloc)))


def _types(clients: AwsClients, region: str) -> list[InstanceType]:
    virtual = [{"Name": "bare-metal", "Values": ["false"]}]
    pages = clients.pages(
        "ec2", region, "DescribeInstanceTypes", "InstanceTypes", Filters=virtual, MaxResults=100
    )
    return [instance_type(info) for info in pages]


def _zones(clients: AwsClients, region: str) -> dict[str, list[str]]:
    offered: dict[str, list[str]] = {}
    by_zone = {"LocationType": "availability-zone", "MaxResults": 1000}
    for offering in clients.pages(
        "ec2", region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings", **by_zone
    ):
        offered.setdefault(offering["InstanceType"], []).append(offering["Location"])
    return {name: sorted(names) for name, names in offered.items()}
