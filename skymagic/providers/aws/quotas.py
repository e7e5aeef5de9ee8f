"""vCPU quotas: how many vCPUs of a family an account may run in a region, on demand and spot, and how many it runs.

They are compared before the first machine is rented: EC2 refuses single machines, so that a pool over its quota would have a
head that waits, and is paid for, while its workers never come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.instance_types import InstanceType
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.refusals import optional

_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
# Family → (on demand, spot), each (code, name). https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_QUOTAS: dict[str, tuple[tuple[str, str] | None, tuple[str, str] | None]] = {
    "standard": (
        ("L-1216C47A", f"Running On-Demand {_STANDARD} instances"),
        ("L-34B43A08", f"All {_STANDARD} Spot Instance Requests"),
    ),
    "g": (
        ("L-DB2E81BA", "Running On-Demand G and VT instances"),
        ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ),
    "p": (("L-417A185B", "Running On-Demand P instances"), ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests")),
    "p5": (("L-417A185B", "Running On-Demand P instances"), ("L-C4BD4855", "All P5 Spot Instance Requests")),
    # which of the spot quotas counts P6 is not documented: nothing is compared, and EC2 says
    "p6": (("L-417A185B", "Running On-Demand P instances"), None),
    "x": (("L-7295265B", "Running On-Demand X instances"), ("L-E3A00192", "All X Spot Instance Requests")),
}
_LETTERS = {
    **dict.fromkeys("acdhimrtz", "standard"),
    "im": "standard",
    "is": "standard",
    "g": "g",
    "gr": "g",
    "vt": "g",
    "x": "x",
}
COUNTED = ["pending", "running"]
"""States in which a machine's vCPUs count."""


@dataclass(frozen=True)
class Quota:
    """A quota of one region; None where nobody tells.

    Attributes:
        limit: vCPUs that may run. used: vCPUs that run now.
    """

    region: str
    code: str
    name: str
    limit: float | None = None
    used: int | None = None

    def allows(self, vcpus: int) -> bool | None:
        """Whether so many more may run; None where that is not known."""
        if self.limit is None:
            return None
        if vcpus + (self.used or 0) > self.limit:
            return False
        return None if self.used is None else True

    def shortfall(self, offer: Offer, nodes: int) -> str:
        """Why so many machines of an offer are too many, and what to do."""
        use = "" if self.used is None else f", and {self.used} are in use"
        return (
            f"{self.region} allows {self.limit or 0:.12g} vCPUs by the quota {self.name!r} ({self.code}){use}: "
            f"{nodes} × {offer.instance_type} need {nodes * offer.vcpus}. Ask for more at "
            f"https://{self.region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{self.code}"
        )


def quota_of(instance_type: str, spot: bool) -> tuple[str, str] | None:
    """(code, name) of the quota that counts a type; None where none is known for it."""
    family = re.match(r"([a-z]+)-?(\d*)", instance_type.partition(".")[0])
    if family is None:
        return None
    letters, generation = family.groups()
    key = _LETTERS.get(letters, "")
    if letters == "p":
        key = "p" if generation in "234" else f"p{generation}"
    quota = _QUOTAS.get(key)
    return quota[spot] if quota is not None else None


def quotas(
    clients: Clients, region: str, offers: Iterable[Offer], types: Mapping[str, InstanceType], notes: list[str]
) -> dict[str, Quota]:
    """The quotas of a region's offers by code, with what is in use; what is not told is not known, and `notes` says why.

    Raises:
        CloudError: credentials are refused.
    """
    codes = dict(filter(None, (quota_of(one.instance_type, one.spot) for one in offers)))
    found = {code: Quota(region, code, name) for code, name in sorted(codes.items())}
    limited = False
    for code, quota in found.items():
        said = optional(partial(_limit, clients, region, code), "servicequotas:GetServiceQuota", notes)
        found[code] = replace(quota, limit=said)
        limited = limited or said is not None
    used = optional(lambda: in_use(clients, region, types), "ec2:DescribeInstances", notes) if limited else None
    if used is None:
        return found
    return {code: replace(quota, used=used.get(code, 0)) for code, quota in found.items()}


def _limit(clients: Clients, region: str, code: str) -> float:
    answer = clients.call("service-quotas", region, "GetServiceQuota", ServiceCode="ec2", QuotaCode=code)
    return float(answer["Quota"]["Value"])


def in_use(clients: Clients, region: str, types: Mapping[str, InstanceType]) -> dict[str, int]:
    """vCPUs that run in a region, by quota. Raises CloudError: it cannot be asked."""
    used: dict[str, int] = {}
    states = [{"Name": "instance-state-name", "Values": COUNTED}]
    for reservation in clients.pages(
        "ec2", region, "DescribeInstances", "Reservations", Filters=states, MaxResults=1000
    ):
        for one in reservation["Instances"]:
            name = str(one["InstanceType"])
            quota = quota_of(name, one.get("InstanceLifecycle") == "spot")
            if quota is not None:
                cpu = one.get("CpuOptions") or {}
                told = int(cpu.get("CoreCount") or 0) * int(cpu.get("ThreadsPerCore") or 1)
                used[quota[0]] = used.get(quota[0], 0) + (told or (types[name].vcpus if name in types else 0))
    return used
