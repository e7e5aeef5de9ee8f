"""Hourly prices of machines: on demand from the price list, and the latest spot prices by zone."""

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
"""Lifetime of cached prices, on demand and spot, in seconds.

On-demand prices change a few times a year, spot prices all day.
"""
PRICE_LIST_REGION = "us-east-1"
"""Region that serves the price list of all regions."""
FILTER_CHARACTERS = 1000  # the API allows 1024
# What the history of spot prices calls plain Linux.
PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
# Shared hardware, plain Linux without paid software, and no reservation.
LINUX = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


@dataclass(frozen=True)
class Prices:
    """Known prices in a region, in dollars per hour for one machine.

    Attributes:
        listed: on-demand prices by type.
        spot: spot prices by (type, zone).
        list_date: date of the on-demand prices, as in 2026-11-22; "" without an answer.
        spot_date: date of the spot prices; "" without an answer.
    """

    listed: Mapping[str, float] = field(default_factory=dict)
    spot: Mapping[tuple[str, str], float] = field(default_factory=dict)
    list_date: str = ""
    spot_date: str = ""

    def price(self, instance_type: str, zone: str, spot: bool) -> tuple[float | None, str]:
        """Return the price in dollars per hour and its source, or (None, "") if unknown.

        Spot prices are never estimated.
        """
        if spot:
            matching = [
                price
                for (type_name, priced_zone), price in self.spot.items()
                if type_name == instance_type and zone in ("", priced_zone)
            ]
            # without a zone, assume the most expensive one
            return (max(matching), f"spot price of {self.spot_date}") if matching else (None, "")
        if instance_type in self.listed:
            return self.listed[instance_type], f"price list of {self.list_date}"
        if instance_type in catalogue.PRICES and not self.list_date:
            return catalogue.PRICES[instance_type], f"{catalogue.ESTIMATE} for us-east-1"
        return None, ""


def on_demand(clients: AwsClients, region: str, names: Sequence[str], cache: Cache) -> Dated:
    """Return on-demand prices by type, in dollars per hour. Types without a list price are missing.

    Raises CloudError if the price list cannot be queried.
    """
    label = cache_label(clients, region)
    prices: dict[str, float] = {}
    oldest = 0.0
    for chunk in chunks(sorted(names)):
        # cached by the types in the query: most requests need the same types, and hit the cache
        cached = cache.fresh(
            f"list-{label}-{chunk}", LIST_SECONDS, partial(_fetch_on_demand, clients, region, chunk)
        )
        prices |= cached.value
        oldest = min(oldest or cached.at, cached.at)
    return Dated(prices, oldest)


def spot_prices(clients: AwsClients, region: str, names: Sequence[str], cache: Cache) -> Dated:
    """Return spot prices as [type, zone, dollars per hour]. Zones without a price are missing.

    Raises CloudError.
    """
    ordered = sorted(names)
    name = f"spot-{cache_label(clients, region)}-{','.join(ordered)}"
    return cache.fresh(name, SPOT_SECONDS, lambda: _fetch_spot(clients, region, ordered))


def chunks(names: Iterable[str]) -> Iterator[str]:
    """Join names with commas, in chunks as long as a filter allows."""
    joined = ""
    for name in names:
        if joined and len(joined) + len(name) + 1 > FILTER_CHARACTERS:
            yield joined
            joined = ""
        joined += f",{name}" if joined else name
    if joined:
        yield joined


def _fetch_on_demand(clients: AwsClients, region: str, names: str) -> dict[str, float]:
    terms = [
        {"Type": "TERM_MATCH", "Field": key, "Value": value}
        for key, value in {**LINUX, "regionCode": region}.items()
    ]
    query: Any = [*terms, {"Type": "ANY_OF", "Field": "instanceType", "Value": names}]
    prices: dict[str, float] = {}
    for text in clients.pages(
        "pricing",
        PRICE_LIST_REGION,
        "GetProducts",
        "PriceList",
        ServiceCode="AmazonEC2",
        Filters=query,
    ):
        name, price = parse_product(json.loads(text))
        if price is not None:
            prices[name] = min(price, prices.get(name, price))
    return prices


def parse_product(product: Any) -> tuple[str, float | None]:
    """Return the type and the on-demand price of a product in dollars per hour.

    The price is None if the product has no hourly price above 0.

    Args:
        product: a product in the JSON of GetProducts.
    """
    prices = [
        float(dimension["pricePerUnit"].get("USD") or 0)
        for term in (product.get("terms") or {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension.get("unit") == "Hrs"
    ]
    return str(product["product"]["attributes"]["instanceType"]), min(
        (price for price in prices if price > 0), default=None
    )


def _fetch_spot(clients: AwsClients, region: str, names: Sequence[str]) -> list[list[Any]]:
    """Return the latest price by type and zone.

    A history that starts now should contain one price for each, but EC2 may send older ones too.
    """
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    query: Any = {
        "InstanceTypes": list(names),
        "ProductDescriptions": list(PRODUCTS),
        "StartTime": datetime.now(UTC),
    }
    for record in clients.pages(
        "ec2", region, "DescribeSpotPriceHistory", "SpotPriceHistory", **query, MaxResults=1000
    ):
        key, entry = (
            (str(record["InstanceType"]), str(record["AvailabilityZone"])),
            (record["Timestamp"], float(record["SpotPrice"])),
        )
        latest[key] = max(entry, latest.get(key, entry))
    return [[name, zone, price] for (name, zone), (_, price) in sorted(latest.items())]
