"""What pools cost: those that run, and those rented within a month by any notebook of this user on this machine; and what machines cost."""

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
    """What a pool costs, all launches of its name together; dollars.

    Attributes:
        per_hour: now, disks and addresses included; 0 where nothing of it runs, None where nobody tells.
        seconds: that its machines ran, one launch after the other.
        machines: so far; None where nobody tells. beside: of disks and public addresses, about.
        exact: whether it is known when all of them ended; else the sums are the most that it can be.
    """

    pool: str
    per_hour: float | None
    seconds: float
    machines: float | None
    beside: float
    exact: bool = True

    @property
    def total(self) -> float | None:
        """Dollars in all: machines, disks and addresses."""
        return None if self.machines is None else self.machines + self.beside


def costs(
    own: Iterable[tuple[str, float]], name: str | None = None, own_jobs: Iterable[str] = ()
) -> list[Cost]:
    """What is known, by pool.

    Args:
        own: (name, seconds that it runs) of this notebook's pools that nobody is paid for.
        name: of one pool; None for all.
        own_jobs: job ids of this notebook's rented pools, which run for sure.

    Raises:
        PoolError: nothing is known of a pool of this name.
    """
    now = time.time()
    free = [Cost(pool, 0.0, seconds, 0.0, 0.0) for pool, seconds in own]
    rented = ledger.every()
    paid = [
        of([one for one in rented if one.pool == pool], now, set(own_jobs))
        for pool in dict.fromkeys(one.pool for one in rented)
    ]
    found = [one for one in [*free, *paid] if name in (None, one.pool)]
    if name is not None and not found:
        raise PoolError(
            f"no pool {name!r} was rented within a month; skymagic status --cost lists those that were"
        )
    return found


def of(rents: Sequence[Rent], now: float, own_jobs: set[str]) -> Cost:
    """The cost of all launches of a pool; pure."""
    hours = [one.seconds(now) / 3600 for one in rents]
    running = [one for one in rents if one.runs(now)]
    known = all(one.price is not None for one in rents)
    return Cost(
        rents[0].pool,
        math.fsum((one.price or 0.0) + one.beside for one in running) if all(one.price is not None for one in running) else None,
        math.fsum(map(_span, _by_job(rents, now).values())),
        math.fsum((one.price or 0.0) * each for one, each in zip(rents, hours, strict=True)) if known else None,
        math.fsum(one.beside * each for one, each in zip(rents, hours, strict=True)),
        all(one.exact and (one.ended is not None or one.job in own_jobs) for one in rents),
    )  # fmt: skip


def _by_job(rents: Sequence[Rent], now: float) -> dict[str, list[tuple[float, float]]]:
    """Job → (start, end) of its launches, which may overlap: machines that were lost are replaced."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in rents:
        found.setdefault(one.job, []).append((one.started, one.started + one.seconds(now)))
    return found


def _span(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which any of them was."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def text(found: Sequence[Cost]) -> str:
    """As a table, with the sum below."""
    if not found:
        return "no pool is running, and none was rented within a month"
    rows: list[tuple[object, ...]] = [
        ("pool", "per hour", "ran for", "machines", "disks, addresses", "so far")
    ]
    rows += [
        (
            one.pool, "unknown" if one.per_hour is None else dollars(one.per_hour) if one.per_hour else "nothing",
            duration_text(int(one.seconds)), dollars(one.machines), f"about {dollars(one.beside)}" if one.beside else "-",
            dollars(one.total) + ("" if one.exact else " at most"),
        )
        for one in found
    ]  # fmt: skip
    rented = [one for one in found if one.total != 0]
    if len(rented) > 1:
        known = [one.total for one in rented if one.total is not None]
        unknown = " and what is unknown" if len(known) < len(rented) else ""
        rows.append(("in all", "", "", "", "", f"{dollars(math.fsum(known))}{unknown}"))
    return table(rows)


def plain(found: Sequence[Cost]) -> dict[str, object]:
    """For programs."""
    return {"pools": [{**vars(one), "total": one.total} for one in found]}


def dollars(amount: float | None) -> str:
    """``"$12.34"``, with more digits where it is less than a cent."""
    if amount is None:
        return "unknown"
    return f"${amount:.2f}" if amount >= 0.005 or amount == 0 else f"${amount:.4f}"


def offers(request: PoolRequest, settings: CloudSettings) -> OfferTable:
    """What machines can be rented for, whatever limits of the price say; nothing is rented.

    Raises:
        RequestError: no machine serves the request.
        CloudError: no credentials, or they are refused.
    """
    return OfferTable(market.survey(request, AwsClients.of(settings)), request.nodes or 1)
