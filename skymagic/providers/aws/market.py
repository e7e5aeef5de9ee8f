"""What can be rented for a request: asked of all its regions at once, compared with quotas and the price limit.

::

    clients ──> catalogue (types, zones)  ─┐
            ──> prices (list, spot)       ─┼─> Market ──> choice: offers in the order in which they are tried
            ──> quotas (limits, use)      ─┘

vCPU quotas are compared before the first machine is rented: EC2 refuses single machines, so that a pool over its quota would have
a head that waits, and is paid for, while its workers never come.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from skymagic.errors import RequestError
from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws import catalogue, prices, selection
from skymagic.providers.aws.cache import Cache, optional
from skymagic.providers.aws.catalogue import Catalogue, InstanceType
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients
from skymagic.providers.aws.prices import Prices
from skymagic.providers.aws.selection import MachineOffer
from skymagic.wire.threads import failures, run_all

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
class VcpuQuota:
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

    def shortfall(self, offer: MachineOffer, nodes: int) -> str:
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


def quotas_of(
    clients: AwsClients,
    region: str,
    offers: Iterable[MachineOffer],
    types: Mapping[str, InstanceType],
    notes: list[str],
) -> dict[str, VcpuQuota]:
    """The quotas of a region's offers by code, with what is in use; what is not told is not known, and `notes` says why.

    Raises:
        CloudError: credentials are refused.
    """
    codes = dict(filter(None, (quota_of(one.instance_type, one.spot) for one in offers)))
    found = {code: VcpuQuota(region, code, name) for code, name in sorted(codes.items())}
    limited = False
    for code, quota in found.items():
        said = optional(partial(_limit, clients, region, code), "servicequotas:GetServiceQuota", notes)
        found[code] = replace(quota, limit=said)
        limited = limited or said is not None
    used = optional(lambda: in_use(clients, region, types), "ec2:DescribeInstances", notes) if limited else None
    if used is None:
        return found
    return {code: replace(quota, used=used.get(code, 0)) for code, quota in found.items()}


def _limit(clients: AwsClients, region: str, code: str) -> float:
    answer = clients.call("service-quotas", region, "GetServiceQuota", ServiceCode="ec2", QuotaCode=code)
    return float(answer["Quota"]["Value"])


def in_use(clients: AwsClients, region: str, types: Mapping[str, InstanceType]) -> dict[str, int]:
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


T = TypeVar("T")
DEARER = 2.0
"""How many times the price that the user agrees to another type may cost where there is no room, and no limit was named."""
OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso")
"""Regions whose prices another partition's credentials cannot ask for."""


@dataclass(frozen=True)
class Market:
    """What can be rented, the cheapest first.

    Attributes:
        offers: all that serve the request, whatever quotas and the price limit say.
        quotas: by (region, code).
        notes: what was not told, and what stands for it.
    """

    offers: tuple[MachineOffer, ...]
    quotas: Mapping[tuple[str, str], VcpuQuota] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def quota(self, offer: MachineOffer) -> VcpuQuota | None:
        """The quota that counts an offer; None where none is known."""
        named = quota_of(offer.instance_type, offer.spot)
        return self.quotas.get((offer.region, named[0])) if named else None

    def allowed(self, offer: MachineOffer, nodes: int) -> bool | None:
        """Whether quotas allow so many; None where nobody tells."""
        quota = self.quota(offer)
        return None if quota is None else quota.allows(nodes * offer.vcpus)


def survey(request: PoolRequest, clients: AwsClients, cache: Cache | None = None) -> Market:
    """What can be rented for a request in its regions; nothing is rented, and nothing is made.

    Raises:
        RequestError: no type of machine serves it, or there is no such region.
        CloudError: credentials are missing or refused, or there is no such region.
    """
    selection.check_served(request)
    kept = cache or Cache()
    names = request.regions or (clients.region or DEFAULT_REGION,)
    catalogue.check_regions(names, clients)
    there = dict(zip(names, _all([partial(catalogue.catalogue_of, clients, one, kept) for one in names]), strict=True))
    if not any(selection.wanted(request, one.types.values()) for one in there.values()):
        raise RequestError(selection.nothing(request, there))
    # what is not needed is not waited for as long as what is
    parts = _all([partial(_region, request, clients.hurried(), one, kept) for one in there.values()])
    found = selection.by_price((one for part in parts for one in part.offers), names)
    limits = {key: quota for part in parts for key, quota in part.quotas.items()}
    return Market(tuple(found), limits, tuple(dict.fromkeys(note for part in parts for note in part.notes)))


def estimated(request: PoolRequest, clients: AwsClients, reason: str) -> Market:
    """What the built-in list says of a request, for a preview without credentials: nothing was asked.

    Raises:
        RequestError: no type of machine in it serves the request.
    """
    names = request.regions or (clients.region or DEFAULT_REGION,)
    there = {one: Catalogue(one, catalogue.TYPES, {}) for one in names}
    found = selection.by_price(
        (offer for one in there.values() for offer in selection.offers_of(request, one, Prices())), names
    )
    if not found:
        raise RequestError(selection.nothing(request, there))
    return Market(tuple(found), notes=(f"zones, quotas and present prices: {reason}",))


def _region(request: PoolRequest, clients: AwsClients, there: Catalogue, cache: Cache) -> Market:
    """One region's part."""
    notes = list(there.notes)
    names = [one.name for one in selection.wanted(request, there.types.values())]
    costs = _prices(request, clients, there.region, names, cache, notes) if names else Prices()
    found = selection.offers_of(request, there, costs)
    limits = quotas_of(clients, there.region, found, there.types, notes)
    return Market(tuple(found), {(there.region, code): quota for code, quota in limits.items()}, tuple(notes))


def _prices(
    request: PoolRequest, clients: AwsClients, region: str, names: Sequence[str], cache: Cache, notes: list[str]
) -> Prices:
    if request.spot:
        said = optional(partial(prices.spot, clients, region, names, cache), "ec2:DescribeSpotPriceHistory", notes)
        spot = {(name, zone): price for name, zone, price in said.value} if said else {}
        return Prices(spot=spot, of_spot=said.date if said else "")
    if region.startswith(OTHER_PARTITIONS):
        return Prices()
    listed = optional(partial(prices.on_demand, clients, region, names, cache), "pricing:GetProducts", notes)
    return Prices(listed.value, of_list=listed.date) if listed else Prices()


def _all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all jobs, each on a thread of its own; what one raises is raised."""
    outcomes = run_all(jobs)
    for problem in failures(outcomes):
        raise problem
    return cast("list[T]", outcomes)


def choice(request: PoolRequest, market: Market) -> tuple[MachineOffer, ...]:
    """The offers of a market that may be tried one after the other, the cheapest first.

    Quotas allow them (where a quota is not told, EC2 will say), and their price is bounded: by --max-price, else by `DEARER` times
    what the first costs. One without a price is there only where the first has none, for that is what the user agrees to.

    Raises:
        RequestError: there is none, with the reason.
    """
    nodes = request.nodes or 1
    if not market.offers:
        raise RequestError(["no zone of these regions offers such machines now: name others with --region"])
    allowed = [one for one in market.offers if market.allowed(one, nodes) is not False]
    if not allowed:
        raise RequestError(_shortfalls(market, nodes))
    first = selection.per_hour(allowed[0], nodes)
    limit = request.max_price
    if first is None and limit is None:
        return tuple(allowed)
    most = limit if limit is not None else DEARER * (first or 0.0)
    within = [one for one in allowed if (price := selection.per_hour(one, nodes)) is not None and price <= most]
    if not within:
        raise RequestError([_too_dear(request, most, allowed[0], nodes)])
    return tuple(within)


def _shortfalls(market: Market, nodes: int) -> list[str]:
    """Each quota that is too small, with the machines that need least of it."""
    short: dict[VcpuQuota, MachineOffer] = {}
    for one in sorted(market.offers, key=lambda one: one.vcpus):
        quota = market.quota(one)
        if quota is not None:
            short.setdefault(quota, one)
    return [quota.shortfall(one, nodes) for quota, one in short.items()]


def _too_dear(request: PoolRequest, limit: float, cheapest: MachineOffer, nodes: int) -> str:
    name = "--max-price" if "max_price" in request.given() else "%config SkyMagic.max_price"
    price = selection.per_hour(cheapest, nodes)
    machines = f"{nodes} × {cheapest.instance_type} in {cheapest.region}" + (", spot," if cheapest.spot else "")
    if price is None:
        return (
            f"nobody tells what {machines} cost, and {name} is ${limit:.2f} per hour: "
            "allow pricing:GetProducts and ec2:DescribeSpotPriceHistory (docs/aws.md), or leave the limit out"
        )
    return f"the cheapest are {machines} for ${price:.2f} per hour, and {name} is ${limit:.2f}"
