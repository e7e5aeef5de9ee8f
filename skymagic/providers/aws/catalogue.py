"""What a region has: types of machines, and the zones where each is offered; kept on disk, for both change seldom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from skymagic.providers.aws import estimates
from skymagic.providers.aws.cache import Cache
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.instance_types import InstanceType, read
from skymagic.providers.aws.refusals import optional

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


def catalogue(clients: Clients, region: str, cache: Cache) -> Catalogue:
    """Types and zones of a region; the built-in list of types where EC2's own may not be asked.

    Raises:
        CloudError: credentials are missing or refused, or there is no such region.
    """
    notes: list[str] = []
    label = place(clients, region)
    types = optional(
        lambda: cache.fresh(f"types-{label}", DAY, lambda: _types(clients, region)), "ec2:DescribeInstanceTypes", notes
    )
    if types is None:
        notes[0] += f"; types are those of a built-in list of {estimates.DATE}"
    zones = optional(
        lambda: cache.fresh(f"zones-{label}", DAY, lambda: _zones(clients, region)),
        "ec2:DescribeInstanceTypeOfferings",
        notes,
    )
    return Catalogue(
        region,
        estimates.TYPES if types is None else {one["name"]: InstanceType(**one) for one in types.value},
        {} if zones is None else {name: tuple(where) for name, where in zones.value.items()},
        tuple(notes),
    )


def place(clients: Clients, region: str) -> str:
    """A region's name for the cache; with profile and endpoint, for accounts have zones and prices of their own."""
    profile = clients.profile or os.environ.get("AWS_PROFILE")
    address = clients.endpoint_url or os.environ.get("AWS_ENDPOINT_URL") or ""
    return "-".join(filter(None, (region, profile, urlsplit(address).netloc)))


def _types(clients: Clients, region: str) -> list[dict[str, Any]]:
    virtual = [{"Name": "bare-metal", "Values": ["false"]}]
    pages = clients.pages("ec2", region, "DescribeInstanceTypes", "InstanceTypes", Filters=virtual, MaxResults=100)
    return [asdict(read(info)) for info in pages]


def _zones(clients: Clients, region: str) -> dict[str, list[str]]:
    offered: dict[str, list[str]] = {}
    by_zone = {"LocationType": "availability-zone", "MaxResults": 1000}
    for one in clients.pages("ec2", region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings", **by_zone):
        offered.setdefault(one["InstanceType"], []).append(one["Location"])
    return {name: sorted(where) for name, where in offered.items()}
