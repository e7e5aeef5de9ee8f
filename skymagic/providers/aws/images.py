"""Which image a machine boots: found when it is needed, by the public parameters of those who make the images."""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.offer import Offer

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
"""Canonical's; documented at documentation.ubuntu.com/aws, "Find Ubuntu images on AWS"."""
DRIVER = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""AWS Deep Learning Base AMI: Ubuntu with NVIDIA's driver, EFA and no framework; from the release notes of the DLAMI."""


@dataclass(frozen=True)
class Image:
    """An image: its id, the name of its root device, and the GB that it needs."""

    id: str
    device: str = "/dev/sda1"
    disk: int = 8


def parameter(offer: Offer) -> str:
    """The name of the public parameter that has the image for these machines; pure."""
    if offer.gpus:
        return DRIVER.format(arch=offer.architecture)
    return UBUNTU.format(arch={"x86_64": "amd64"}.get(offer.architecture, offer.architecture))


def find(clients: Clients, offer: Offer, settings: CloudSettings) -> Image:
    """The image for these machines in their region.

    Raises:
        CloudError: the user's own is not there; or it cannot be found out, and then one may be named.
    """
    named = settings.image_id
    if named is None:
        name = parameter(offer)
        try:
            named = str(clients.call("ssm", offer.region, "GetParameter", Name=name)["Parameter"]["Value"])
        except CloudError as problem:
            remedy = f"{problem.remedy + '; or ' if problem.remedy else ''}name an image: sky.AWS(image_id='ami-…')"
            words = f"the image for {offer.instance_type} is not to be found ({name}): {problem.reason}"
            raise CloudError(problem.kind, problem.code, words, remedy) from problem
    found = clients.call("ec2", offer.region, "DescribeImages", ImageIds=[named])["Images"]
    if not found:
        raise CloudError("missing", "InvalidAMIID.NotFound", f"there is no image {named} in {offer.region}")
    device = found[0].get("RootDeviceName") or "/dev/sda1"
    sizes = [
        each.get("Ebs", {}).get("VolumeSize", 0)
        for each in found[0].get("BlockDeviceMappings", ())
        if each.get("DeviceName") == device
    ]
    return Image(named, device, max([8, *sizes]))
