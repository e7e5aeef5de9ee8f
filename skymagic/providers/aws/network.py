"""Network of a pool's machines: a subnet in their zone, a security group, and placement groups.

The security group belongs to the pool, each placement group to one launch.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import UNCERTAIN
from skymagic.providers.aws.tags import Label, filters, parameters

ADDRESS_SERVICE = "https://checkip.amazonaws.com"
"""AWS service that returns the caller's public address."""
ADDRESS_TIMEOUT = 10.0
SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class Subnet:
    """A subnet and its VPC."""

    id: str
    vpc: str
    cidr: str


@dataclass(frozen=True)
class NetworkPlace:
    """IDs of the subnet and the security group of machines."""

    subnet: str
    group: str


def subnet(clients: AwsClients, region: str, zone: str, settings: CloudSettings) -> Subnet:
    """Return the user's own subnet, or the default subnet of a zone.

    Raises:
        CloudError: the subnet is in another zone, or does not exist; of kind "place", because
            another zone may work.
    """
    if settings.subnet:
        subnets = clients.call("ec2", region, "DescribeSubnets", SubnetIds=[settings.subnet])[
            "Subnets"
        ]
        if subnets and subnets[0]["AvailabilityZone"] != zone:
            raise CloudError(
                "place", "", f"{settings.subnet} is in {subnets[0]['AvailabilityZone']}"
            )
    else:
        default = [
            {"Name": "default-for-az", "Values": ["true"]},
            {"Name": "availability-zone", "Values": [zone]},
        ]
        subnets = clients.call("ec2", region, "DescribeSubnets", Filters=default)["Subnets"]
    if not subnets:
        reason = f"there is no default subnet in {zone}"
        raise CloudError(
            "place",
            "",
            reason,
            "name one: sky.AWS(subnet='subnet-…'), or aws ec2 create-default-subnet",
        )
    first = subnets[0]
    return Subnet(first["SubnetId"], first["VpcId"], first["CidrBlock"])


def caller_range(at: Subnet, settings: CloudSettings) -> str:
    """Return who may connect, as a CIDR range.

    This is the user's setting, or else this machine's address as the rented machines will see it.

    Raises:
        CloudError: the address cannot be determined.
    """
    if settings.ssh_from:
        return str(ipaddress.ip_network(settings.ssh_from, strict=False))
    own = _address_towards(at) if settings.use_private_ips else _public_address()
    return f"{own}/32"


def _address_towards(at: Subnet) -> str:
    """Return this machine's address on the route to a subnet. Sends nothing."""
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
        reason = f"could not determine this machine's public address ({ADDRESS_SERVICE}: {problem})"
        raise CloudError(
            "unreachable", "", reason, "say who may connect: sky.AWS(ssh_from='203.0.113.7/32')"
        ) from problem


def security_group(
    clients: AwsClients, region: str, vpc: str, source: str, settings: CloudSettings, label: Label
) -> str:
    """Create the pool's security group: SSH from `source`, and all traffic among its machines.

    Calling it again returns the same group.

    Raises:
        CloudError: it cannot be created.
    """
    name = f"skymagic-{label.job}"
    try:
        group_id = clients.call(
            "ec2",
            region,
            "CreateSecurityGroup",
            GroupName=name,
            Description=f"skymagic pool {label.pool}"[:255],
            VpcId=vpc,
            TagSpecifications=label.specifications("security-group"),
        )["GroupId"]
    except CloudError as problem:
        if (
            problem.cloud_code != "InvalidGroup.Duplicate"
        ):  # created by a call whose answer was lost
            raise
        groups = clients.call(
            "ec2", region, "DescribeSecurityGroups", Filters=parameters(filters(job=label.job))
        )["SecurityGroups"]
        group_id = next(group["GroupId"] for group in groups if group["VpcId"] == vpc)
    within: dict[str, object] = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    ssh: dict[str, object] = {
        "IpProtocol": "tcp",
        "FromPort": settings.ssh_port,
        "ToPort": settings.ssh_port,
        "IpRanges": [{"CidrIp": source}],
    }
    # EFA requires the egress rule too
    for operation, rules in (("Ingress", [ssh, within]), ("Egress", [within])):
        for rule in rules:
            _allow(clients, region, operation, group_id, rule)
    return str(group_id)


def _allow(
    clients: AwsClients, region: str, direction: str, to: str, rule: Mapping[str, object]
) -> None:
    def once() -> object:
        return clients.call(
            "ec2", region, f"AuthorizeSecurityGroup{direction}", GroupId=to, IpPermissions=[rule]
        )

    try:
        # the group was created a moment ago
        clients.retry_until_settled(once, SETTLE_SECONDS, lambda problem: problem.kind == "missing")
    except CloudError as problem:
        if problem.cloud_code != "InvalidPermission.Duplicate":
            raise


def head_address(clients: AwsClients, region: str, interface: str, label: Label) -> str:
    """Allocate a public address (Elastic IP) for a machine with several network cards.

    EC2 assigns none to such a machine by itself.

    Raises:
        CloudError: none is available; `release` releases what was allocated.
    """
    allocated = clients.call(
        "ec2",
        region,
        "AllocateAddress",
        Domain="vpc",
        TagSpecifications=label.specifications("elastic-ip"),
    )
    clients.call(
        "ec2",
        region,
        "AssociateAddress",
        AllocationId=allocated["AllocationId"],
        NetworkInterfaceId=interface,
    )
    return str(allocated["PublicIp"])


def placement_group(clients: AwsClients, region: str, label: Label, launch: int) -> str:
    """Create a placement group for one launch and return its name. Raises CloudError.

    Each launch needs a new one: a group with machines in one zone accepts none in another.
    """
    name = f"skymagic-{label.job}-{launch}"
    try:
        clients.call(
            "ec2",
            region,
            "CreatePlacementGroup",
            GroupName=name,
            Strategy="cluster",
            TagSpecifications=label.specifications("placement-group"),
        )
    except CloudError as problem:
        # a duplicate was created by a call whose answer was lost
        if problem.cloud_code != "InvalidPlacementGroup.Duplicate":
            raise
    return name


def is_placement_failure(problem: CloudError) -> bool:
    """Return True if a launch failed because of its placement group. Pure.

    Without the group there may be capacity.
    """
    return (
        problem.kind not in UNCERTAIN
        and re.search("placement ?group", problem.reason, re.IGNORECASE) is not None
    )
