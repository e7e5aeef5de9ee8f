"""Reserved capacity: on-demand reservations and capacity blocks of the account, put before all other offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymagic.errors import CloudError, RequestError
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.offer import Offer

AUTO = "auto"
"""Any reservation that fits."""


@dataclass(frozen=True)
class Reservation:
    """Capacity that the account has reserved: machines of a type in a zone.

    Attributes:
        free: how many of them nobody uses now. block: whether it is a capacity block, which is paid for in advance.
    """

    id: str
    instance_type: str
    zone: str
    free: int
    state: str = "active"
    block: bool = False


def find(clients: Clients, region: str, named: str) -> list[Reservation]:
    """The reservations of a region that are meant: the one named, or all that are active. Raises CloudError."""
    asked: dict[str, Any] = {"CapacityReservationIds": [named]} if named != AUTO else {
        "Filters": [{"Name": "state", "Values": ["active"]}]
    }  # fmt: skip
    try:
        found = clients.pages("ec2", region, "DescribeCapacityReservations", "CapacityReservations", **asked)
        return [_reservation(each) for each in found]
    except CloudError as problem:
        if problem.kind == "missing":  # it is in another region
            return []
        raise


def _reservation(said: Mapping[str, Any]) -> Reservation:
    return Reservation(
        said["CapacityReservationId"],
        said["InstanceType"],
        said["AvailabilityZone"],
        int(said.get("AvailableInstanceCount", 0)),
        said.get("State", ""),
        said.get("ReservationType") == "capacity-block",
    )


def chosen(
    named: str, there: Mapping[str, Sequence[Reservation]], offers: Sequence[Offer], count: int
) -> tuple[Offer, ...]:
    """Offers with those on reserved capacity first; of a reservation that is named, that alone. Pure.

    Args:
        there: region → its reservations.
        offers: all that serve the request, whatever quotas allow: what is reserved is counted already.

    Raises:
        RequestError: the one that is named is not there, is not of such machines, or has not enough of them free.
    """
    fitting = [
        replace(one, reservation=each.id, block=each.block)
        for one in offers
        for each in there.get(one.region, ())
        if (each.instance_type, each.zone) == (one.instance_type, one.zone)
        and each.state == "active" and each.free >= count and not one.spot
    ]  # fmt: skip
    if named == AUTO or fitting:
        return tuple(fitting)
    found = next((each for group in there.values() for each in group), None)
    raise RequestError(_refused(named, found, sorted(there), offers, count))


def _refused(named: str, found: Reservation | None, regions: Sequence[str], offers: Sequence[Offer], count: int) -> str:
    if found is None:
        return f"there is no reservation {named} in {', '.join(regions)}: name its region with --region"
    what = f"{named} is of {found.instance_type} in {found.zone}"
    if found.state != "active":
        return f"{what}, and it is {found.state}"
    if any(one.spot for one in offers):
        return f"{what}: reserved capacity is no spot capacity, leave --spot out"
    if not any((one.instance_type, one.zone) == (found.instance_type, found.zone) for one in offers):
        types = ", ".join(dict.fromkeys(one.instance_type for one in offers)) or "no type of machine"
        return f"{what}, and what is asked for is served by {types}"
    return f"{what}, with {found.free} machines free, and {count} are asked for"
