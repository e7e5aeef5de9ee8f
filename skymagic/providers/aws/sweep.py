"""Find rented resources by their tags alone, list them by pool, and release them.

Covers one pool, or all of a user's pools in all regions. Needs no local records and contacts no
machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

from skymagic.errors import CloudError, PoolError
from skymagic.plan.requests import CloudSettings
from skymagic.plan.units import rough_duration
from skymagic.providers.aws import boot, catalogue, ledger, tags
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients
from skymagic.providers.aws.instances import Instance
from skymagic.providers.aws.tags import Filter
from skymagic.providers.provider import RemotePool, RemotePools
from skymagic.wire.threads import run_all

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
# from the terminate call to "terminated": minutes for machines with many GPUs
TERMINATE_SECONDS = 900.0
SETTLE_SECONDS = 60.0
"""Seconds to search for machines of a launch whose answer was lost.

EC2's listings lag by seconds.
"""
ALIVE = ("pending", "running", "shutting-down", "stopping", "stopped")
REGION_THREADS = 8

Filters = Sequence[Filter]
T = TypeVar("T")


@dataclass(frozen=True)
class RegionInventory:
    """Inventory of a region: resource IDs, and instances grouped by pool."""

    region: str
    instances: dict[str, str] = field(default_factory=dict)
    """Job ID by instance ID, for instances that are not terminated."""
    groups: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    """Allocation IDs of Elastic IPs."""
    placements: tuple[str, ...] = ()
    """Names of placement groups."""

    def __bool__(self) -> bool:
        return bool(self.instances or self.groups or self.addresses or self.placements)


def instances(
    clients: AwsClients, region: str, filters: Filters, states: Sequence[str] = ALIVE
) -> list[Instance]:
    """Return the instances with these tags, except terminated ones. Raises CloudError."""
    query = tags.parameters([*filters, Filter("instance-state-name", tuple(states))])
    reservations = clients.pages("ec2", region, "DescribeInstances", "Reservations", Filters=query)
    return [
        Instance.parse(described)
        for reservation in reservations
        for described in reservation["Instances"]
    ]


def inventory(clients: AwsClients, region: str, filters: Filters) -> RegionInventory:
    """Return all resources with these tags. Raises CloudError."""
    running = instances(clients, region, filters)
    query = tags.parameters(filters)
    groups = clients.pages("ec2", region, "DescribeSecurityGroups", "SecurityGroups", Filters=query)
    addresses = clients.call("ec2", region, "DescribeAddresses", Filters=query)["Addresses"]
    return RegionInventory(
        region,
        {instance.id: instance.tag(tags.JOB) for instance in running},
        tuple(group["GroupId"] for group in groups),
        tuple(address["AllocationId"] for address in addresses),
        _placements(clients, region, filters),
    )


def _placements(clients: AwsClients, region: str, filters: Filters) -> tuple[str, ...]:
    """Return the names of placement groups.

    Empty if they may not be listed, since then none can be created either.
    """
    try:
        groups = clients.call(
            "ec2", region, "DescribePlacementGroups", Filters=tags.parameters(filters)
        )["PlacementGroups"]
    except CloudError as problem:
        if problem.kind == "permission":
            return ()
        raise
    return tuple(group["GroupName"] for group in groups if group.get("State") != "deleted")


class Release:
    """Releases the resources with certain tags in a region.

    Continues after failures, and reports what remains.

    Args:
        known: instances that exist although EC2 may not list them yet.
        uncertain: True if a launch may have started more machines than are known; then they are
            searched for a while.
    """

    def __init__(
        self,
        clients: AwsClients,
        region: str,
        filters: Filters,
        instances: Collection[str] = (),
        uncertain: bool = False,
    ) -> None:
        self.clients, self.region, self.filters = clients, region, filters
        self.known, self.uncertain = set(instances), uncertain
        self.problems: list[str] = []
        self._asked: set[str] = set()  # instances whose termination EC2 has accepted
        self._refused: set[str] = set()

    def run(self) -> list[str]:
        """Release everything and wait until EC2 reports "terminated".

        Returns descriptions of what could not be released, with reasons.
        """
        started, factor = time.monotonic(), self.clients.deadline_factor
        settled, end = started + SETTLE_SECONDS * factor, started + TERMINATE_SECONDS * factor
        while (remaining := self._alive()) is not None:
            self.terminate({*remaining, *self.known})
            remaining -= self._refused
            now = time.monotonic()
            # a known instance that EC2 does not list is too new, or ended long ago
            unseen = self.uncertain or self.known - self._asked - self._refused
            if not remaining and not (unseen and now < settled):
                break
            if now >= end:
                self.problems += [
                    f"instance {instance_id} in {self.region}: not terminated yet"
                    for instance_id in sorted(remaining)
                ]
                break
            time.sleep(POLL_SECONDS * factor)
        else:
            self.terminate(self.known)
        self._rest()
        return self.problems

    def terminate(self, ids: Collection[str]) -> None:
        """Ask EC2 to end these instances one by one.

        A call that names one unknown instance would not end the others either.
        """
        for instance_id in sorted(set(ids) - self._asked - self._refused):
            try:
                self.clients.call(
                    "ec2", self.region, "TerminateInstances", InstanceIds=[instance_id]
                )
                self._asked.add(instance_id)
                logger.info("instance is ended: region=%s id=%s", self.region, instance_id)
            except CloudError as problem:
                # right after a launch, parts of EC2 do not know the instance yet
                if problem.kind != "missing":
                    logger.warning(
                        "instance not ended: region=%s id=%s kind=%s",
                        self.region,
                        instance_id,
                        problem.kind,
                    )
                    self._refused.add(instance_id)
                    self.problems.append(
                        f"instance {instance_id} in {self.region}: {problem.reason}"
                    )

    def _alive(self) -> set[str] | None:
        """Return the listed instances that are not terminated, or None without an answer."""
        try:
            return {instance.id for instance in instances(self.clients, self.region, self.filters)}
        except CloudError as problem:
            unseen = f", {', '.join(sorted(self.known))} among it" if self.known else ""
            self.problems.append(
                f"{self.region}: could not list what is there{unseen}: {problem.reason}"
            )
            return None

    def _rest(self) -> None:
        """Release the resources that the machines used."""
        try:
            leftovers = inventory(self.clients, self.region, self.filters)
        except CloudError as problem:
            self.problems.append(f"{self.region}: could not list what is there: {problem.reason}")
            return
        self._each(
            "address", leftovers.addresses, partial(self._delete, "ReleaseAddress", "AllocationId")
        )
        self._each(
            "security group",
            leftovers.groups,
            partial(self._delete, "DeleteSecurityGroup", "GroupId"),
        )
        self._each(
            "placement group",
            leftovers.placements,
            partial(self._delete, "DeletePlacementGroup", "GroupName"),
        )

    def _each(self, what: str, ids: Iterable[str], release: Callable[[str], object]) -> None:
        for resource_id in sorted(ids):
            try:
                release(resource_id)
            except CloudError as problem:
                if problem.kind != "missing":
                    self.problems.append(f"{what} {resource_id} in {self.region}: {problem.reason}")

    def _delete(self, operation: str, parameter: str, named: str) -> None:
        self.clients.retry_until_settled(
            lambda: self.clients.call("ec2", self.region, operation, **{parameter: named}),
            # if machines could not be ended, there is no point in waiting for their network
            0.0 if self.problems else SETTLE_SECONDS,
            # the network cards of a terminated machine disappear a little later
            lambda problem: problem.kind == "in_use",
        )


def owner_of(clients: AwsClients) -> str:
    """Return the owner that these credentials represent. Raises CloudError."""
    answer = clients.call("sts", clients.region or DEFAULT_REGION, "GetCallerIdentity")
    return tags.owner(answer["Arn"])


def find_everything(clients: AwsClients) -> tuple[list[RegionInventory], list[str]]:
    """Return the caller's rented resources in all regions, and why some regions did not answer.

    Raises CloudError if no region answers.
    """
    own_tags = tags.filters(owner=owner_of(clients))
    inventories, unseen = in_regions(
        catalogue.used_regions(clients), lambda name: inventory(clients, name, own_tags)
    )
    return [region_inventory for region_inventory in inventories.values() if region_inventory], [
        f"{name}: {why}" for name, why in unseen.items()
    ]


def in_regions(
    names: Sequence[str], ask: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Query regions, several at once.

    Returns:
        The answers of `ask` by region, and the reasons of failures by region.
    """
    answers: dict[str, T] = {}
    unseen: dict[str, str] = {}
    # an account has about 17 regions; querying all at once would be throttled
    for begin in range(0, len(names), REGION_THREADS):
        some = names[begin : begin + REGION_THREADS]
        for name, outcome in zip(some, run_all([partial(ask, name) for name in some]), strict=True):
            if isinstance(outcome, BaseException):
                unseen[name] = str(outcome)
            else:
                answers[name] = outcome
    return answers, unseen


def release_job(clients: AwsClients, job: str, names: Sequence[str]) -> list[str]:
    """Release one pool in these regions, and delete its keys.

    Returns what could not be released.
    """
    problems = _run_releases([Release(clients, name, tags.filters(job=job)) for name in names])
    if not problems:
        ledger.end(job, exact=False)
        boot.remove_keys(job)
    return problems


def release_everything(clients: AwsClients, say: Callable[[str], None]) -> list[str]:
    """Release everything that the caller has rented, in all regions and from any machine.

    Returns what could not be released. Raises CloudError.
    """
    own_tags = tags.filters(owner=owner_of(clients))
    inventories, problems = find_everything(clients)
    for region_inventory in inventories:
        jobs = ", ".join(sorted(set(region_inventory.instances.values())))
        say(
            f"{region_inventory.region}: {len(region_inventory.instances)} instances"
            f"{f' of {jobs}' if jobs else ''} …"
        )
    problems += _run_releases(
        [Release(clients, region_inventory.region, own_tags) for region_inventory in inventories]
    )
    if not problems:
        for job in {
            job for region_inventory in inventories for job in region_inventory.instances.values()
        } - {""}:
            ledger.end(job)
            boot.remove_keys(job)
    return problems


def _run_releases(releases: Sequence[Release]) -> list[str]:
    """Run releases in parallel and return what could not be released."""
    problems: list[str] = []
    for release, outcome in zip(
        releases, run_all([release.run for release in releases]), strict=True
    ):
        problems += (
            [f"{release.region}: {outcome}"] if isinstance(outcome, BaseException) else outcome
        )
    return problems


LISTED_STATES = [state for state in ALIVE if state != "shutting-down"]
"""States of instances that are listed: one that is shutting down was ended and costs nothing."""


@dataclass(frozen=True)
class RentedMachine:
    """A rented instance.

    Attributes:
        state: EC2's state: ``pending``, ``running``, ``stopping``, ``stopped``.
        launched: time of its last start, in seconds since 1970.
    """

    columns: ClassVar[tuple[str, ...]] = ("machine", "type", "GPUs", "zone", "state", "for")
    id: str
    type: str
    zone: str
    state: str
    launched: float

    @classmethod
    def of(cls, instance: Instance) -> RentedMachine:
        """Return the machine of EC2's description of an instance."""
        return cls(instance.id, instance.type, instance.zone, instance.state, instance.launched)

    @property
    def gpus(self) -> str:
        """GPUs of the machine, as in "8 × A100".

        "-" without GPUs, and "" if the type is too new for the built-in list.
        """
        machine_type = catalogue.TYPES.get(self.type)
        return (
            ""
            if machine_type is None
            else f"{machine_type.gpus} × {machine_type.gpu}"
            if machine_type.gpu
            else "-"
        )

    def row(self) -> tuple[object, ...]:
        """Return the machine as a row of a table for users."""
        age = rough_duration(time.time() - self.launched)
        return self.id, self.type, self.gpus, self.zone, self.state, age

    def plain(self) -> dict[str, object]:
        """Return the machine as plain values for programs."""
        return dict(vars(self))


@dataclass(frozen=True)
class RentedPools:
    """The pools that the caller rented, from any machine, found by their tags.

    Attributes:
        regions: regions to search; all that the account uses if empty.
    """

    settings: CloudSettings
    regions: tuple[str, ...] = ()

    def pools(self) -> RemotePools:
        """Find the pools.

        Raises:
            CloudError: the caller's identity or regions cannot be determined.
        """
        clients = AwsClients.of(self.settings)
        own_tags = tags.filters(owner=owner_of(clients))
        ask = partial(instances, clients, filters=own_tags, states=LISTED_STATES)
        answers, unreached = in_regions(self._regions(clients), ask)
        instances_by_job: dict[str, list[Instance]] = {}
        regions_by_job: dict[str, dict[str, None]] = {}
        for region, listed in answers.items():
            for instance in listed:
                job = instance.tag(tags.JOB)
                instances_by_job.setdefault(job, []).append(instance)
                regions_by_job.setdefault(job, {})[region] = None
        pools = [
            _pool(job, ", ".join(regions_by_job[job]), listed)
            for job, listed in instances_by_job.items()
        ]
        pools.sort(key=lambda pool: pool.started or 0.0)
        return RemotePools(tuple(pools), unreached=unreached)

    def end(self, pool: RemotePool) -> str:
        """Release a pool with all resources created for it.

        Raises:
            PoolError: something remains.
            CloudError: the account's regions cannot be determined.
        """
        clients = AwsClients.of(self.settings)
        if problems := release_job(clients, pool.job_id, self._regions(clients)):
            listed = "\n  ".join(problems)
            raise PoolError(
                f"not everything in pool {pool.name!r} ({pool.job_id}) could be stopped:\n"
                f"  {listed}",
                code="not-released",
                names=[pool.job_id],
            )
        return ""

    def _regions(self, clients: AwsClients) -> Sequence[str]:
        return self.regions or catalogue.used_regions(clients)


def _pool(job: str, regions: str, listed: Sequence[Instance]) -> RemotePool:
    name, client, ends = (listed[0].tag(key) for key in (tags.POOL, tags.CLIENT, tags.ENDS))
    machines = tuple(map(RentedMachine.of, listed))
    return RemotePool(
        name,
        job,
        regions,
        client=client,
        started=min(machine.launched for machine in machines),
        ends=tags.seconds(ends),
        nodes=machines,
    )
