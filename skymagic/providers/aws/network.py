"""Where a pool's machines are in the network: a subnet of their zone, a security group of their own, a placement group of each launch."""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import UNCERTAIN
from skymagic.providers.aws.tags import Label, filters

ADDRESS_SERVICE = "https://checkip.amazonaws.com"
"""Says from which public address it is asked; AWS's own."""
ADDRESS_TIMEOUT = 10.0
SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Subnet:
    """A subnet, in the VPC that it belongs to."""

    id: str
    vpc: str
    cidr: str


@dataclass(frozen=True)
class NetworkPlace:
    """Where machines are put: ids of a subnet and of a security group."""

    subnet: str
    group: str


def subnet(clients: AwsClients, region: str, zone: str, settings: CloudSettings) -> Subnet:
    """The user's own subnet, or the default one of a zone.

    Raises:
        CloudError: it is in another zone, or there is none; of kind "place", for another zone may do.
    """
    if settings.subnet:
        found = clients.call("ec2", region, "DescribeSubnets", SubnetIds=[settings.subnet])[
            "Subnets"
        ]
        if found and found[0]["AvailabilityZone"] != zone:
            raise CloudError("place", "", f"{settings.subnet} is in {found[0]['AvailabilityZone']}")
    else:
        default = [
            {"Name": "default-for-az", "Values": ["true"]},
            {"Name": "availability-zone", "Values": [zone]},
        ]
        found = clients.call("ec2", region, "DescribeSubnets", Filters=default)["Subnets"]
    if not found:
        words = f"there is no default subnet in {zone}"
        raise CloudError(
            "place",
            "",
            words,
            "name one: sky.AWS(subnet='subnet-…'), or aws ec2 create-default-subnet",
        )
    each = found[0]
    return Subnet(each["SubnetId"], each["VpcId"], each["CidrBlock"])


def caller_range(at: Subnet, settings: CloudSettings) -> str:
    """Who may connect, as a CIDR: what the user says, else this machine's address alone, as the machines will see it.

    Raises:
        CloudError: it cannot be found out.
    """
    if settings.ssh_from:
        return str(ipaddress.ip_network(settings.ssh_from, strict=False))
    own = _address_towards(at) if settings.use_private_ips else _public_address()
    return f"{own}/32"


def _address_towards(at: Subnet) -> str:
    """This machine's address on the route to a subnet; nothing is sent."""
    first = str(ipaddress.ip_network(at.cidr)[1])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((first, 9))
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise CloudError(
            "unreachable",
            "",
            f"there is no route to {at.cidr} ({problem.strerror})",
            "is the VPN up?",
        ) from problem


def _public_address() -> str:
    try:
        with urllib.request.urlopen(ADDRESS_SERVICE, timeout=ADDRESS_TIMEOUT) as answer:
            return str(ipaddress.IPv4Address(answer.read(64).decode().strip()))
    except (OSError, ValueError) as problem:
        words = f"could not determine this machine's public address ({ADDRESS_SERVICE}: {problem})"
        raise CloudError(
            "unreachable", "", words, "say who may connect: sky.AWS(ssh_from='203.0.113.7/32')"
        ) from problem


def security_group(
    clients: AwsClients, region: str, vpc: str, source: str, settings: CloudSettings, label: Label
) -> str:
    """A security group of the pool's own: SSH from `source`, everything among its machines; made once however often it is asked for.

    Raises:
        CloudError: it cannot be made.
    """
    name = f"skymagic-{label.job}"
    try:
        made = clients.call(
            "ec2", region, "CreateSecurityGroup", GroupName=name, Description=f"skymagic pool {label.pool}"[:255], VpcId=vpc,
            TagSpecifications=label.specifications("security-group"),
        )["GroupId"]  # fmt: skip
    except CloudError as problem:
        if problem.code != "InvalidGroup.Duplicate":  # made by a call whose answer was lost
            raise
        found = clients.call(
            "ec2", region, "DescribeSecurityGroups", Filters=filters(job=label.job)
        )["SecurityGroups"]
        made = next(each["GroupId"] for each in found if each["VpcId"] == vpc)
    within: dict[str, Any] = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made}]}
    ssh: dict[str, Any] = {
        "IpProtocol": "tcp",
        "FromPort": settings.ssh_port,
        "ToPort": settings.ssh_port,
        "IpRanges": [{"CidrIp": source}],
    }
    for operation, rules in (
        ("Ingress", [ssh, within]),
        ("Egress", [within]),
    ):  # EFA wants the egress rule too
        for rule in rules:
            _allow(clients, region, operation, made, rule)
    return str(made)


def _allow(
    clients: AwsClients, region: str, direction: str, to: str, rule: Mapping[str, Any]
) -> None:
    def once() -> object:
        return clients.call(
            "ec2", region, f"AuthorizeSecurityGroup{direction}", GroupId=to, IpPermissions=[rule]
        )

    try:
        clients.until_settled(
            once, SETTLE_SECONDS, lambda problem: problem.kind == "missing"
        )  # made a moment ago
    except CloudError as problem:
        if problem.code != "InvalidPermission.Duplicate":
            raise


def head_address(clients: AwsClients, region: str, interface: str, label: Label) -> str:
    """A public address (Elastic IP) for a machine that gets none by itself, because it has several network cards.

    Raises:
        CloudError: there is none; `release` gives back what was allocated.
    """
    made = clients.call(
        "ec2", region, "AllocateAddress", Domain="vpc", TagSpecifications=label.specifications("elastic-ip")
    )  # fmt: skip
    clients.call(
        "ec2",
        region,
        "AssociateAddress",
        AllocationId=made["AllocationId"],
        NetworkInterfaceId=interface,
    )
    return str(made["PublicIp"])


def placement_group(clients: AwsClients, region: str, label: Label, launch: int) -> str:
    """The name of a new group, for one launch: one that still has machines in a zone takes none in another. Raises CloudError."""
    name = f"skymagic-{label.job}-{launch}"
    try:
        clients.call(
            "ec2", region, "CreatePlacementGroup", GroupName=name, Strategy="cluster",
            TagSpecifications=label.specifications("placement-group"),
        )  # fmt: skip
    except CloudError as problem:
        if (
            problem.code != "InvalidPlacementGroup.Duplicate"
        ):  # made by a call whose answer was lost
            raise
    return name


def placement_at_fault(problem: CloudError) -> bool:
    """Whether a launch failed for its placement group, or that could not be made: there may be room apart from each other. Pure."""
    return (
        problem.kind not in UNCERTAIN
        and re.search("placement ?group", problem.reason, re.IGNORECASE) is not None
    )
