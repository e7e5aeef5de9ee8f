"""Offers as people read them: one table, as text and as HTML, and the words of a plan; pure."""

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
LEAST_DOLLARS = 0.005  # below this a price is shown with more digits, for it would be $0.00


@dataclass(frozen=True, repr=False)
class OfferTable(Keyed[str, tuple[MachineOffer, ...]]):
    """Offers of a market for a pool of so many nodes: a notebook shows it as a table, a terminal as text.

    By type of machine the offers of it, the best first: ``offers["p4d.24xlarge"][0].price``.

    Attributes:
        most: rows that are shown; the rest is counted. None for all.
    """

    market: Market
    nodes: int = 1
    most: int | None = MOST_ROWS

    @property
    def _held(self) -> Mapping[str, tuple[MachineOffer, ...]]:
        found: dict[str, tuple[MachineOffer, ...]] = {}
        for one in self.market.offers:
            found[one.instance_type] = (*found.get(one.instance_type, ()), one)
        return found

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each type in each region, as cells; zones of one price share one."""
        return [_row(group, self.nodes) for group in grouped(self.market.offers)]

    def text(self) -> str:
        """The table as text, with its notes below."""
        rows = self.rows()
        shown = rows[: self.most]
        return "\n".join(
            [
                table([HEADINGS, *shown]) if rows else "nothing is offered",
                *self._below(len(rows) - len(shown)),
            ]
        )

    def html(self) -> str:
        """The table as HTML."""
        rows = self.rows()
        shown = rows[: self.most]
        below = "".join(f"<p>{escape(line)}</p>" for line in self._below(len(rows) - len(shown)))
        return f"{html_table([HEADINGS, *shown])}{below}"

    def _below(self, left: int) -> list[str]:
        pool = [f"per hour: of {self.nodes} machines"] if self.nodes > 1 else []
        more = [f"and {left} more, which cost more"] if left else []
        return [*more, *pool, *(f"unknown: {note}" for note in self.market.notes)]

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def grouped(offers: Iterable[MachineOffer]) -> list[list[MachineOffer]]:
    """Offers that differ in their zone alone, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[MachineOffer]] = {}
    for one in offers:
        groups.setdefault(
            (one.region, one.instance_type, one.spot, one.price, one.priced), []
        ).append(one)
    return list(groups.values())


def _row(group: Sequence[MachineOffer], nodes: int) -> tuple[str, ...]:
    one = group[0]
    price = per_hour(one, nodes)
    return (
        "unknown"
        if price is None
        else f"${price:.2f}"
        if price >= LEAST_DOLLARS
        else f"${price:.4f}",
        one.instance_type + (" spot" if one.spot else ""),
        f"{one.gpus} × {one.gpu}" if one.gpu else "-",
        f"{one.gpu_memory:.12g} GB" if one.gpu else "-",
        str(one.vcpus),
        f"{one.memory:.12g} GB",
        f"{one.network:.12g} Gbit/s" if one.network else "-",
        where(group),
        one.priced or "-",
    )


def where(group: Sequence[MachineOffer]) -> str:
    """Zones of one region: ``"us-east-1 a b d"``; the region alone where its zones are not told."""
    region = group[0].region
    zones = sorted(one.zone.removeprefix(region) for one in group if one.zone)
    return " ".join([region, *zones])


def machine(one: MachineOffer) -> str:
    """A machine in words: "p4d.24xlarge (8 × A100)"."""
    return one.instance_type + (f" ({one.gpus} × {one.gpu})" if one.gpu else "")


def machines(one: MachineOffer, nodes: int) -> str:
    """Machines and where they are: "4 × p4d.24xlarge (8 × A100) in us-east-1a, on demand"."""
    return f"{nodes} × {machine(one)} in {place(one)}"


def place(one: MachineOffer) -> str:
    """Where it is, and how it is rented: "us-east-1a, spot"."""
    return f"{one.zone or one.region}, {'spot' if one.spot else 'on demand'}"


def rental(chosen: Sequence[MachineOffer], market: Market, nodes: int) -> Rental:
    """What a plan says of the offer that is tried first; `chosen` are all, in their order."""
    one = chosen[0]
    prices = [price for each in chosen if (price := per_hour(each, nodes)) is not None]
    return Rental(
        provider="aws", machine=machine(one), place=place(one), region=one.region, cpus=one.vcpus, memory_gb=one.memory,
        gpus=one.gpus, price=per_hour(one, nodes), priced=one.priced, most=max(prices, default=None),
        notes=(*_otherwise(chosen), *(f"unknown: {note}" for note in market.notes)),
    )  # fmt: skip


def _otherwise(chosen: Sequence[MachineOffer]) -> list[str]:
    """Where else they are looked for."""
    rest: dict[tuple[str, str], list[MachineOffer]] = {}
    for one in chosen[1:]:
        rest.setdefault((one.instance_type, one.region), []).append(one)
    words = [f"{name} in {where(group)}" for (name, _), group in rest.items()]
    more = f" and {len(words) - SHOWN_ELSEWHERE} more" if len(words) > SHOWN_ELSEWHERE else ""
    return [f"no capacity: {', '.join(words[:SHOWN_ELSEWHERE])}{more}"] if words else []
