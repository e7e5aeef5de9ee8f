"""Start all machines of a pool at once, in one zone and of one type.

RunInstances with MinCount = MaxCount is all or nothing, is idempotent by its client token, and tags
instances, disks and network cards from their first moment. CreateFleet of type ``instant`` could do
the same, but was rejected: it needs a launch template, which must be created and deleted too; its
answer may contain some of the machines along with errors; and it chooses among types and zones
itself, which here follows the list of offers and reports a reason for each step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import errors
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import CallSite
from skymagic.providers.aws.instances import Instance
from skymagic.providers.aws.network import NetworkPlace
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label

logger = logging.getLogger(__name__)

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
"""Canonical's parameter; see documentation.ubuntu.com/aws, "Find Ubuntu images on AWS"."""
DRIVER = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""AWS Deep Learning Base AMI: Ubuntu with NVIDIA's driver, EFA and no framework.

From the release notes of the DLAMI.
"""


@dataclass(frozen=True)
class MachineImage:
    """An image: its ID, the name of its root device, and its minimum disk size in GB."""

    id: str
    device: str = "/dev/sda1"
    disk: int = 8


def image_parameter(offer: MachineOffer) -> str:
    """Return the name of the public parameter with the image for these machines. Pure."""
    if offer.gpus:
        return DRIVER.format(arch=offer.architecture)
    return UBUNTU.format(arch={"x86_64": "amd64"}.get(offer.architecture, offer.architecture))


def image_for(clients: AwsClients, offer: MachineOffer, settings: CloudSettings) -> MachineImage:
    """Return the image for these machines in their region.

    Raises:
        CloudError: the user's own image does not exist; or the lookup fails, and the user may name
            an image.
    """
    named = settings.image_id
    if named is None:
        name = image_parameter(offer)
        try:
            named = str(
                clients.call("ssm", offer.region, "GetParameter", Name=name)["Parameter"]["Value"]
            )
        except CloudError as problem:
            remedy = (
                f"{problem.hint + '; or ' if problem.hint else ''}"
                "name an image: sky.AWS(image_id='ami-…')"
            )
            explanation = (
                f"the image for {offer.instance_type} could not be found ({name}): {problem.reason}"
            )
            raise CloudError(problem.kind, problem.cloud_code, explanation, remedy) from problem
    images = clients.call("ec2", offer.region, "DescribeImages", ImageIds=[named])["Images"]
    if not images:
        raise CloudError(
            "missing", "InvalidAMIID.NotFound", f"there is no image {named} in {offer.region}"
        )
    device = images[0].get("RootDeviceName") or "/dev/sda1"
    sizes = [
        mapping.get("Ebs", {}).get("VolumeSize", 0)
        for mapping in images[0].get("BlockDeviceMappings", ())
        if mapping.get("DeviceName") == device
    ]
    return MachineImage(named, device, max([8, *sizes]))


RUNNING_SECONDS = 300.0
POLL_SECONDS = 2.0
SETTLE_SECONDS = 20.0  # how long parts of EC2 may not know something that was just created


@dataclass(frozen=True)
class RunningInstance:
    """A running machine."""

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
    network: NetworkPlace,
    user_data: str,
    settings: CloudSettings,
    label: Label,
    token: str,
    near: str = "",
) -> dict[str, object]:
    """Return the parameters of RunInstances. Pure.

    Args:
        near: name of a placement group; "" for none.
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
        "NetworkInterfaces": interfaces(offer, network, settings),
        "TagSpecifications": label.specifications("instance", "volume", "network-interface"),
        **({"Placement": {"GroupName": near}} if near else {}),
        **_market(offer),
    }


def _market(offer: MachineOffer) -> dict[str, object]:
    if not offer.spot:
        return {}
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}


def interfaces(
    offer: MachineOffer, network: NetworkPlace, settings: CloudSettings
) -> list[dict[str, object]]:
    """Return the network cards of each machine. Pure.

    EC2 assigns no public address on its own to a machine with several cards.
    """
    card_settings: dict[str, object] = {
        "SubnetId": network.subnet,
        "Groups": [network.group],
        "DeleteOnTermination": True,
    }
    kind = {"InterfaceType": "efa"} if offer.efa else {}
    if offer.cards == 1:
        return [
            {
                **card_settings,
                **kind,
                "DeviceIndex": 0,
                "AssociatePublicIpAddress": not settings.use_private_ips,
            }
        ]
    return [
        {**card_settings, **kind, "DeviceIndex": 0 if card == 0 else 1, "NetworkCardIndex": card}
        for card in range(offer.cards)
    ]


def launch(clients: AwsClients, region: str, parameters: Mapping[str, object]) -> list[str]:
    """Start machines and return their IDs. Repeating the same call starts them only once.

    Args:
        parameters: those of RunInstances, as `parameters` returns them.

    Raises:
        CloudError: no machine was started; if `kind` is in `errors.UNCERTAIN`, that is unknown.
    """
    answer = clients.retry_until_settled(
        lambda: clients.call("ec2", region, "RunInstances", **parameters),
        SETTLE_SECONDS,
        lambda problem: problem.kind == "missing",  # the security group, created a moment ago
    )
    ids = [instance["InstanceId"] for instance in answer["Instances"]]
    logger.info("instances are launched: region=%s ids=%s", region, ids)
    return ids


def wait_running(clients: AwsClients, region: str, ids: Sequence[str]) -> list[RunningInstance]:
    """Wait until all machines run and have addresses.

    An instance that EC2 does not know yet does not count as gone.

    Raises:
        CloudError: a machine ended while starting, with EC2's reason; or they do not start in time.
    """
    end = time.monotonic() + RUNNING_SECONDS * clients.deadline_factor
    while True:
        instances = describe(clients, region, ids)
        check_running(instances.values(), region)
        if len(instances) == len(ids) and all(
            instance.state == "running" for instance in instances.values()
        ):
            return [_running(instances[instance_id], region) for instance_id in ids]
        if time.monotonic() >= end:
            states = {instance.id: instance.state for instance in instances.values()}
            listed = ", ".join(
                f"{instance_id} {states.get(instance_id, 'not known')}" for instance_id in ids
            )
            raise CloudError(
                "internal",
                "",
                f"EC2 has not started the machines within {RUNNING_SECONDS:.0f} s ({listed})",
            )
        time.sleep(POLL_SECONDS * clients.deadline_factor)


def describe(clients: AwsClients, region: str, ids: Sequence[str]) -> dict[str, Instance]:
    """Return EC2's descriptions of instances by ID, for those that it knows. Raises CloudError."""
    # with a filter, unknown IDs are not an error
    filters = [{"Name": "instance-id", "Values": list(ids)}]
    reservations = clients.pages(
        "ec2", region, "DescribeInstances", "Reservations", Filters=filters
    )
    instances = (
        Instance.parse(described)
        for reservation in reservations
        for described in reservation["Instances"]
    )
    return {instance.id: instance for instance in instances}


def check_running(instances: Iterable[Instance], region: str) -> None:
    """Raise CloudError if one of these instances ends or has ended, with EC2's reason."""
    for instance in instances:
        if not instance.runs:
            message = (
                f"{instance.id} has ended while it was starting: "
                f"{instance.reason or 'no reason is given'}"
            )
            raise errors.refusal(
                instance.reason_code or "Ended", message, CallSite("ec2:RunInstances", region)
            )


def _running(instance: Instance, region: str) -> RunningInstance:
    return RunningInstance(
        id=instance.id,
        region=region,
        private=instance.private_address,
        public=instance.public_address,
        interface=instance.interface,
    )
