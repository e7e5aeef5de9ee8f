"""What can be rented for a request: asked of all its regions at once, compared with the price limit.

::

    clients ──> catalogue (types, zones)  ─┐
            ──> prices (list, spot)       ─┴─> Market ──> choice: offers in the order in which they are tried

vCPU quotas are EC2's to compare: all machines of a pool are one call, which it refuses as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from skymagic.errors import RequestError
from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws import catalogue, prices, selection
from skymagic.providers.aws.cache import Cache, optional
from skymagic.providers.aws.catalogue import Catalogue
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients
from skymagic.providers.aws.prices import Prices
from skymagic.providers.aws.selection import MachineOffer
from skymagic.wire.threads import failures, run_all

T = TypeVar("T")
DEARER = 2.0
"""How many times the price that the user agrees to another type may cost where there is no room, and no limit was named."""
OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso")
"""Regions whose prices another partition's credentials cannot ask for."""


@dataclass(frozen=True)
class Market:
    """What can be rented, the cheapest first.

    Attributes:
        offers: all that serve the request, whatever the price limit says.
        notes: what was not told, and what stands for it.
    """

    offers: tuple[MachineOffer, ...]
    notes: tuple[str, ...] = ()


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
    there = dict(
        zip(
            names,
            _all([partial(catalogue.catalogue_of, clients, one, kept) for one in names]),
            strict=True,
        )
    )
    if not any(selection.wanted(request, one.types.values()) for one in there.values()):
        raise RequestError(selection.nothing(request, there))
    # what is not needed is not waited for as long as what is
    parts = _all(
        [partial(_region, request, clients.hurried(), one, kept) for one in there.values()]
    )
    found = selection.by_price((one for part in parts for one in part.offers), names)
    return Market(tuple(found), tuple(dict.fromkeys(note for part in parts for note in part.notes)))


def estimated(request: PoolRequest, clients: AwsClients, reason: str) -> Market:
    """What the built-in list says of a request, for a preview without credentials: nothing was asked. Raises RequestError."""
    names = request.regions or (clients.region or DEFAULT_REGION,)
    there = {one: Catalogue(one, catalogue.TYPES, {}) for one in names}
    found = selection.by_price(
        (offer for one in there.values() for offer in selection.offers_of(request, one, Prices())),
        names,
    )
    if not found:
        raise RequestError(selection.nothing(request, there))
    return Market(tuple(found), notes=(f"zones and present prices: {reason}",))


def _region(request: PoolRequest, clients: AwsClients, there: Catalogue, cache: Cache) -> Market:
    """One region's part."""
    notes = list(there.notes)
    names = [one.name for one in selection.wanted(request, there.types.values())]
    costs = _prices(request, clients, there.region, names, cache, notes) if names else Prices()
    return Market(tuple(selection.offers_of(request, there, costs)), tuple(notes))


def _prices(
    request: PoolRequest,
    clients: AwsClients,
    region: str,
    names: Sequence[str],
    cache: Cache,
    notes: list[str],
) -> Prices:
    if request.spot:
        said = optional(
            partial(prices.spot, clients, region, names, cache),
            "ec2:DescribeSpotPriceHistory",
            notes,
        )
        spot = {(name, zone): price for name, zone, price in said.value} if said else {}
        return Prices(spot=spot, of_spot=said.date if said else "")
    if region.startswith(OTHER_PARTITIONS):
        return Prices()
    listed = optional(
        partial(prices.on_demand, clients, region, names, cache), "pricing:GetProducts", notes
    )
    return Prices(listed.value, of_list=listed.date) if listed else Prices()


def _all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all jobs, each on a thread of its own; what one raises is raised."""
    outcomes = run_all(jobs)
    for problem in failures(outcomes):
        raise problem
    return cast("list[T]", outcomes)


def choice(request: PoolRequest, market: Market) -> tuple[MachineOffer, ...]:
    """The offers of a market that may be tried one after the other, the cheapest first.

    Their price is bounded: by --max-price, else by `DEARER` times what the first costs. One without a price is there only where the first
    has none, for that is what the user agrees to.

    Raises:
        RequestError: there is none, with the reason.
    """
    nodes = request.nodes or 1
    if not market.offers:
        raise RequestError(
            ["no zone of these regions offers such machines now: name others with --region"]
        )
    first = selection.per_hour(market.offers[0], nodes)
    limit = request.max_price
    if first is None and limit is None:
        return market.offers
    most = limit if limit is not None else DEARER * (first or 0.0)
    within = [
        one
        for one in market.offers
        if (price := selection.per_hour(one, nodes)) is not None and price <= most
    ]
    if not within:
        raise RequestError([_too_dear(request, most, market.offers[0], nodes)])
    return tuple(within)


def _too_dear(request: PoolRequest, limit: float, cheapest: MachineOffer, nodes: int) -> str:
    name = "--max-price" if "max_price" in request.given() else "%config SkyMagic.max_price"
    price = selection.per_hour(cheapest, nodes)
    machines = f"{nodes} × {cheapest.instance_type} in {cheapest.region}" + (
        ", spot," if cheapest.spot else ""
    )
    if price is None:
        return (
            f"the price of {machines} is unknown, and {name} is ${limit:.2f} per hour: "
            "allow pricing:GetProducts and ec2:DescribeSpotPriceHistory (docs/how-to/aws.md), or leave the limit out"
        )
    return f"the cheapest are {machines} for ${price:.2f} per hour, and {name} is ${limit:.2f}"
