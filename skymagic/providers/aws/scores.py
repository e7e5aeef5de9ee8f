"""Spot placement scores: EC2's own estimate, from 1 to 10, of how likely a zone has room for a pool now. They order offers, and leave none out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from skymagic.providers.aws.cache import Cache
from skymagic.providers.aws.catalogue import DAY, place
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.refusals import optional

BEST = 10
"""Of the scores: a request succeeds with high likelihood, and no more is promised."""
PERMISSION = "ec2:GetSpotPlacementScores and ec2:DescribeAvailabilityZones"
SECONDS = 600.0
"""How long scores are used again: they change as capacity does, and EC2 answers few different questions within a day."""


def ordered(offers: Sequence[Offer], nodes: int, clients: Clients, cache: Cache, notes: list[str]) -> tuple[Offer, ...]:
    """Offers in the order in which they are tried; the same ones where EC2 gives no scores.

    Args:
        offers: all of spot.
        notes: gets a line where the scores may not be asked for.
    """
    if len(offers) < 2:
        return tuple(offers)
    found: dict[str, int] = {}
    for region in sorted({one.region for one in offers}):
        names = sorted({one.instance_type for one in offers if one.region == region})
        found |= optional(partial(_scores, clients, region, names, nodes, cache), PERMISSION, notes) or {}
    return by_score(offers, found)


def by_score(offers: Sequence[Offer], scores: Mapping[str, int]) -> tuple[Offer, ...]:
    """The best first; pure. A score weighs as a price does: a zone with 0 counts as twice as dear as one with 10.

    A zone without a score counts as one in the middle. Offers without a price stay behind those that have one.

    Args:
        scores: by zone.
    """

    def key(one: Offer) -> tuple[bool, float]:
        weight = 2.0 - scores.get(one.zone, BEST / 2) / BEST
        return one.price is None, weight * (1.0 if one.price is None else one.price)

    return tuple(sorted(offers, key=key))  # stable: what weighs the same stays as it was


def _scores(clients: Clients, region: str, types: Sequence[str], nodes: int, cache: Cache) -> dict[str, int]:
    """By zone. All types in one question: EC2 gives a low score to each question about fewer than three."""
    label = place(clients, region)
    zones = cache.fresh(f"zone-ids-{label}", 30 * DAY, partial(_zone_names, clients, region)).value
    name = f"scores-{label}-{nodes}-{'-'.join(types)}"
    said = cache.fresh(name, SECONDS, partial(_asked, clients, region, types, nodes)).value
    return {zones[zone]: score for zone, score in said if zone in zones}


def _asked(clients: Clients, region: str, types: Sequence[str], nodes: int) -> list[tuple[str, int]]:
    asked = clients.pages(
        "ec2", region, "GetSpotPlacementScores", "SpotPlacementScores",
        InstanceTypes=list(types), TargetCapacity=nodes, SingleAvailabilityZone=True, RegionNames=[region],
    )  # fmt: skip
    return [(one["AvailabilityZoneId"], int(one["Score"])) for one in asked if "AvailabilityZoneId" in one]


def _zone_names(clients: Clients, region: str) -> dict[str, str]:
    """Ids of zones, which are the same for everybody, → names, which each account has its own of."""
    zones = clients.call("ec2", region, "DescribeAvailabilityZones")["AvailabilityZones"]
    return {one["ZoneId"]: one["ZoneName"] for one in zones}
