"""What moto lacks of EC2's market: the price list, spot prices that differ, and answers in pages.

::

    with ec2() as cloud:
        market = EC2Market(cloud, listed={"p4d.24xlarge": 21.96})
        market.refuse("GetProducts", "AccessDeniedException")

Types of machines are moto's own, which are AWS's, a part of them: all take ten seconds a question.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from tests.lab.ec2 import EC2, NAMESPACE, Answer, Call, CarryOut, Effect, Rule, error

ALWAYS = 10**9
PAGE = 80
"""Items of a page, whatever was asked for."""
PART = re.compile(
    r"(p\d.*|g\d.*|gr6f?|[mcr][67][ai]|m5|c7i-flex|m7i-flex|t3|trn1|inf2|x2idn)\.(large|[248]?xlarge|\d\dxlarge|metal)"
)
# The price list has each type many times over; one of these is what a plain Linux machine costs.
PLAIN = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
OTHERS: Sequence[tuple[Mapping[str, str], float]] = (
    ({"operatingSystem": "Windows"}, 1.8),
    ({"tenancy": "Dedicated"}, 1.06),
    ({"preInstalledSw": "SQL Std"}, 3.0),
    ({"capacitystatus": "UnusedCapacityReservation"}, 0.5),
    ({"capacitystatus": "AllocatedCapacityReservation"}, 0.0),
)


@functools.cache
def types() -> dict[str, dict[str, Any]]:
    """What DescribeInstanceTypes says of each type, by name."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return {name: info for name, info in INSTANCE_TYPES.items() if PART.fullmatch(name)}


@functools.cache
def zones(region: str) -> tuple[tuple[str, str], ...]:
    """(type, zone) of each type's zones."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return tuple(
        (one["InstanceType"], one["Location"]) for one in offered if one["InstanceType"] in types()
    )


FEW = (
    "m7i.large",
    "m7a.large",
    "m6i.large",
    "m6a.large",
    "m5.large",
    "g4dn.xlarge",
    "p4d.24xlarge",
)


def few_types(cloud: EC2) -> None:
    """Let there be a few types of machines: to ask for all of them takes each notebook ten seconds."""
    cloud.on("DescribeInstanceTypes", lambda call, carry_out: _types(call, FEW), times=ALWAYS)
    cloud.on(
        "DescribeInstanceTypeOfferings", lambda call, carry_out: _zones(call, FEW), times=ALWAYS
    )


def _types(call: Call, among: Collection[str]) -> Answer:
    virtual = call.fields.get("Filter.1.Name") == "bare-metal"
    found = [
        info
        for name, info in types().items()
        if name in among and not (virtual and info["BareMetal"])
    ]
    return _pages(call, "instanceTypeSet", found)


def _zones(call: Call, among: Collection[str]) -> Answer:
    assert call.fields["LocationType"] == "availability-zone"
    rows = [
        {"InstanceType": name, "Location": zone, "LocationType": "availability-zone"}
        for name, zone in zones(call.region)
        if name in among
    ]
    return _pages(call, "instanceTypeOfferingSet", rows, PAGE * 4)


class EC2Market:
    """Answers of the price list and of spot's history.

    Args:
        listed: dollars per hour by type, in every region.
        spot: dollars per hour by (type, zone).
    """

    def __init__(
        self,
        cloud: EC2,
        listed: Mapping[str, float] | None = None,
        spot: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        self.cloud, self.listed, self.spot = cloud, listed or {}, spot or {}
        answers: dict[str, Effect] = {
            "DescribeInstanceTypes": lambda call, carry_out: _types(call, types()),
            "DescribeInstanceTypeOfferings": lambda call, carry_out: _zones(call, types()),
            "DescribeSpotPriceHistory": self._history,
            "GetProducts": self._products,
        }
        for action, effect in answers.items():
            cloud.on(action, effect, times=ALWAYS)

    def refuse(self, action: str, code: str, status: int = 400, times: int = ALWAYS) -> None:
        """Refuse an action from now on."""
        self.does(action, error(code, status=status), times)

    def does(self, action: str, effect: Effect, times: int = ALWAYS) -> None:
        """What becomes of an action from now on, whatever was said before."""
        self.cloud._rules.insert(0, Rule(action, effect, times, lambda call: True))

    def _history(self, call: Call, carry_out: CarryOut) -> Answer:
        names, products = _listed(call, "InstanceType"), _listed(call, "ProductDescription")
        rows = [
            {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": f"{dollars:.6f}", "Timestamp": at, "ProductDescription": product}
            for (name, zone), price in self.spot.items()
            for at, dollars, product in (
                ("2026-11-22T11:00:00.000Z", price * 3, "Windows"),  # what others cost, and below what it was: the latest first
                ("2026-11-22T10:00:00.000Z", price, "Linux/UNIX"),
                ("2026-11-20T10:00:00.000Z", price * 0.4, "Linux/UNIX"),
            )
            if name in names and zone.startswith(call.region) and product in products
        ]  # fmt: skip
        return _pages(call, "spotPriceHistorySet", rows, 3)

    def _products(self, call: Call, carry_out: CarryOut) -> Answer:
        terms = {
            one["Field"]: one["Value"]
            for one in call.fields["Filters"]
            if one["Type"] == "TERM_MATCH"
        }
        named = [one for one in call.fields["Filters"] if one["Type"] == "ANY_OF"]
        found = [
            product
            for name, price in self.listed.items()
            for product in products(name, price, terms["regionCode"])
            if all(
                product["product"]["attributes"].get(key) == value for key, value in terms.items()
            )
            and all(
                product["product"]["attributes"][one["Field"]] in one["Value"].split(",")
                for one in named
            )
        ]
        start = int(call.fields.get("NextToken") or 0)
        token = {"NextToken": str(start + 3)} if start + 3 < len(found) else {}
        body = {
            "FormatVersion": "aws_v1",
            "PriceList": [json.dumps(one) for one in found[start : start + 3]],
            **token,
        }
        return Answer(
            200, json.dumps(body).encode(), {"Content-Type": "application/x-amz-json-1.1"}
        )


def products(name: str, price: float, region: str) -> Iterator[dict[str, Any]]:
    """All products of a type in a region's price list."""
    for other, factor in [({}, 1.0), *OTHERS]:
        attributes = {
            **PLAIN,
            **other,
            "instanceType": name,
            "regionCode": region,
            "marketoption": "OnDemand",
        }
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price * factor:.10f}"}}
        terms = {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": dimension}}}, "Reserved": {}}
        yield {"product": {"attributes": attributes}, "terms": terms}


def _listed(call: Call, name: str) -> list[str]:
    return [value for key, value in call.fields.items() if re.fullmatch(rf"{name}\.\d+", key)]


def _pages(call: Call, name: str, rows: Sequence[Mapping[str, Any]], size: int = PAGE) -> Answer:
    start = int(call.fields.get("NextToken") or 0)
    items = "".join(f"<item>{_xml(row)}</item>" for row in rows[start : start + size])
    token = f"<nextToken>{start + size}</nextToken>" if start + size < len(rows) else ""
    text = f'<{call.action}Response xmlns="{NAMESPACE}"><requestId>r</requestId><{name}>{items}</{name}>{token}</{call.action}Response>'
    return Answer(200, text.encode(), {"Content-Type": "text/xml"})


def _xml(value: object) -> str:
    """As EC2 writes it: names begin in lower case, and lists are items."""
    if isinstance(value, Mapping):
        return "".join(
            f"<{k[0].lower()}{k[1:]}>{_xml(v)}</{k[0].lower()}{k[1:]}>" for k, v in value.items()
        )
    if isinstance(value, list | tuple):
        return "".join(f"<item>{_xml(one)}</item>" for one in value)
    return escape(str(value).lower() if isinstance(value, bool) else str(value))
