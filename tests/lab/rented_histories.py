"""Random histories of acquiring and giving back at EC2: faults at each API call, interrupts, deaths of the client.

A history is a list of what happens at the first call, the second, and so on, and of what the client suffers. However it goes, what
was made is given back, or it is tagged and ends itself, and a process that knows nothing of it finds and ends it.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import boot, sweep, tags
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, Answer, Call, CarryOut, Effect, error

REGIONS = ("us-east-1", "us-west-2")
OFFERS = [
    MachineOffer(REGIONS[0], "us-east-1a", "m5.large"),
    MachineOffer(REGIONS[0], "us-east-1b", "m5.large", spot=True),
    MachineOffer(REGIONS[1], "us-west-2a", "p4d.24xlarge", gpu="A100", gpus=8, cards=4),
]
SETTINGS = CloudSettings(ssh_from="203.0.113.7/32", deadline_factor=0.0005)
JOBS = itertools.count()


def _only(action: str, effect: Effect) -> Effect:
    return lambda call, carry_out: effect(call, carry_out) if call.action == action else carry_out()


def _nothing(call: Call, carry_out: CarryOut) -> Answer:
    return carry_out()


EFFECTS: dict[str, Effect] = {
    "": _nothing,
    "lost": lab.lost,
    "unreached": lab.unreached,
    "internal": error("InternalError", status=500),
    "throttled": error("RequestLimitExceeded", status=503),
    "denied": error("UnauthorizedOperation", status=403),
    "expired": error("ExpiredToken", status=400),
    "no capacity": _only("RunInstances", error("InsufficientInstanceCapacity")),
    "no quota": _only("RunInstances", error("VcpuLimitExceeded")),
    "not shown": _only("DescribeInstances", lab.empty),
    "unknown": _only("TerminateInstances", error("InvalidInstanceID.NotFound")),
    "in use": _only("DeleteSecurityGroup", error("DependencyViolation")),
    "still in it": _only("DeletePlacementGroup", error("InvalidPlacementGroup.InUse")),
    "not near": _only(
        "RunInstances", error("InsufficientInstanceCapacity", "not into Placement Group 'x'")
    ),
    "ended": _only("RunInstances", lab.state("terminated", "Server.InsufficientInstanceCapacity")),
    "pending": _only("RunInstances", lab.state("pending")),
}


@dataclass(frozen=True)
class History:
    """What happens.

    Attributes:
        effects: by the number of the call; after them all goes well.
        offers: which of them are tried. count: machines.
        interrupted: the call of the client's at which the user interrupts, while acquiring.
        dies: the call of the client's at which it is killed; nothing of it runs any more. after: once the call was carried out.
    """

    effects: Sequence[str]
    offers: int
    count: int
    interrupted: int | None = None
    dies: int | None = None
    after: bool = False


def histories() -> st.SearchStrategy[History]:
    """Random ones; most calls go well, and a run of the same fault is likely."""
    runs = st.tuples(st.sampled_from(["", "", *EFFECTS]), st.integers(1, 6)).map(
        lambda run: [run[0]] * run[1]
    )
    effects = st.lists(runs, max_size=12).map(lambda found: [each for run in found for each in run])
    call = st.none() | st.integers(1, 45)
    return st.builds(
        History, effects=effects, offers=st.integers(1, len(OFFERS)), count=st.integers(1, 3), interrupted=call, dies=call,
        after=st.booleans(),
    )  # fmt: skip


class Killed(BaseException):
    """The client is gone."""


class Mortal(AwsClients):
    """Clients that suffer what a history says."""

    def __init__(self, url: str, history: History) -> None:
        super().__init__(endpoint_url=url, deadline_factor=SETTINGS.deadline_factor)
        self.history, self.made, self.acquiring = history, 0, True

    def _once(self, *arguments: Any) -> dict[str, Any]:
        self.made += 1
        history = self.history
        dies = history.dies is not None and self.made >= history.dies
        stops = self.acquiring and self.made == history.interrupted
        if (dies and not (history.after and self.made == history.dies)) or (
            stops and not history.after
        ):
            raise Killed if dies else KeyboardInterrupt
        answer = super()._call_once(*arguments)
        if dies or stops:
            raise Killed if dies else KeyboardInterrupt
        return answer


def live(cloud: EC2, history: History, shared: AwsClients) -> None:
    """Have a history happen, and look at what it has left.

    Args:
        shared: whose boto3 clients are used, for they take long to make.
    """
    cloud._rules.clear()
    cloud.calls.clear()
    numbers = itertools.count()

    def effect(call: Call, carry_out: CarryOut) -> Answer:
        number = next(numbers)
        name = history.effects[number] if number < len(history.effects) else ""
        return EFFECTS[name](call, carry_out)

    cloud.on("*", effect, times=1 << 30)
    job = f"history-{next(JOBS)}"
    client = Mortal(cloud.url, history)
    client._session, client._clients = shared._session, shared._clients
    life = Life(client, job)
    problem: CloudError | None = None
    try:
        try:
            life.acquire()
        except (CloudError, KeyboardInterrupt):
            pass
        finally:
            client.acquiring = False
        try:
            life.end()
        except CloudError as left:
            problem = left
    except Killed:
        problem = CloudError("killed", "", "")
    there = lab.left(*REGIONS)
    if problem is None:
        assert there == {}, "all was said to be given back"
    elif problem.kind != "killed":
        missing = [
            each
            for each in there.get("instances", ())
            if each not in str(problem) and "cannot be seen" not in str(problem)
        ]
        assert not missing, f"{missing} is left and not named: {problem}"
    bounded()
    found_and_ended(cloud, shared)


class Life:
    """The machines of a pool."""

    def __init__(self, client: Mortal, job: str) -> None:
        self.client, self.history = client, client.history
        owner = "arn:aws:sts::123456789012:user/moto"
        self.label = Label("history", job, owner, "ann@laptop", time.time() + 86400)
        self.user_data = boot.cloud_config(
            boot.make_keys(job), job, "ubuntu", 22, WatchdogBounds(1800, 86400)
        )
        self.lease = Lease(self.client, SETTINGS, self.label, self.user_data, lambda text: None)

    def acquire(self) -> None:
        self.lease.acquire(OFFERS[: self.history.offers], self.history.count)

    def end(self) -> None:
        """As the user has it."""
        self.lease.release()


def bounded() -> None:
    """Each machine that is left can be found, and ends itself."""
    for region in REGIONS:
        for one in lab.instances(region):
            if one.state == "terminated":
                continue
            assert one.state != "stopped"
            named = {each["key"]: each["value"] for each in one.get_tags()}
            assert {tags.JOB, tags.OWNER, tags.ENDS} <= set(named)
            assert one.instance_initiated_shutdown_behavior == "terminate"
            config = json.loads(b64decode(str(one.user_data)).decode().partition("\n")[2])
            assert boot.WATCHDOG_PATH in [each["path"] for each in config["write_files"]]
            assert ["systemctl", "enable", "--now", boot.WATCHDOG_UNIT] in config["runcmd"], (
                "at each boot"
            )
            assert config["bootcmd"][0][0] == "systemd-run"


def found_and_ended(cloud: EC2, shared: AwsClients) -> None:
    """A process that knows nothing ends all of it."""
    cloud._rules.clear()
    patient = copy.copy(shared)
    patient.deadline_factor = 0.01  # a busy machine is no reason to give up
    mine = tags.filters(owner="arn:aws:sts::123456789012:user/moto")
    for region in REGIONS:
        for one in lab.instances(region):
            if one.state == "pending":
                lab.set_state(one, "running")
        problems = (
            sweep.Release(patient, region, mine).run()
            if sweep.inventory(patient, region, mine)
            else []
        )
        assert problems == []
    assert lab.left(*REGIONS) == {}
