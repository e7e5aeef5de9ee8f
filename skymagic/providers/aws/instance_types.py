"""Types of EC2's machines: read from what DescribeInstanceTypes says, with GPUs under the names that users write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.accelerators import canonical, kind

MIB_PER_GB = 1024
"""EC2 counts memory in binary units, and so do the numbers that it is known by: 64 GB are 65536 MiB."""
_RATE = re.compile(r"(?:(\d+)x )?([\d.]+) Gigabit")


@dataclass(frozen=True)
class InstanceType:
    """A type of machine, wherever it is offered.

    Attributes:
        gpu: canonical name, EC2's own where nobody else has one; None without. gpus: how many whole ones.
        gpu_memory: GB of one. memory: GB. nvme: GB of disks in the machine.
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
    nvme: float = 0.0
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


def read(info: Mapping[str, Any]) -> InstanceType:
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
        nvme=float((info.get("InstanceStorageInfo") or {}).get("TotalSizeInGB") or 0),
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
