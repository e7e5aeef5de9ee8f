"""Machines stopped with their disks, and started again as they were.

::

    running ──StopInstances──▶ stopping ─▶ stopped ──StartInstances──▶ pending ─▶ running      each boot: watchdog and timer anew
                                              └──TerminateInstances──▶ …                       by the user alone

A stopped machine has no watchdog, so that its disk is paid for until somebody ends it: the user is asked with the price. Each boot starts the
watchdog and its timer again (`userdata`: ``systemctl enable``, ``bootcmd``), and their clocks are of that boot, so that all bounds count anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

from skymagic.errors import CloudError
from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws import launch, permission, tags
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.errors import Kind
from skymagic.providers.aws.launch import Instance
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.sweep import SETTLE_SECONDS, TERMINATE_SECONDS

POLL_SECONDS = 2.0
MONTH_HOURS = 730
STOPPED = ("stopped", "stopping")
GONE = ("shutting-down", "terminated")


def mistakes(request: PoolRequest, offer: Offer) -> list[str]:
    """Why machines like these cannot be stopped; empty where they can; pure."""
    found = []
    if offer.spot:
        found.append("--stop: EC2 stops no spot machines that were asked for once; they can only be ended")
    if offer.block:
        found.append("--stop: machines of a capacity block end with the block, and cannot be stopped")
    if request.replace:
        found.append(
            "--stop: with --replace machines may have the rest of their pool's lifetime alone, which a second boot would give them again"
        )
    return found


def lost(offer: Offer) -> str:
    """What a stop loses, in words for a question; pure."""
    disks = ", and so are environments and values, for they lie on the machines' own NVMe disks" if offer.nvme else ""
    return f"what the ranks hold is lost{disks}"


def forbidden(clients: Clients, region: str, ids: Sequence[str]) -> list[str]:
    """Why these machines of a pool cannot be stopped, and started again, now: EC2 is asked, and nothing is done. Raises CloudError."""
    found = launch.describe(clients, region, ids)
    away = [one for one in ids if one not in found or found[one]["State"]["Name"] != "running"]
    if away:
        return [f"--stop: {', '.join(away)} of its {len(ids)} machines do not run any more"]
    if any(one.get("RootDeviceType", "ebs") != "ebs" for one in found.values()):
        return ["--stop: their image has its disk on the machine itself, which a stop would wipe"]
    asked = {"InstanceIds": list(ids)}
    calls = [permission.said(clients, region, operation, asked) for operation in ("StopInstances", "StartInstances")]
    return [f"--stop: {words}" for words in calls if words]


def stop(clients: Clients, region: str, ids: Collection[str], ends: str) -> list[str]:
    """Stop machines, and wait until EC2 says so; those that were ended stay that. What could not be stopped.

    Args:
        ends: what their tags say of their end from now on.
    """
    begun, factor = time.monotonic(), clients.deadline_factor
    settled, end = begun + SETTLE_SECONDS * factor, begun + TERMINATE_SECONDS * factor
    asked: set[str] = set()
    problems: dict[str, str] = {}
    _mark(clients, region, ids, ends)
    while True:
        try:
            states = _states(clients, region, ids)
        except CloudError as problem:
            return [f"{region}: whether {', '.join(sorted(ids))} are stopped cannot be seen: {problem.reason}"]
        for each in sorted(one for one in ids if states.get(one, "") not in (*STOPPED, *GONE) and one not in asked):
            try:
                clients.call("ec2", region, "StopInstances", InstanceIds=[each])
                asked.add(each)
                problems.pop(each, None)
            except CloudError as problem:
                problems[each] = problem.reason
                if problem.kind not in (Kind.IN_USE.name.lower(), Kind.MISSING.name.lower()):
                    asked.add(each)  # one that is about to run is asked again, one that is refused is not
        now = time.monotonic()
        left = {one for one in ids if states.get(one) not in ("stopped", *GONE)} - (problems.keys() & asked)
        if now >= settled:
            left = {one for one in left if one in states}  # gone so long ago that nobody shows them
        if not left or now >= end:
            break
        time.sleep(POLL_SECONDS * factor)
    return [
        f"instance {each} in {region}: {problems.get(each, 'not stopped yet')}"
        for each in sorted(left | problems.keys())
    ]


def start(clients: Clients, region: str, ids: Sequence[str], ends: str) -> list[Instance]:
    """Start machines that are stopped, all of them or none, and wait until they run.

    Args:
        ends: what their tags say of their end from now on.

    Raises:
        CloudError: EC2 does not start them; what it did start is the caller's to stop.
    """
    _mark(clients, region, ids, ends)
    clients.until_settled(
        lambda: clients.call("ec2", region, "StartInstances", InstanceIds=list(ids)),
        TERMINATE_SECONDS,
        lambda problem: problem.code == "IncorrectInstanceState",  # they are still on their way to "stopped"
    )
    return launch.wait_running(clients, region, ids, again=True)


def _states(clients: Clients, region: str, ids: Collection[str]) -> dict[str, str]:
    found: dict[str, dict[str, Any]] = launch.describe(clients, region, sorted(ids))
    return {one: each["State"]["Name"] for one, each in found.items()}


def _mark(clients: Clients, region: str, ids: Collection[str], ends: str) -> None:
    """Have their tags say when they end; what is found by them does not hang on it."""
    with contextlib.suppress(CloudError):
        value = [{"Key": tags.ENDS, "Value": ends[:256]}]
        clients.call("ec2", region, "CreateTags", Resources=sorted(ids), Tags=value)
