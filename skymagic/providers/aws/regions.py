"""Names of regions: those that boto3 knows, and those that EC2 says there are."""

from __future__ import annotations

from collections.abc import Sequence

from skymagic.errors import CloudError, RequestError
from skymagic.plan.suggest import did_you_mean
from skymagic.providers.aws.clients import DEFAULT_REGION, Clients


def used(clients: Clients) -> list[str]:
    """The regions that the account uses. Raises CloudError."""
    return _described(clients, every=False)


def check(names: Sequence[str], clients: Clients) -> None:
    """Refuse names of regions that there are not. One that boto3 does not know may be new: EC2 is asked.

    Raises:
        RequestError: with the nearest name for each.
    """
    unknown = [name for name in names if name not in clients.known_regions()]
    if not unknown:
        return
    try:
        there = _described(clients, every=True)
    except CloudError:  # whatever needs it asks again, and says what is wrong
        return
    mistakes = [f"AWS has no region {name!r}{did_you_mean(name, there)}" for name in unknown if name not in there]
    if mistakes:
        raise RequestError(mistakes)


def _described(clients: Clients, *, every: bool) -> list[str]:
    answer = clients.call("ec2", clients.region or DEFAULT_REGION, "DescribeRegions", AllRegions=every)
    return sorted(each["RegionName"] for each in answer["Regions"])
