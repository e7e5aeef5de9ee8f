"""Pools that are rented, as their tags tell of them: nothing that is kept here is needed, and no machine is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import CloudError, RequestError
from skymagic.providers.aws import estimates, regions, sweep, tags
from skymagic.providers.aws.clients import Clients

LISTED_STATES = [state for state in sweep.ALIVE if state != "shutting-down"]
"""What is shutting down has been ended already, and costs nothing any more."""


@dataclass(frozen=True)
class TaggedMachine:
    """An instance.

    Attributes:
        state: EC2's: ``pending``, ``running``, ``stopping``, ``stopped``.
        launched: seconds since 1970 of its last start.
    """

    id: str
    type: str
    zone: str
    state: str
    launched: float

    @property
    def gpus(self) -> str:
        """Its GPUs, as in "8 × A100"; "-" without, and "" where the type is too new for the built-in list."""
        known = estimates.TYPES.get(self.type)
        return "" if known is None else f"{known.gpus} × {known.gpu}" if known.gpu else "-"


@dataclass(frozen=True)
class TaggedPool:
    """A pool's machines in one region.

    Attributes:
        client: who has rented it, and where: ``ann@laptop``.
        ends: when its machines end themselves at the latest, or who has stopped them (`tags.ENDS`).
    """

    name: str
    job_id: str
    client: str
    region: str
    ends: str
    machines: tuple[TaggedMachine, ...]


@dataclass(frozen=True)
class Tagged:
    """What EC2 has said.

    Attributes:
        pools: by the time of their start, the oldest first.
        unreached: region → why it could not be asked.
    """

    pools: tuple[TaggedPool, ...]
    unreached: dict[str, str]


def find(clients: Clients) -> Tagged:
    """The pools that the caller has rented, from whichever machine, in all regions. Raises CloudError where none can be asked."""
    mine = tags.owner_filter(sweep.caller(clients))
    wanted = [*mine, {"Name": "instance-state-name", "Values": LISTED_STATES}]

    def instances(region: str) -> list[dict[str, Any]]:
        reservations = clients.pages("ec2", region, "DescribeInstances", "Reservations", Filters=wanted)
        return [each for one in reservations for each in one["Instances"]]

    found, unreached = sweep.in_regions(regions.used(clients), instances)
    pools = [pool for region, listed in found.items() for pool in _pools(region, listed)]
    return Tagged(tuple(sorted(pools, key=lambda one: min(each.launched for each in one.machines))), unreached)


def _pools(region: str, instances: Sequence[dict[str, Any]]) -> list[TaggedPool]:
    jobs: dict[str, list[dict[str, Any]]] = {}
    for one in instances:
        jobs.setdefault(tags.tag(one, tags.JOB), []).append(one)
    return [_pool(region, job, listed) for job, listed in jobs.items()]


def _pool(region: str, job: str, listed: Sequence[dict[str, Any]]) -> TaggedPool:
    name, client, ends = (tags.tag(listed[0], key) for key in (tags.POOL, tags.CLIENT, tags.ENDS))
    return TaggedPool(name, job, client, region, ends, tuple(map(_machine, listed)))


def _machine(one: dict[str, Any]) -> TaggedMachine:
    zone = one.get("Placement", {}).get("AvailabilityZone", "")
    return TaggedMachine(
        one["InstanceId"], one["InstanceType"], zone, one["State"]["Name"], one["LaunchTime"].timestamp()
    )


def chosen(found: Tagged, name: str | None) -> str:
    """The job id of the pool that is to end: of this name or job id, or the only one.

    Raises:
        RequestError: it is not clear which one is meant, or it is nowhere that could be asked.
        CloudError: it was not found, and not all regions could be asked.
    """
    pools = [one for one in found.pools if name in (None, one.name, one.job_id)]
    jobs = sorted({one.job_id for one in pools})
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        listed = ", ".join(f"{one.job_id} ({one.client})" for one in pools)
        raise RequestError(f"{len(jobs)} pools of yours are rented: say which one, or --all: {listed}")
    missing = f"no pool {f'{name!r} ' if name else ''}of yours is rented from EC2"
    if found.unreached:
        raise CloudError("unseen", "", f"{missing} where it could be asked: {unreached_words(found)}")
    there = ", ".join(one.name for one in found.pools)
    raise RequestError(missing + (f"; there are {there}" if there else ""))


def unreached_words(found: Tagged) -> str:
    """Which regions could not be asked, and why; "" where all were."""
    return "; ".join(f"{region}: {reason}" for region, reason in found.unreached.items())
