"""What skymagic has rented, found by its tags alone, listed by pool, and given back: of one pool, or of one user in all regions.

Nothing that is kept here is needed, and no machine is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from skymagic.errors import CloudError, RequestError
from skymagic.providers.aws import boot, catalogue, ledger, tags
from skymagic.providers.aws.clients import DEFAULT_REGION, AwsClients
from skymagic.wire.threads import run_all

POLL_SECONDS = 2.0
TERMINATE_SECONDS = 900.0  # how long EC2 may take from a terminate to "terminated": minutes for machines with many GPUs
SETTLE_SECONDS = 60.0
"""How long one looks for what a launch may have made whose answer was lost: what EC2 tells is late by seconds."""
ALIVE = ("pending", "running", "shutting-down", "stopping", "stopped")
REGION_THREADS = 8

Filters = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class RegionInventory:
    """What is there in a region: ids, with each instance's pool."""

    region: str
    instances: dict[str, str] = field(default_factory=dict)
    """Id → job; those that are not terminated."""
    groups: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    """Allocation ids of Elastic IPs."""
    placements: tuple[str, ...] = ()
    """Names of placement groups."""

    def __bool__(self) -> bool:
        return bool(self.instances or self.groups or self.addresses or self.placements)


def instances(
    clients: AwsClients, region: str, filters: Filters, states: Sequence[str] = ALIVE
) -> list[dict[str, Any]]:
    """The instances with these tags, as EC2 tells of them; those that are terminated are left out. Raises CloudError."""
    wanted = [*filters, {"Name": "instance-state-name", "Values": list(states)}]
    reservations = clients.pages("ec2", region, "DescribeInstances", "Reservations", Filters=wanted)
    return [each for one in reservations for each in one["Instances"]]


def inventory(clients: AwsClients, region: str, filters: Filters) -> RegionInventory:
    """What there is with these tags. Raises CloudError."""
    found = instances(clients, region, filters)
    groups = clients.pages(
        "ec2", region, "DescribeSecurityGroups", "SecurityGroups", Filters=list(filters)
    )
    addresses = clients.call("ec2", region, "DescribeAddresses", Filters=list(filters))["Addresses"]
    return RegionInventory(
        region,
        {each["InstanceId"]: tags.tag(each, tags.JOB) for each in found},
        tuple(each["GroupId"] for each in groups),
        tuple(each["AllocationId"] for each in addresses),
        _placements(clients, region, filters),
    )


def _placements(clients: AwsClients, region: str, filters: Filters) -> tuple[str, ...]:
    """Names of placement groups; none where they may not be seen, for then none can be made either."""
    try:
        found = clients.call("ec2", region, "DescribePlacementGroups", Filters=list(filters))[
            "PlacementGroups"
        ]
    except CloudError as problem:
        if problem.kind == "permission":
            return ()
        raise
    return tuple(each["GroupName"] for each in found if each.get("State") != "deleted")


class Release:
    """Gives back what has certain tags in a region; whatever fails, the rest is done, and what is left is named.

    Args:
        known: instances that are there although EC2 may not show them yet.
        uncertain: whether a launch may have made more than is known: then it is looked for a while.
    """

    def __init__(
        self,
        clients: AwsClients,
        region: str,
        filters: Filters,
        known: Collection[str] = (),
        uncertain: bool = False,
    ) -> None:
        self.clients, self.region, self.filters = clients, region, filters
        self.known, self.uncertain = set(known), uncertain
        self.problems: list[str] = []
        self._asked: set[str] = set()  # whose end EC2 has agreed to
        self._refused: set[str] = set()

    def run(self) -> list[str]:
        """Do it, and wait until EC2 says "terminated"; what could not be given back, and why."""
        begun, factor = time.monotonic(), self.clients.deadline_factor
        settled, end = begun + SETTLE_SECONDS * factor, begun + TERMINATE_SECONDS * factor
        while (left := self._alive()) is not None:
            self.terminate({*left, *self.known})
            left -= self._refused
            now = time.monotonic()
            # one that is known and that nobody shows is too new, or was gone long ago
            unseen = self.uncertain or self.known - self._asked - self._refused
            if not left and not (unseen and now < settled):
                break
            if now >= end:
                self.problems += [
                    f"instance {each} in {self.region}: not terminated yet" for each in sorted(left)
                ]
                break
            time.sleep(POLL_SECONDS * factor)
        else:
            self.terminate(self.known)
        self._rest()
        return self.problems

    def terminate(self, ids: Collection[str]) -> None:
        """Ask EC2 to end these instances, one by one: a call that names one unknown to it does nothing to the others."""
        for each in sorted(set(ids) - self._asked - self._refused):
            try:
                self.clients.call("ec2", self.region, "TerminateInstances", InstanceIds=[each])
                self._asked.add(each)
            except CloudError as problem:
                if (
                    problem.kind != "missing"
                ):  # right after its launch not all of EC2 knows an instance
                    self._refused.add(each)
                    self.problems.append(f"instance {each} in {self.region}: {problem.reason}")

    def _alive(self) -> set[str] | None:
        """What EC2 shows and does not call terminated; None where it does not say."""
        try:
            return {
                each["InstanceId"] for each in instances(self.clients, self.region, self.filters)
            }
        except CloudError as problem:
            unseen = f", {', '.join(sorted(self.known))} among it" if self.known else ""
            self.problems.append(
                f"{self.region}: could not list what is there{unseen}: {problem.reason}"
            )
            return None

    def _rest(self) -> None:
        """What the machines have used."""
        try:
            found = inventory(self.clients, self.region, self.filters)
        except CloudError as problem:
            self.problems.append(f"{self.region}: could not list what is there: {problem.reason}")
            return
        self._each(
            "address", found.addresses, partial(self._delete, "ReleaseAddress", "AllocationId")
        )
        self._each(
            "security group", found.groups, partial(self._delete, "DeleteSecurityGroup", "GroupId")
        )
        self._each(
            "placement group",
            found.placements,
            partial(self._delete, "DeletePlacementGroup", "GroupName"),
        )

    def _each(self, what: str, ids: Iterable[str], release: Callable[[str], object]) -> None:
        for each in sorted(ids):
            try:
                release(each)
            except CloudError as problem:
                if problem.kind != "missing":
                    self.problems.append(f"{what} {each} in {self.region}: {problem.reason}")

    def _delete(self, operation: str, parameter: str, named: str) -> None:
        self.clients.until_settled(
            lambda: self.clients.call("ec2", self.region, operation, **{parameter: named}),
            # with machines in it that could not be ended there is nothing to wait for
            0.0 if self.problems else SETTLE_SECONDS,
            lambda problem: (
                problem.kind == "in_use"
            ),  # the network cards of a terminated machine go a little later
        )


def owner_of(clients: AwsClients) -> str:
    """The owner that these credentials stand for. Raises CloudError."""
    answer = clients.call("sts", clients.region or DEFAULT_REGION, "GetCallerIdentity")
    return tags.owner(answer["Arn"])


def everything(clients: AwsClients) -> tuple[list[RegionInventory], list[str]]:
    """(What the caller has rented, in all regions; why some could not be asked.) Raises CloudError where none can be asked."""
    mine = tags.filters(owner=owner_of(clients))
    found, unseen = in_regions(
        catalogue.used_regions(clients), lambda name: inventory(clients, name, mine)
    )
    return [each for each in found.values() if each], [
        f"{name}: {why}" for name, why in unseen.items()
    ]


def in_regions(
    names: Sequence[str], ask: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """(Region → what `ask` gives there, several at once; region → why it could not be asked)."""
    found: dict[str, T] = {}
    unseen: dict[str, str] = {}
    # an account has some 17 regions: all at once would be throttled
    for begin in range(0, len(names), REGION_THREADS):
        some = names[begin : begin + REGION_THREADS]
        for name, outcome in zip(some, run_all([partial(ask, name) for name in some]), strict=True):
            if isinstance(outcome, BaseException):
                unseen[name] = str(outcome)
            else:
                found[name] = outcome
    return found, unseen


def release_job(clients: AwsClients, job: str, names: Sequence[str]) -> list[str]:
    """Give back all of one pool in these regions, and its keys; what could not be."""
    problems = _released([Release(clients, name, tags.filters(job=job)) for name in names])
    if not problems:
        ledger.end(job, exact=False)
        boot.remove_keys(job)
    return problems


def release_everything(clients: AwsClients, say: Callable[[str], None]) -> list[str]:
    """Give back all that the caller has rented, in all regions, whoever started it; what could not be. Raises CloudError."""
    mine = tags.filters(owner=owner_of(clients))
    found, problems = everything(clients)
    for each in found:
        jobs = ", ".join(sorted(set(each.instances.values())))
        say(f"{each.region}: {len(each.instances)} instances{f' of {jobs}' if jobs else ''} …")
    problems += _released([Release(clients, each.region, mine) for each in found])
    if not problems:
        for job in {job for each in found for job in each.instances.values()} - {""}:
            ledger.end(job)
            boot.remove_keys(job)
    return problems


def _released(releases: Sequence[Release]) -> list[str]:
    """Carry them out side by side; what could not be given back."""
    problems: list[str] = []
    for release, outcome in zip(releases, run_all([one.run for one in releases]), strict=True):
        problems += (
            [f"{release.region}: {outcome}"] if isinstance(outcome, BaseException) else outcome
        )
    return problems


LISTED_STATES = [state for state in ALIVE if state != "shutting-down"]
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
        """GPUs of the machine, as in "8 × A100"; "-" without, and "" where the type is too new for the built-in list."""
        known = catalogue.TYPES.get(self.type)
        return "" if known is None else f"{known.gpus} × {known.gpu}" if known.gpu else "-"


@dataclass(frozen=True)
class TaggedPool:
    """A pool's machines in one region.

    Attributes:
        client: who has rented it, and where: ``ann@laptop``.
        ends: when its machines end themselves at the latest (`tags.ENDS`).
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


def tagged_pools(clients: AwsClients, name: str | None = None) -> Tagged:
    """The pools that the caller has rented, from whichever machine, in all regions: all of them, or those of a name or job id. Raises CloudError."""
    mine = tags.filters(owner=owner_of(clients))
    ask = partial(instances, clients, filters=mine, states=LISTED_STATES)
    found, unreached = in_regions(catalogue.used_regions(clients), ask)
    jobs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for region, listed in found.items():
        for one in listed:
            jobs.setdefault((region, tags.tag(one, tags.JOB)), []).append(one)
    pools = [_pool(region, job, listed) for (region, job), listed in jobs.items()]
    pools.sort(key=lambda one: min(each.launched for each in one.machines))
    return Tagged(tuple(one for one in pools if name in (None, one.name, one.job_id)), unreached)


def _pool(region: str, job: str, listed: Sequence[dict[str, Any]]) -> TaggedPool:
    name, client, ends = (tags.tag(listed[0], key) for key in (tags.POOL, tags.CLIENT, tags.ENDS))
    return TaggedPool(name, job, client, region, ends, tuple(map(_machine, listed)))


def _machine(one: dict[str, Any]) -> TaggedMachine:
    zone = one.get("Placement", {}).get("AvailabilityZone", "")
    return TaggedMachine(
        one["InstanceId"],
        one["InstanceType"],
        zone,
        one["State"]["Name"],
        one["LaunchTime"].timestamp(),
    )


def chosen_pool(found: Tagged, name: str | None) -> TaggedPool:
    """The pool that is to end: of this name or job id, or the only one.

    Raises:
        RequestError: it is not clear which one is meant, or it is nowhere that could be asked.
        CloudError: it was not found, and not all regions could be asked.
    """
    pools = {one.job_id: one for one in found.pools if name in (None, one.name, one.job_id)}
    if len(pools) == 1:
        return next(iter(pools.values()))
    if pools:
        listed = ", ".join(f"{one.job_id} ({one.client})" for one in pools.values())
        raise RequestError(
            f"you have {len(pools)} pools on EC2: name one of them, or use --all: {listed}"
        )
    missing = f"you have no pool {f'{name!r} ' if name else ''}on EC2"
    if found.unreached:
        unreached = "; ".join(f"{region}: {reason}" for region, reason in found.unreached.items())
        raise CloudError("unseen", "", f"{missing} where it could be asked: {unreached}")
    there = ", ".join(one.name for one in found.pools)
    raise RequestError(missing + (f"; available: {there}" if there else ""))
