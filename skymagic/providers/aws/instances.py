"""Descriptions of instances, parsed from EC2's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.providers.aws.tags import tag_values

STARTING_OR_RUNNING = ("pending", "running")


@dataclass(frozen=True)
class Instance:
    """Instance as DescribeInstances reports it.

    Attributes:
        state: EC2's name of its state: ``pending``, ``running``, ``terminated``, ….
        reason_code, reason: EC2's reason for the last change of state; "" without one.
        private_address, public_address: "" if it has none.
        interface: ID of its first network card.
        launched: seconds since 1970.
    """

    id: str
    type: str
    state: str
    reason_code: str = ""
    reason: str = ""
    zone: str = ""
    private_address: str = ""
    public_address: str = ""
    interface: str = ""
    launched: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, described: Any) -> Instance:
        """Return an instance from an entry of DescribeInstances."""
        reason = described.get("StateReason", {})
        launched = described.get("LaunchTime")
        return cls(
            id=described["InstanceId"],
            type=described.get("InstanceType", ""),
            state=described["State"]["Name"],
            reason_code=reason.get("Code", ""),
            reason=reason.get("Message", ""),
            zone=described.get("Placement", {}).get("AvailabilityZone", ""),
            private_address=described.get("PrivateIpAddress", ""),
            public_address=described.get("PublicIpAddress", ""),
            interface=next(
                (
                    card.get("NetworkInterfaceId", "")
                    for card in described.get("NetworkInterfaces", ())
                    if card.get("Attachment", {}).get("DeviceIndex") == 0
                ),
                "",
            ),
            launched=launched.timestamp() if launched is not None else 0.0,
            tags=tag_values(described.get("Tags", ())),
        )

    @property
    def runs(self) -> bool:
        """True if it runs or is starting."""
        return self.state in STARTING_OR_RUNNING

    def tag(self, key: str) -> str:
        """Return the value of a tag, or ""."""
        return self.tags.get(key, "")
