"""Offers for a request, from all its regions at once, compared with the price limit.

::

    clients ──> catalogue (types, zones)  ─┐
            ──> prices (list, spot)       ─┴─> Market ──> offers_to_try: in order

vCPU quotas are not checked here: one call requests all machines of a pool, and EC2 refuses it as a
whole.
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
FALLBACK_PRICE_FACTOR = 2.0
"""Price limit without --max-price, as a multiple of the price that the user confirms.

More expensive offers, up to this limit, are tried if EC2 has no capacity at that price.
"""
OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso")
"""Prefixes of regions in other AWS partitions, whose prices are not in the price list."""


@dataclass(frozen=True)
class Market:
    """Offers, the cheapest first.

    Attributes:
        offers: all offers that serve the request, regardless of the price limit.
        notes: unanswered queries, and what is used instead.
    """

    offers: tuple[MachineOffer, ...]
    notes: tuple[str, ...] = ()


def survey(request: PoolRequest, clients: AwsClients, cache: Cache | None = None) -> Market:
    """Return the offers for a request in its regions. Rents and creates nothing.

    Raises:
        RequestError: no machine type serves the request, or no region has this name.
        CloudError: EC2 refuses a call: credentials are missing or invalid, or the region is not
            enabled for the account.
    """
    selection.check_served(request)
    answer_cache = cache or Cache()
    names = request.regions or (clients.region or DEFAULT_REGION,)
    catalogue.check_regions(names, clients)
    catalogues = dict(
        zip(
            names,
            _run_all(
                [partial(catalogue.catalogue_of, clients, region, answer_cache) for region in names]
            ),
            strict=True,
        )
    )
    if not any(
        selection.matching_types(request, region_catalogue.types.values())
        for region_catalogue in catalogues.values()
    ):
        raise RequestError(selection.explain_no_offer(request, catalogues))
    # optional queries get shorter time limits
    markets = _run_all(
        [
            partial(
                _market_of_region,
                request,
                clients.with_short_deadlines(),
                region_catalogue,
                answer_cache,
            )
            for region_catalogue in catalogues.values()
        ]
    )
    ordered = selection.by_price((offer for market in markets for offer in market.offers), names)
    notes = dict.fromkeys(note for market in markets for note in market.notes)
    return Market(tuple(ordered), tuple(notes))


def estimate(request: PoolRequest, clients: AwsClients, reason: str) -> Market:
    """Return offers from the built-in list, for a preview without credentials.

    Makes no call. Raises RequestError.
    """
    names = request.regions or (clients.region or DEFAULT_REGION,)
    catalogues = {region: Catalogue(region, catalogue.TYPES, {}) for region in names}
    ordered = selection.by_price(
        (
            offer
            for region_catalogue in catalogues.values()
            for offer in selection.offers_of(request, region_catalogue, Prices())
        ),
        names,
    )
    if not ordered:
        raise RequestError(selection.explain_no_offer(request, catalogues))
    return Market(tuple(ordered), notes=(f"zones and current prices: {reason}",))


def _market_of_region(
    request: PoolRequest, clients: AwsClients, catalogue: Catalogue, cache: Cache
) -> Market:
    """Return the offers of one region."""
    notes = list(catalogue.notes)
    names = [
        instance_type.name
        for instance_type in selection.matching_types(request, catalogue.types.values())
    ]
    costs = _prices(request, clients, catalogue.region, names, cache, notes) if names else Prices()
    return Market(tuple(selection.offers_of(request, catalogue, costs)), tuple(notes))


def _prices(
    request: PoolRequest,
    clients: AwsClients,
    region: str,
    names: Sequence[str],
    cache: Cache,
    notes: list[str],
) -> Prices:
    if request.spot:
        history = optional(
            partial(prices.spot_prices, clients, region, names, cache),
            "ec2:DescribeSpotPriceHistory",
            notes,
        )
        spot = {(name, zone): price for name, zone, price in history.value} if history else {}
        return Prices(spot=spot, spot_date=history.date if history else "")
    if region.startswith(OTHER_PARTITIONS):
        return Prices()
    listed = optional(
        partial(prices.on_demand, clients, region, names, cache), "pricing:GetProducts", notes
    )
    return Prices(listed.value, list_date=listed.date) if listed else Prices()


def _run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run all jobs, each on its own thread, and return their results. Raises what a job raises."""
    outcomes = run_all(jobs)
    for problem in failures(outcomes):
        raise problem
    return cast("list[T]", outcomes)


def offers_to_try(request: PoolRequest, market: Market) -> tuple[MachineOffer, ...]:
    """Return the offers that may be tried one after the other, the cheapest first.

    With --max-price, these are the offers that cost at most this much; offers whose price is
    unknown are left out. Without it, the limit is `FALLBACK_PRICE_FACTOR` times the price of the
    first offer, which the user confirms. If the price of the first offer is unknown, all offers may
    be tried.

    Raises:
        RequestError: no offer qualifies; gives the reason.
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
    price_limit = limit if limit is not None else FALLBACK_PRICE_FACTOR * (first or 0.0)
    affordable = [
        offer
        for offer in market.offers
        if (price := selection.per_hour(offer, nodes)) is not None and price <= price_limit
    ]
    if not affordable:
        raise RequestError([_price_problem(request, price_limit, market.offers[0], nodes)])
    return tuple(affordable)


def _price_problem(request: PoolRequest, limit: float, cheapest: MachineOffer, nodes: int) -> str:
    option = (
        "--max-price" if "max_price" in request.stated_fields() else "%config SkyMagic.max_price"
    )
    price = selection.per_hour(cheapest, nodes)
    machines = f"{nodes} × {cheapest.instance_type} in {cheapest.region}" + (
        ", spot," if cheapest.spot else ""
    )
    if price is None:
        return (
            f"the price of {machines} is unknown, and {option} is ${limit:.2f} per hour: "
            "allow pricing:GetProducts and ec2:DescribeSpotPriceHistory (docs/how-to/aws.md), "
            "or leave the limit out"
        )
    return f"the cheapest are {machines} for ${price:.2f} per hour, and {option} is ${limit:.2f}"
