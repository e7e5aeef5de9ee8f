"""Offers in readable form: one table, as text and as HTML, and the summary in a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from skymagic.display.status import Keyed
from skymagic.display.text import html_table, table
from skymagic.plan.renting import Rental
from skymagic.providers.aws.market import Market
from skymagic.providers.aws.selection import MachineOffer, per_hour

MOST_ROWS = 12
HEADINGS = (
    "per hour",
    "machine",
    "GPUs",
    "GPU memory",
    "CPUs",
    "memory",
    "network",
    "where",
    "price from",
)
SHOWN_ELSEWHERE = 4
LEAST_DOLLARS = 0.005  # a price below this is shown with more digits, as it would read $0.00


@dataclass(frozen=True, repr=False)
class OfferTable(Keyed[str, tuple[MachineOffer, ...]]):
    """Offers of a market for a pool, shown as a table in notebooks and as text elsewhere.

    Maps machine types to their offers, the best first: ``offers["p4d.24xlarge"][0].price``.

    Attributes:
        nodes: number of nodes of the pool.
        most: maximum number of rows shown, followed by a count of the rest. None for all.
    """

    market: Market
    nodes: int = 1
    most: int | None = MOST_ROWS

    @property
    def _items(self) -> Mapping[str, tuple[MachineOffer, ...]]:
        by_type: dict[str, tuple[MachineOffer, ...]] = {}
        for offer in self.market.offers:
            by_type[offer.instance_type] = (*by_type.get(offer.instance_type, ()), offer)
        return by_type

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row of cells per type and region. Zones with the same price share a row."""
        return [_row(group, self.nodes) for group in grouped(self.market.offers)]

    def text(self) -> str:
        """Return the table as text, with its notes below."""
        rows = self.rows()
        shown = rows[: self.most]
        return "\n".join(
            [
                table([HEADINGS, *shown]) if rows else "nothing is offered",
                *self._below(len(rows) - len(shown)),
            ]
        )

    def html(self) -> str:
        """Return the table as HTML."""
        rows = self.rows()
        shown = rows[: self.most]
        below = "".join(f"<p>{escape(line)}</p>" for line in self._below(len(rows) - len(shown)))
        return f"{html_table([HEADINGS, *shown])}{below}"

    def _below(self, remaining: int) -> list[str]:
        pool = [f"per hour: of {self.nodes} machines"] if self.nodes > 1 else []
        more = [f"and {remaining} more, which cost more"] if remaining else []
        return [*more, *pool, *(f"unknown: {note}" for note in self.market.notes)]

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def grouped(offers: Iterable[MachineOffer]) -> list[list[MachineOffer]]:
    """Group offers that differ only in their zone, in the order of each group's first offer."""
    groups: dict[tuple[object, ...], list[MachineOffer]] = {}
    for offer in offers:
        groups.setdefault(
            (offer.region, offer.instance_type, offer.spot, offer.price, offer.priced), []
        ).append(offer)
    return list(groups.values())


def _row(group: Sequence[MachineOffer], nodes: int) -> tuple[str, ...]:
    first = group[0]
    price = per_hour(first, nodes)
    return (
        "unknown"
        if price is None
        else f"${price:.2f}"
        if price >= LEAST_DOLLARS
        else f"${price:.4f}",
        first.instance_type + (" spot" if first.spot else ""),
        f"{first.gpus} × {first.gpu}" if first.gpu else "-",
        f"{first.gpu_memory:.12g} GB" if first.gpu else "-",
        str(first.vcpus),
        f"{first.memory:.12g} GB",
        f"{first.network:.12g} Gbit/s" if first.network else "-",
        zones_text(group),
        first.priced or "-",
    )


def zones_text(group: Sequence[MachineOffer]) -> str:
    """Return the zones of one region, ``"us-east-1 a b d"``, or only the region if unknown."""
    region = group[0].region
    zones = sorted(offer.zone.removeprefix(region) for offer in group if offer.zone)
    return " ".join([region, *zones])


def machine(offer: MachineOffer) -> str:
    """Describe a machine: "p4d.24xlarge (8 × A100)"."""
    return offer.instance_type + (f" ({offer.gpus} × {offer.gpu})" if offer.gpu else "")


def machines(offer: MachineOffer, nodes: int) -> str:
    """Describe machines and their place: "4 × p4d.24xlarge (8 × A100) in us-east-1a, on demand"."""
    return f"{nodes} × {machine(offer)} in {placement(offer)}"


def placement(offer: MachineOffer) -> str:
    """Describe where and how a machine is rented: "us-east-1a, spot"."""
    return f"{offer.zone or offer.region}, {'spot' if offer.spot else 'on demand'}"


def rental(offers: Sequence[MachineOffer], market: Market, nodes: int) -> Rental:
    """Return a plan's summary of the offer that is tried first.

    Args:
        offers: all offers in the order of trial.
    """
    first = offers[0]
    prices = [price for offer in offers if (price := per_hour(offer, nodes)) is not None]
    return Rental(
        provider="aws",
        machine=machine(first),
        location=placement(first),
        region=first.region,
        cpus=first.vcpus,
        memory_gb=first.memory,
        gpus=first.gpus,
        price=per_hour(first, nodes),
        priced=first.priced,
        most=max(prices, default=None),
        notes=(*_alternatives_note(offers), *(f"unknown: {note}" for note in market.notes)),
    )


def _alternatives_note(offers: Sequence[MachineOffer]) -> list[str]:
    """Return a note on the other places where machines are requested."""
    alternatives: dict[tuple[str, str], list[MachineOffer]] = {}
    for offer in offers[1:]:
        alternatives.setdefault((offer.instance_type, offer.region), []).append(offer)
    descriptions = [f"{name} in {zones_text(group)}" for (name, _), group in alternatives.items()]
    more = (
        f" and {len(descriptions) - SHOWN_ELSEWHERE} more"
        if len(descriptions) > SHOWN_ELSEWHERE
        else ""
    )
    return (
        [f"no capacity: {', '.join(descriptions[:SHOWN_ELSEWHERE])}{more}"] if descriptions else []
    )
