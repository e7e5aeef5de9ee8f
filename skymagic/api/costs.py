"""Costs of pools and prices of machines.

Covers running pools, and those rented within a month by any notebook of this user on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymagic.display.text import table
from skymagic.errors import PoolError
from skymagic.plan.requests import CloudSettings, PoolRequest
from skymagic.plan.units import duration_text
from skymagic.providers.aws import ledger, market
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.ledger import Rent
from skymagic.providers.aws.listing import OfferTable


@dataclass(frozen=True)
class Cost:
    """Cost of a pool in dollars, for all launches under its name.

    Attributes:
        per_hour: current rate, disks and addresses included; 0 if nothing of it runs, None if
            unknown.
        seconds: time that its machines ran; overlapping launches count once.
        machines: cost of the machines so far; None if unknown.
        beside: approximate cost of disks and public addresses.
        exact: True if the end of every launch is known; else the sums are upper bounds.
    """

    pool: str
    per_hour: float | None
    seconds: float
    machines: float | None
    beside: float
    exact: bool = True

    @property
    def total(self) -> float | None:
        """Total in dollars: machines, disks and addresses."""
        return None if self.machines is None else self.machines + self.beside


def costs(
    own: Iterable[tuple[str, float]], name: str | None = None, own_jobs: Iterable[str] = ()
) -> list[Cost]:
    """Return the known costs by pool.

    Args:
        own: (name, running time in seconds) of this notebook's pools that cost nothing.
        name: name of one pool; None for all.
        own_jobs: job ids of this notebook's rented pools, which are certainly running.

    Raises:
        PoolError: no cost is known for a pool of this name.
    """
    now = time.time()
    free = [Cost(pool, 0.0, seconds, 0.0, 0.0) for pool, seconds in own]
    rents = ledger.all_rents()
    paid = [
        of([rent for rent in rents if rent.pool == pool], now, set(own_jobs))
        for pool in dict.fromkeys(rent.pool for rent in rents)
    ]
    pool_costs = [cost for cost in [*free, *paid] if name in (None, cost.pool)]
    if name is not None and not pool_costs:
        raise PoolError(
            f"no pool {name!r} was rented within a month; skymagic status --cost lists "
            "those that were",
            code="no-pool",
            names=[name],
        )
    return pool_costs


def of(rents: Sequence[Rent], now: float, own_jobs: set[str]) -> Cost:
    """Return the cost of all launches of a pool; pure."""
    hours_by_rent = [rent.seconds(now) / 3600 for rent in rents]
    running = [rent for rent in rents if rent.may_run(now)]
    is_known = all(rent.price is not None for rent in rents)
    return Cost(
        rents[0].pool,
        math.fsum((rent.price or 0.0) + rent.beside for rent in running)
        if all(rent.price is not None for rent in running)
        else None,
        math.fsum(map(_span, _by_job(rents, now).values())),
        math.fsum(
            (rent.price or 0.0) * hours for rent, hours in zip(rents, hours_by_rent, strict=True)
        )
        if is_known
        else None,
        math.fsum(rent.beside * hours for rent, hours in zip(rents, hours_by_rent, strict=True)),
        all(rent.exact and (rent.ended is not None or rent.job in own_jobs) for rent in rents),
    )


def _by_job(rents: Sequence[Rent], now: float) -> dict[str, list[tuple[float, float]]]:
    """Return job → (start, end) of its launches.

    Launches may overlap, because lost machines are replaced.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for rent in rents:
        spans.setdefault(rent.job, []).append((rent.started, rent.started + rent.seconds(now)))
    return spans


def _span(spans: Sequence[tuple[float, float]]) -> float:
    """Return the number of seconds covered by at least one of the spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def text(costs: Sequence[Cost]) -> str:
    """Return the costs as a table with a total."""
    if not costs:
        return "no pool is running, and none was rented within a month"
    rows: list[tuple[object, ...]] = [
        ("pool", "per hour", "ran for", "machines", "disks, addresses", "so far")
    ]
    rows += [
        (
            cost.pool,
            "unknown"
            if cost.per_hour is None
            else dollars(cost.per_hour)
            if cost.per_hour
            else "nothing",
            duration_text(int(cost.seconds)),
            dollars(cost.machines),
            f"about {dollars(cost.beside)}" if cost.beside else "-",
            dollars(cost.total) + ("" if cost.exact else " at most"),
        )
        for cost in costs
    ]
    rented = [cost for cost in costs if cost.total != 0]
    if len(rented) > 1:
        totals = [cost.total for cost in rented if cost.total is not None]
        unknown = " and what is unknown" if len(totals) < len(rented) else ""
        rows.append(("in all", "", "", "", "", f"{dollars(math.fsum(totals))}{unknown}"))
    return table(rows)


def plain(costs: Sequence[Cost]) -> dict[str, object]:
    """Return the costs as plain values, for programs."""
    return {"pools": [{**vars(cost), "total": cost.total} for cost in costs]}


def dollars(amount: float | None) -> str:
    """Return ``"$12.34"``, with more digits below one cent."""
    if amount is None:
        return "unknown"
    return f"${amount:.2f}" if amount >= 0.005 or amount == 0 else f"${amount:.4f}"


def offers(request: PoolRequest, settings: CloudSettings) -> OfferTable:
    """Return the machines that can be rented and their prices, ignoring price limits.

    Nothing is rented.

    Raises:
        RequestError: no machine satisfies the request.
        CloudError: credentials are missing or refused.
    """
    return OfferTable(market.survey(request, AwsClients.of(settings)), request.nodes or 1)
