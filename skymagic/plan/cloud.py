"""How machines are rented and reached, beside what each pool asks for; a pure value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.keywords import check

# fmt: off
REGIONS = (
    "af-south-1", "ap-east-1", "ap-east-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-south-2",
    "ap-southeast-1", "ap-southeast-2", "ap-southeast-3", "ap-southeast-4", "ap-southeast-5", "ap-southeast-6", "ap-southeast-7",
    "ca-central-1", "ca-west-1", "eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2",
    "eu-west-3", "il-central-1", "me-central-1", "me-south-1", "mx-central-1", "sa-east-1", "us-east-1", "us-east-2", "us-west-1",
    "us-west-2",
)
# fmt: on
"""EC2's regions (2026-11) for completion, which asks nobody; others are taken as well."""
SSM = "ssm"
"""The way in by a session of AWS Systems Manager."""


@dataclass(frozen=True)
class CloudSettings:
    """Settings of EC2 that a user makes once.

    Attributes:
        profile: of the AWS configuration; None for what the environment says.
        subnet: ``subnet-…`` that the machines are in; None for the default one of each zone.
        use_private_ips: connect to private addresses, and give the machines no public ones.
        ssh_port: where their sshd listens. user: whom one logs in as: the image's own user.
        ssh_from: ``"203.0.113.0/24"``: who may connect; None for this machine's address alone.
        image_id: ``ami-…``; None for Ubuntu, with NVIDIA's driver where there are GPUs.
        disk: GB of each machine's disk.
        endpoint_url: another address of AWS's services.
        deadline_factor: of all deadlines and pauses for AWS.
        via: ``"ann@bastion"``, a jump host, or ``"ssm"``, AWS Systems Manager: the way to machines without public addresses.
    """

    profile: str | None = None
    subnet: str | None = None
    use_private_ips: bool = False
    ssh_port: int = 22
    user: str = "ubuntu"
    ssh_from: str | None = None
    image_id: str | None = None
    disk: int = 100
    endpoint_url: str | None = None
    deadline_factor: float = 1.0
    via: str | None = None

    def __post_init__(self) -> None:
        if self.via:
            object.__setattr__(self, "use_private_ips", True)


def settings(values: Mapping[str, Any]) -> CloudSettings:
    """Settings as a dictionary has them. Raises RequestError for names that are none."""
    try:
        check("SkyMagic.aws", values, [one.name for one in fields(CloudSettings)], {})
    except TypeError as wrong:
        raise RequestError(str(wrong)) from None
    return CloudSettings(**values)
