"""How machines are rented and reached, beside what each pool asks for; a pure value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.keywords import check

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
