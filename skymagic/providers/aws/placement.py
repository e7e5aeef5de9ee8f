"""Cluster placement groups: machines with GPUs near each other in the network; of each launch its own, and never what a pool fails for."""

from __future__ import annotations

from skymagic.errors import CloudError
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.tags import Label


def wanted(offer: Offer, count: int) -> bool:
    """Whether machines are to be near each other: with GPUs, more than one, and not where a reservation has put them. Pure."""
    return offer.gpus > 0 and count > 1 and not offer.reservation


def group(clients: Clients, region: str, label: Label, launch: int) -> str:
    """The name of a new group, for one launch: one that still has machines in a zone takes none in another.

    Raises:
        CloudError: it cannot be made.
    """
    name = f"skymagic-{label.job}-{launch}"
    try:
        clients.call(
            "ec2", region, "CreatePlacementGroup", GroupName=name, Strategy="cluster",
            TagSpecifications=label.specifications("placement-group"),
        )  # fmt: skip
    except CloudError as problem:
        if problem.code != "InvalidPlacementGroup.Duplicate":  # made by a call whose answer was lost
            raise
    return name


def at_fault(problem: CloudError) -> bool:
    """Whether a launch failed for its placement group: there may be room apart from each other. Pure."""
    return (
        problem.kind in ("capacity", "place", "missing", "invalid") and "placement group" in problem.reason.casefold()
    )
