"""All machines of a pool at once, in one zone and of one type.

RunInstances gives all or none of them. CreateFleet of type ``instant`` can do the same, and was not taken: it needs a launch template,
one more thing to make and to give back; its answer may hold a part of the machines beside errors; and it chooses among types and zones,
which here is done by the list of offers, with a reason said for each step. RunInstances with MinCount = MaxCount is all or nothing, is
idempotent by its client token, and tags instances, disks and network cards from their first moment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import errors
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import Where
from skymagic.providers.aws.network import NetworkPlace
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
"""Canonical's; documented at documentation.ubuntu.com/aws, "Find Ubuntu images on AWS"."""
DRIVER = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""AWS Deep Learning Base AMI: Ubuntu with NVIDIA's driver, EFA and no framework; from the release notes of the DLAMI."""


@dataclass(frozen=True)
class MachineImage:
    """An image: its id, the name of its root device, and the GB that it needs."""

    id: str
    device: str = "/dev/sda1"
    disk: int = 8


def image_parameter(offer: MachineOffer) -> str:
    """The name of the public parameter that has the image for these machines; pure."""
    if offer.gpus:
        return DRIVER.format(arch=offer.architecture)
    return UBUNTU.format(arch={"x86_64": "amd64"}.get(offer.architecture, offer.architecture))


def image_for(clients: AwsClients, offer: MachineOffer, settings: CloudSettings) -> MachineImage:
    """The image for these machines in their region.

    Raises:
        CloudError: the user's own is not there; or it cannot be found out, and then one may be named.
    """
    named = settings.image_id
    if named is None:
        name = image_parameter(offer)
        try:
            named = str(
                clients.call("ssm", offer.region, "GetParameter", Name=name)["Parameter"]["Value"]
            )
        except CloudError as problem:
            remedy = f"{problem.remedy + '; or ' if problem.remedy else ''}name an image: sky.AWS(image_id='ami-…')"
            words = (
                f"the image for {offer.instance_type} could not be found ({name}): {problem.reason}"
            )
            raise CloudError(problem.kind, problem.code, words, remedy) from problem
    found = clients.call("ec2", offer.region, "DescribeImages", ImageIds=[named])["Images"]
    if not found:
        raise CloudError(
            "missing", "InvalidAMIID.NotFound", f"there is no image {named} in {offer.region}"
        )
    device = found[0].get("RootDeviceName") or "/dev/sda1"
    sizes = [
        each.get("Ebs", {}).get("VolumeSize", 0)
        for each in found[0].get("BlockDeviceMappings", ())
        if each.get("DeviceName") == device
    ]
    return MachineImage(named, device, max([8, *sizes]))


RUNNING_SECONDS = 300.0
POLL_SECONDS = 2.0
SETTLE_SECONDS = 20.0  # how long something that was just made may be unknown to another part of EC2


@dataclass(frozen=True)
class RunningInstance:
    """A machine that runs."""

    id: str
    region: str
    private: str
    public: str = ""
    interface: str = ""
    """ID of the machine's first network card."""


def parameters(
    offer: MachineOffer,
    count: int,
    image: MachineImage,
    place: NetworkPlace,
    user_data: str,
    settings: CloudSettings,
    label: Label,
    token: str,
    near: str = "",
) -> dict[str, Any]:
    """What RunInstances is asked for; pure.

    Args:
        near: the name of a placement group; "" for none.
    """
    return {
        "ImageId": image.id,
        "InstanceType": offer.instance_type,
        "MinCount": count,
        "MaxCount": count,
        "ClientToken": token,
        "UserData": user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 1,
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": image.device,
                "Ebs": {
                    "VolumeSize": max(settings.disk, image.disk),
                    "VolumeType": "gp3",
                    "DeleteOnTermination": True,
                },
            }
        ],
        "NetworkInterfaces": interfaces(offer, place, settings),
        "TagSpecifications": label.specifications("instance", "volume", "network-interface"),
        **({"Placement": {"GroupName": near}} if near else {}),
        **_market(offer),
    }


def _market(offer: MachineOffer) -> dict[str, Any]:
    if not offer.spot:
        return {}
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}


def interfaces(
    offer: MachineOffer, place: NetworkPlace, settings: CloudSettings
) -> list[dict[str, Any]]:
    """The network cards of each machine; pure. EC2 gives one with several of them no public address by itself."""
    each: dict[str, Any] = {
        "SubnetId": place.subnet,
        "Groups": [place.group],
        "DeleteOnTermination": True,
    }
    kind = {"InterfaceType": "efa"} if offer.efa else {}
    if offer.cards == 1:
        return [
            {
                **each,
                **kind,
                "DeviceIndex": 0,
                "AssociatePublicIpAddress": not settings.use_private_ips,
            }
        ]
    return [
        {**each, **kind, "DeviceIndex": 0 if card == 0 else 1, "NetworkCardIndex": card}
        for card in range(offer.cards)
    ]


def launch(clients: AwsClients, region: str, asked: Mapping[str, Any]) -> list[str]:
    """The ids of the machines that EC2 has begun to start; the same call twice starts them once.

    Raises:
        CloudError: none was started; or, where `kind` is one of `errors.UNCERTAIN`, nobody knows.
    """
    answer = clients.until_settled(
        lambda: clients.call("ec2", region, "RunInstances", **asked),
        SETTLE_SECONDS,
        lambda problem: problem.kind == "missing",  # the security group, made a moment ago
    )
    return [each["InstanceId"] for each in answer["Instances"]]


def wait_running(clients: AwsClients, region: str, ids: Sequence[str]) -> list[RunningInstance]:
    """Wait until all of them run and have addresses. An instance that EC2 does not know yet is not gone.

    Raises:
        CloudError: one has ended while it was starting, with EC2's reason; or they do not start in time.
    """
    end = time.monotonic() + RUNNING_SECONDS * clients.deadline_factor
    while True:
        found = describe(clients, region, ids)
        check_running(found.values(), region)
        if len(found) == len(ids) and all(
            each["State"]["Name"] == "running" for each in found.values()
        ):
            return [_instance(found[one], region) for one in ids]
        if time.monotonic() >= end:
            states = {
                one: found[one]["State"]["Name"] if one in found else "not known" for one in ids
            }
            told = ", ".join(f"{one} {state}" for one, state in states.items())
            raise CloudError(
                "internal",
                "",
                f"EC2 has not started the machines within {RUNNING_SECONDS:.0f} s ({told})",
            )
        time.sleep(POLL_SECONDS * clients.deadline_factor)


def describe(clients: AwsClients, region: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What EC2 says of instances, those that it knows, by id. Raises CloudError."""
    filters = [{"Name": "instance-id", "Values": list(ids)}]  # by filter: unknown ids are no error
    reservations = clients.pages(
        "ec2", region, "DescribeInstances", "Reservations", Filters=filters
    )
    return {each["InstanceId"]: each for one in reservations for each in one["Instances"]}


def check_running(found: Any, region: str) -> None:
    """Raise CloudError if one of these instances ends or has ended, with EC2's reason."""
    for each in found:
        if each["State"]["Name"] not in ("pending", "running"):
            reason = each.get("StateReason", {})
            message = f"{each['InstanceId']} has ended while it was starting: {reason.get('Message', 'no reason is given')}"
            raise errors.refused(
                reason.get("Code") or "Ended", message, Where("ec2:RunInstances", region)
            )


def _instance(said: Mapping[str, Any], region: str) -> RunningInstance:
    cards = said.get("NetworkInterfaces", ())
    first: Mapping[str, Any] = next(
        (one for one in cards if one.get("Attachment", {}).get("DeviceIndex") == 0), {}
    )
    return RunningInstance(
        said["InstanceId"],
        region,
        said["PrivateIpAddress"],
        said.get("PublicIpAddress", ""),
        first.get("NetworkInterfaceId", ""),
    )
