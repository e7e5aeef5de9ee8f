"""The tags of all that is rented, by which it is found again without anything kept here; pure."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

POOL, JOB, OWNER, CLIENT, ENDS = (
    f"skymagic:{name}" for name in ("pool", "job", "owner", "client", "ends")
)


@dataclass(frozen=True)
class Label:
    """Whose something is, and how long it may be there.

    Attributes:
        owner: from `owner`. client: who started it, and where: ``ann@laptop``.
        ends: seconds since 1970 when its machines end themselves at the latest.
    """

    pool: str
    job: str
    owner: str
    client: str
    ends: float

    def tags(self) -> list[dict[str, str]]:
        """As EC2 takes them; values of 256 letters at most."""
        values = {
            "Name": f"skymagic {self.pool}", POOL: self.pool, JOB: self.job, OWNER: self.owner, CLIENT: self.client,
            ENDS: moment(self.ends),
        }  # fmt: skip
        return [{"Key": key, "Value": value[:256]} for key, value in values.items()]

    def specifications(self, *kinds: str) -> list[dict[str, Any]]:
        """``TagSpecifications`` of a call that makes things of these kinds: they are tagged from their first moment."""
        return [{"ResourceType": kind, "Tags": self.tags()} for kind in kinds]


def moment(seconds: float) -> str:
    """Seconds since 1970 as tags say them: ``2026-11-23T08:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def filters(**values: str) -> list[dict[str, Any]]:
    """What has these tags, as EC2's calls take it: ``filters(owner=…, pool="train")``."""
    return [
        {"Name": f"tag:skymagic:{name}", "Values": [value[:256]]} for name, value in values.items()
    ]


def tag(resource: dict[str, Any], key: str) -> str:
    """The value of a tag in what EC2 says of a resource; "" without it."""
    return next((str(one["Value"]) for one in resource.get("Tags", ()) if one["Key"] == key), "")


def owner(arn: str) -> str:
    """The user behind the ARN of a caller, the same one tomorrow: sessions of a role that the SDK has named are one owner."""
    role = re.fullmatch(
        r"(arn:[\w-]+:sts::\d+:assumed-role/[^/]+)/(botocore-session-\d+|i-[0-9a-f]+)", arn
    )
    return role[1] if role else arn
