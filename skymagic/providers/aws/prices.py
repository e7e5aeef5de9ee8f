"""What machines cost per hour: the price list's prices on demand, and the latest prices of spot in each zone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from skymagic.providers.aws import catalogue
from skymagic.providers.aws.cache import Cache, Dated
from skymagic.providers.aws.catalogue import cache_label
from skymagic.providers.aws.clients import AwsClients

LIST_SECONDS, SPOT_SECONDS = 7 * 86400.0, 600.0
"""How long prices on demand, and of spot, are used again: the first change a few times a year, the others all day."""
HOME = "us-east-1"
"""The price list of all regions is asked for here."""
FILTER_CHARACTERS = 1000  # A filter's value may have 1024
PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# Shared hardware, plain Linux without software that is paid for, and no reservation.
LINUX = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


@dataclass(frozen=True)
class Prices:
    """Dollars per hour of one machine, as far as they are known in a region.

    Attributes:
        listed: by type, on demand. spot: by (type, zone).
        of_list, of_spot: when they were asked for, as in 2026-11-22; empty where nothing was answered.
    """

    listed: Mapping[str, float] = field(default_factory=dict)
    spot: Mapping[tuple[str, str], float] = field(default_factory=dict)
    of_list: str = ""
    of_spot: str = ""

    def price(self, name: str, zone: str, spot: bool) -> tuple[float | None, str]:
        """(dollars per hour, where that is from); (None, "") where nobody knows. Spot is never estimated."""
        if spot:
            here = [
                price
                for (one, where), price in self.spot.items()
                if one == name and zone in ("", where)
            ]
            # which zone it will be is not known then: the dearest of them
            return (max(here), f"spot price of {self.of_spot}") if here else (None, "")
        if name in self.listed:
            return self.listed[name], f"price list of {self.of_list}"
        if name in catalogue.PRICES and not self.of_list:
            return catalogue.PRICES[name], f"{catalogue.ESTIMATE} for us-east-1"
        return None, ""


def on_demand(clients: AwsClients, region: str, names: Sequence[str], cache: Cache) -> Dated:
    """Dollars per hour by type, of the price list; a type that is not in it has none. Raises CloudError: it cannot be asked."""
    label = cache_label(clients, region)
    found: dict[str, float] = {}
    oldest = 0.0
    for some in chunks(sorted(names)):
        # each list is kept by what was asked for: few requests ask for other types
        kept = cache.fresh(
            f"list-{label}-{some}", LIST_SECONDS, partial(_listed, clients, region, some)
        )
        found |= kept.value
        oldest = min(oldest or kept.at, kept.at)
    return Dated(found, oldest)


def spot(clients: AwsClients, region: str, names: Sequence[str], cache: Cache) -> Dated:
    """Dollars per hour of each type in each zone, as [type, zone, price]; a zone without a price is left out. Raises CloudError."""
    ordered = sorted(names)
    name = f"spot-{cache_label(clients, region)}-{','.join(ordered)}"
    return cache.fresh(name, SPOT_SECONDS, lambda: _spot(clients, region, ordered))


def chunks(names: Iterable[str]) -> Iterator[str]:
    """Names joined by commas, as many as a filter takes."""
    joined = ""
    for name in names:
        if joined and len(joined) + len(name) + 1 > FILTER_CHARACTERS:
            yield joined
            joined = ""
        joined += f",{name}" if joined else name
    if joined:
        yield joined


def _listed(clients: AwsClients, region: str, names: str) -> dict[str, float]:
    terms = [
        {"Type": "TERM_MATCH", "Field": key, "Value": value}
        for key, value in {**LINUX, "regionCode": region}.items()
    ]
    asked: Any = [*terms, {"Type": "ANY_OF", "Field": "instanceType", "Value": names}]
    prices: dict[str, float] = {}
    for text in clients.pages(
        "pricing", HOME, "GetProducts", "PriceList", ServiceCode="AmazonEC2", Filters=asked
    ):
        name, price = product(json.loads(text))
        if price is not None:
            prices[name] = min(price, prices.get(name, price))
    return prices


def product(listed: Mapping[str, Any]) -> tuple[str, float | None]:
    """(type, dollars per hour on demand) of a product; None where it has no such price, or it is 0."""
    dollars = [
        float(dimension["pricePerUnit"].get("USD") or 0)
        for term in (listed.get("terms") or {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension.get("unit") == "Hrs"
    ]
    return str(listed["product"]["attributes"]["instanceType"]), min(
        (one for one in dollars if one > 0), default=None
    )


def _spot(clients: AwsClients, region: str, names: Sequence[str]) -> list[list[Any]]:
    """The latest price by type and zone: a history that begins now has it alone, and EC2 may send older ones all the same."""
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    asked: Any = {
        "InstanceTypes": list(names),
        "ProductDescriptions": list(PRODUCTS),
        "StartTime": datetime.now(UTC),
    }
    for one in clients.pages(
        "ec2", region, "DescribeSpotPriceHistory", "SpotPriceHistory", **asked, MaxResults=1000
    ):
        where, said = (
            (str(one["InstanceType"]), str(one["AvailabilityZone"])),
            (one["Timestamp"], float(one["SpotPrice"])),
        )
        latest[where] = max(said, latest.get(where, said))
    return [[name, zone, price] for (name, zone), (_, price) in sorted(latest.items())]
