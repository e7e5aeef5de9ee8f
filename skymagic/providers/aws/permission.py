"""EC2's own dry run: whether these credentials may rent what a plan says, asked without renting anything."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import images, launch, network, placement
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.tags import Label

ALLOWED = "DryRunOperation"
"""The error that says that the call would have been carried out."""


def notes(clients: Clients, offer: Offer, count: int, settings: CloudSettings, label: Label) -> tuple[str, ...]:
    """What EC2 says to a start, as notes of a plan; it never raises, for a plan is worth showing all the same."""
    try:
        refused = _refused(clients, offer, count, settings, label)
    except CloudError as problem:
        return (f"EC2's dry run could not be made: {problem.reason}",)
    return tuple(refused) or ("EC2's dry run: these credentials may rent them",)


def _refused(clients: Clients, offer: Offer, count: int, settings: CloudSettings, label: Label) -> list[str]:
    image = images.find(clients, offer, settings)
    subnet = network.subnet(clients, offer.region, offer.zone, settings)
    asked = launch.parameters(
        offer,
        count,
        image,
        network.Place(subnet.id, ""),
        "#cloud-config\n",
        settings,
        label,
        token=secrets.token_hex(8),
    )
    for card in asked["NetworkInterfaces"]:
        del card["Groups"]  # the pool's security group would be made first
    calls: dict[str, dict[str, Any]] = {
        "RunInstances": asked,
        "CreateSecurityGroup": {
            "GroupName": f"skymagic-{label.job}", "Description": "skymagic", "VpcId": subnet.vpc,
            "TagSpecifications": label.specifications("security-group"),
        },
    }  # fmt: skip
    if placement.wanted(offer, count):
        calls["CreatePlacementGroup"] = {
            "GroupName": f"skymagic-{label.job}", "Strategy": "cluster",
            "TagSpecifications": label.specifications("placement-group"),
        }  # fmt: skip
    if offer.cards > 1 and not settings.use_private_ips:
        calls["AllocateAddress"] = {"Domain": "vpc", "TagSpecifications": label.specifications("elastic-ip")}
    return [words for operation, asked in calls.items() if (words := said(clients, offer.region, operation, asked))]


def said(clients: Clients, region: str, operation: str, asked: Mapping[str, Any]) -> str:
    """Why a call would be refused; "" where it would not."""
    try:
        clients.call("ec2", region, operation, **asked, DryRun=True)
    except CloudError as problem:
        if problem.code == ALLOWED:
            return ""
        return f"EC2's dry run: {problem.reason}" + (f"; {problem.remedy}" if problem.remedy else "")
    return ""
