"""Acquiring and giving back at EC2: all machines or none, each step said, and nothing left whatever happens on the way."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skymagic.api import pool_listing, stopping
from skymagic.api.stopping import DownRequest
from skymagic.errors import CloudError, PoolError, RequestError
from skymagic.plan.renting import Rental, plan_rented
from skymagic.plan.requests import CloudSettings, PoolRequest
from skymagic.providers.aws import boot, launch, lease, ledger, sweep, tags
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.provider import AWS
from skymagic.providers.aws.rented import RentedAccess
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label, owner
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, REGION, ec2, error, zone
from tests.lab.raising import raises

A, B, WEST = (MachineOffer(region, name, "m5.large", vcpus=2, memory=8.0) for region, name in (
    (REGION, "us-east-1a"), (REGION, "us-east-1b"), ("us-west-2", "us-west-2a"),
))  # fmt: skip
SETTINGS = CloudSettings(ssh_from="203.0.113.7", deadline_factor=0.02)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[EC2, AwsClients]]:
    with ec2() as made:
        yield made, AwsClients(endpoint_url=made.url, deadline_factor=SETTINGS.deadline_factor)


@pytest.fixture
def cloud(server: tuple[EC2, AwsClients], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EC2:
    for name, value in {**lab.environment(), "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    server[0].forget()
    return server[0]


class Case:
    """A lease, and what it has said."""

    def __init__(
        self, clients: AwsClients, job: str = "train-1234", settings: CloudSettings = SETTINGS
    ) -> None:
        self.said: list[str] = []
        self.keys = boot.make_keys(job)
        text = boot.cloud_config(
            self.keys, job, settings.user, settings.ssh_port, WatchdogBounds(1800, 86400)
        )
        label = Label("train", job, sweep.owner_of(clients), "ann@laptop", time.time() + 86400)
        self.lease = Lease(clients, settings, label, text, self.said.append)


@pytest.fixture
def case(cloud: EC2, server: tuple[EC2, AwsClients]) -> Iterator[Case]:
    """Given back at the end, also after a test that has done so; nothing is left then."""
    made = Case(server[1])
    yield made
    made.lease.release()
    assert lab.left(REGION, "us-west-2") == {}


def launched(cloud: EC2) -> list[lab.Call]:
    return [call for call in cloud.calls if call.action == "RunInstances"]


def test_all_machines_in_one_zone_and_safe(cloud: EC2, case: Case) -> None:
    offer, instances = case.lease.acquire([A, B], 3)
    assert offer is A
    there = lab.instances()
    assert [one.id for one in instances] == [one.id for one in there]
    assert {one.placement.zone for one in there} == {"us-east-1a"}
    assert {one.instance_initiated_shutdown_behavior for one in there} == {"terminate"}
    assert {one.metadata_options.http_tokens for one in there} == {"required"}
    tags = {tag["key"]: tag["value"] for tag in there[0].get_tags()}
    assert tags["skymagic:job"] == "train-1234"
    assert tags["skymagic:pool"] == "train"
    assert tags["skymagic:client"] == "ann@laptop"
    assert "skymagic:owner" in tags
    assert "skymagic:ends" in tags
    [call] = launched(cloud)
    assert (call.fields["MinCount"], call.fields["MaxCount"], call.fields["ClientToken"]) == (
        "3",
        "3",
        "train-1234-1",
    )
    case.lease.release()
    assert lab.left() == {}
    assert {one.state for one in there} == {"terminated"}


def test_security_group_allows_ssh_from_caller_and_pool(cloud: EC2, case: Case) -> None:
    case.lease.acquire([A], 1)
    filters = tags.parameters(tags.filters(job="train-1234"))
    [group] = case.lease.clients.call("ec2", REGION, "DescribeSecurityGroups", Filters=filters)[
        "SecurityGroups"
    ]
    within = [group["GroupId"]]

    def rules(direction: str) -> list[tuple[object, ...]]:
        return [
            (
                one["IpProtocol"],
                one.get("FromPort"),
                [each["CidrIp"] for each in one["IpRanges"]],
                [each["GroupId"] for each in one["UserIdGroupPairs"]],
            )
            for one in group[direction]
        ]

    assert rules("IpPermissions") == [("tcp", 22, ["203.0.113.7/32"], []), ("-1", None, [], within)]
    assert within in [rule[3] for rule in rules("IpPermissionsEgress")]


def test_failover_gives_its_reason(cloud: EC2, case: Case) -> None:
    cloud.on(
        "RunInstances",
        error("InsufficientInstanceCapacity", "none of m5.large"),
        when=zone("us-east-1a"),
    )
    cloud.on(
        "RunInstances",
        error("InsufficientInstanceCapacity", "none here either", 500),
        when=zone("us-east-1b"),
    )
    dearer = replace(WEST, price=0.2)
    offer, instances = case.lease.acquire([replace(A, price=0.1), B, dearer], 2)
    assert offer is dearer
    assert len(instances) == 2
    (rented,) = ledger.all_rents()
    assert (rented.machines, rented.price, rented.ended) == (2, 0.4, None), (
        "the price of what was taken"
    )
    assert [line for line in case.said if "none of m5.large" in line]
    assert [line for line in case.said if "none here either" in line]
    assert len(launched(cloud)) == 3
    case.lease.release()
    assert lab.left(REGION, "us-west-2") == {}
    assert [(one.ended is not None, one.exact) for one in ledger.all_rents()] == [(True, True)]


def test_no_capacity_anywhere_names_all_zones(cloud: EC2, case: Case) -> None:
    cloud.on("RunInstances", error("InsufficientInstanceCapacity", "no"), times=9)
    with raises(CloudError, "cloud-capacity", r" 2 machines:\n.*us-east-1a.*\n.*us-east-1b"):
        case.lease.acquire([A, B], 2)


def test_a_quota_is_asked_once_in_a_region(cloud: EC2, case: Case) -> None:
    cloud.on("RunInstances", error("VcpuLimitExceeded", "0 vCPU"), times=9)
    with pytest.raises(CloudError, match="vCPU quota"):
        case.lease.acquire([A, B], 2)
    assert len(launched(cloud)) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UnauthorizedOperation", "may not call ec2:RunInstances"),
        ("Blocked", "blocked"),
        ("InternalError", "not a lack"),
    ],
)
def test_zone_independent_errors_are_reported_at_once(
    cloud: EC2, case: Case, code: str, words: str
) -> None:
    cloud.on("RunInstances", error(code, "no", 500 if code == "InternalError" else 403), times=99)
    with pytest.raises(CloudError, match=words):
        case.lease.acquire([A, B], 2)
    assert {call.fields["ClientToken"] for call in launched(cloud)} == {"train-1234-1"}


def test_a_lost_answer(cloud: EC2, case: Case) -> None:
    cloud.on("RunInstances", lab.lost)
    _, instances = case.lease.acquire([A], 2)
    assert len(lab.instances()) == len(instances) == 2


def test_lost_answers_are_searched_for(cloud: EC2, case: Case) -> None:
    """The launch succeeds, all its answers are lost, and EC2 shows the machines late: they are found and ended all the same."""
    cloud.on("RunInstances", lab.lost, times=99)
    with pytest.raises(CloudError):
        case.lease.acquire([A, B], 2)
    cloud.on("DescribeInstances", lab.empty, times=2)
    case.lease.release()
    assert len(lab.instances()) == 2


def test_not_shown_yet_is_not_gone(cloud: EC2, case: Case) -> None:
    cloud.on("DescribeInstances", lab.empty, times=3)
    _, instances = case.lease.acquire([A], 2)
    assert len(instances) == 2
    cloud.on("DescribeInstances", lab.empty, times=2)
    cloud.on("TerminateInstances", error("InvalidInstanceID.NotFound", "not known"), times=1)
    case.lease.release()
    assert {one.state for one in lab.instances()} == {"terminated"}


def test_ended_while_pending(cloud: EC2, case: Case) -> None:
    cloud.on(
        "RunInstances",
        lab.state("terminated", "Server.InsufficientInstanceCapacity"),
        when=zone("us-east-1a"),
    )
    offer, _ = case.lease.acquire([A, B], 2)
    assert offer is B
    ended = {one.id for one in lab.instances() if one.state == "terminated"}
    assert [line for line in case.said if any(one in line for one in ended)]


def test_never_running(cloud: EC2, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUNNING_SECONDS", 20.0)
    cloud.on("RunInstances", lab.state("pending"))
    with raises(CloudError, "cloud-internal", r"\b20 s\b.*pending"):
        case.lease.acquire([A], 1)


def test_machines_that_cannot_be_terminated_are_named(cloud: EC2, case: Case) -> None:
    _, instances = case.lease.acquire([A], 1)
    cloud.on("TerminateInstances", error("UnauthorizedOperation", "no", 403))
    with pytest.raises(
        CloudError,
        match=rf"(?s){instances[0].id}.*ec2:TerminateInstances.*skymagic down --all.*20\d\d-",
    ):
        case.lease.release()
    case.lease.release()  # once it is allowed


def test_machines_without_describe_permission_are_terminated(cloud: EC2, case: Case) -> None:
    """DescribeInstances is denied: what the launch has answered is known."""
    cloud.on("DescribeInstances", error("UnauthorizedOperation", "no", 403), times=1 << 30)
    with pytest.raises(CloudError, match="ec2:DescribeInstances"):
        case.lease.acquire([A], 2)
    with pytest.raises(CloudError, match="ec2:DescribeInstances"):
        case.lease.release()
    assert [one.state for one in lab.instances()] == ["terminated"] * 2
    cloud._rules.clear()


def test_fifty_machines_are_one_launch(cloud: EC2, case: Case) -> None:
    """Also where the first zone has room for fewer: none of them stays."""
    cloud.on(
        "RunInstances",
        error("InsufficientInstanceCapacity", "49 of 50", 500),
        when=zone("us-east-1a"),
    )
    offer, instances = case.lease.acquire([A, B], 50)
    assert (offer, len(instances), len({one.private for one in instances})) == (B, 50, 50)
    assert [(call.fields["MinCount"], call.fields["MaxCount"]) for call in launched(cloud)] == [
        ("50", "50")
    ] * 2
    case.lease.release()
    assert lab.left() == {}
    assert {one.state for one in lab.instances()} == {"terminated"}


def test_keys_are_this_users_alone_and_go_with_the_pool(case: Case) -> None:
    folder = case.keys.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()} == {
        "key": 0o600,
        "known_hosts": 0o600,
    }
    assert case.keys.user.private not in repr(case.keys)
    case.lease.acquire([A], 1)
    case.lease.release()
    assert not folder.exists()


def test_user_data_has_no_credential(cloud: EC2, case: Case) -> None:
    case.lease.acquire([A], 1)
    text = base64.b64decode(launched(cloud)[0].fields["UserData"]).decode()
    head, _, rest = text.partition("\n")
    assert head == "#cloud-config"
    config = json.loads(rest)
    assert config["ssh_keys"]["ed25519_public"] == case.keys.host.public
    assert config["ssh_authorized_keys"] == [case.keys.user.public]
    assert case.keys.user.private not in text
    assert not [value for value in lab.CREDENTIALS.values() if value in text]
    assert ["systemd-run", "--on-active=86400s", "systemctl", "poweroff"] in config["bootcmd"]
    assert (config["package_update"], config["package_upgrade"]) == (False, False)
    assert [
        each
        for each in config["bootcmd"]
        if "apt-daily-upgrade.timer" in each[-1] and "mask --now" in each[-1]
    ]
    assert len(text) < boot.MOST_BYTES


def test_image_comes_from_the_vendors_parameter_by_default(
    cloud: EC2, server: tuple[EC2, AwsClients]
) -> None:
    """Ubuntu, with NVIDIA's driver where there are GPUs; and a disk of at least what it needs."""
    large = replace(SETTINGS, disk=250)
    for number, (offer, settings, asked) in enumerate(
        [
            (
                A,
                SETTINGS,
                "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
            ),
            (
                GPUS,
                large,
                "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
            ),
            (GPUS, replace(SETTINGS, image_id=lab.IMAGE), ""),
        ]
    ):
        cloud.calls.clear()
        case = Case(server[1], f"train-{number}", settings)
        case.lease.acquire([offer], 1)
        assert [call.fields["Name"] for call in cloud.calls if call.action == "GetParameter"] == [
            asked
        ] * bool(asked)
        fields = launched(cloud)[0].fields
        assert fields["ImageId"] == lab.IMAGE
        disk = {
            name: fields[f"BlockDeviceMapping.1.Ebs.{name}"]
            for name in ("VolumeSize", "VolumeType")
        }
        assert disk == {"VolumeSize": str(settings.disk), "VolumeType": "gp3"}
        assert fields["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
        case.lease.release()
    assert lab.left() == {}


def test_an_image_that_is_not_to_be_had(cloud: EC2, server: tuple[EC2, AwsClients]) -> None:
    cloud.on("GetParameter", error("AccessDeniedException", "not authorized", 403))
    with pytest.raises(
        CloudError,
        match=r"(?s)\bm5.large\b.*ssm:GetParameter.*image_id='ami-",
    ):
        Case(server[1]).lease.acquire([A], 1)
    unknown = Case(server[1], "train-2", replace(SETTINGS, image_id="ami-0123456789abcdef0"))
    with pytest.raises(CloudError, match="ami-0123456789abcdef0"):
        unknown.lease.acquire([A], 1)
    assert lab.left() == {}


def test_user_data_that_is_too_large(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "MOST_BYTES", 1000)
    with pytest.raises(RequestError, match="EC2 takes 1000"):
        boot.cloud_config(case.keys, "train-1234", "ubuntu", 22, WatchdogBounds(1, 1))


def test_several_network_cards_take_one_address_on_the_head(
    cloud: EC2, server: tuple[EC2, AwsClients]
) -> None:
    case = Case(server[1])
    large = MachineOffer(
        REGION, "us-east-1a", "p4d.24xlarge", gpu="A100", gpus=8, cards=4, efa=True
    )
    _, instances = case.lease.acquire([large], 2)
    assert [bool(one.public) for one in instances] == [True, False]
    assert launched(cloud)[0].fields["NetworkInterface.4.NetworkCardIndex"] == "3"
    assert "NetworkInterface.1.AssociatePublicIpAddress" not in launched(cloud)[0].fields
    case.lease.release()
    assert lab.left() == {}


GPUS = MachineOffer(REGION, "us-east-1a", "p3.8xlarge", gpu="V100", gpus=4)
APART = "not enough capacity to launch all of them into Placement Group 'x'"


def test_gpu_machines_are_near_each_other(cloud: EC2, case: Case) -> None:
    case.lease.acquire([GPUS], 2)
    assert launched(cloud)[0].fields["Placement.GroupName"] == "skymagic-train-1234-1"
    assert lab.left()["placements"] == ["skymagic-train-1234-1"]
    cloud.on("DeletePlacementGroup", error("InvalidPlacementGroup.InUse"))


@pytest.mark.parametrize(("offer", "count"), [(GPUS, 1), (A, 2)])
def test_other_machines_use_any_zone_with_capacity(
    cloud: EC2, case: Case, offer: MachineOffer, count: int
) -> None:
    case.lease.acquire([offer], count)
    assert "CreatePlacementGroup" not in [call.action for call in cloud.calls]


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("RunInstances", "InsufficientInstanceCapacity", APART),
        ("CreatePlacementGroup", "UnauthorizedOperation", "You are not authorized"),
        ("CreatePlacementGroup", "PlacementGroupLimitExceeded", "too many"),
    ],
)
def test_failing_placement_group_is_dropped(
    cloud: EC2, case: Case, call: str, code: str, message: str
) -> None:
    cloud.on(call, error(code, message))
    offer, instances = case.lease.acquire([GPUS, A], 2)
    assert offer is GPUS
    assert len(instances) == 2
    assert "Placement.GroupName" not in launched(cloud)[-1].fields
    assert [line for line in case.said if "placement group" in line]


def test_missing_capacity_is_no_fault_of_a_placement_group(cloud: EC2, case: Case) -> None:
    cloud.on("RunInstances", error("InsufficientInstanceCapacity", "none"))
    offer, _ = case.lease.acquire([GPUS, A], 2)
    assert offer is A


def test_a_machine_is_replaced(cloud: EC2, case: Case) -> None:
    offer, instances = case.lease.acquire([GPUS], 2)
    cloud.on("RunInstances", error("InsufficientInstanceCapacity", "none"))
    for _ in range(2):  # the second call finds capacity
        with contextlib.suppress(CloudError):
            [other] = case.lease.replace(offer, [instances[1].id])
    states = {one.id: one.state for one in lab.instances()}
    assert states == {
        instances[0].id: "running",
        instances[1].id: "terminated",
        other.id: "running",
    }
    kept = [
        (one.number, one.machines, one.may_run(time.time()))
        for one in ledger.all_rents()
        if one.job == case.lease.label.job
    ]
    assert sorted(kept) == [(1, 1, False), (1, 1, True), (3, 1, True)], (
        "the machine that is gone is not counted on"
    )
    assert case.lease.alive(REGION, other.id) is True
    assert case.lease.alive(REGION, instances[1].id) is False
    case.lease.release()
    assert lab.left() == {}
    with pytest.raises(
        CloudError, match="released"
    ):  # on a thread that has waited for capacity meanwhile
        case.lease.replace(offer, [other.id])


def test_unreachable_machines_cost_four_calls_a_minute(
    cloud: EC2, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, each asked about every second, for a minute by a clock of the test's."""
    _, instances = case.lease.acquire([A], 4)
    case.lease.clients = copy.copy(case.lease.clients)
    case.lease.clients.deadline_factor = 1.0
    cloud.calls.clear()
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    with monkeypatch.context() as patched:
        patched.setattr(lease, "time", clock)
        for clock.now in map(float, range(60)):
            if clock.now == 30:
                lab.set_state(lab.instances()[2], "terminated", "Server.SpotInstanceTermination")
            found = [case.lease.alive(REGION, one.id) for one in instances]
    assert found == [True, True, False, True]
    assert 1 <= len(cloud.calls) <= 4
    case.lease.clients.deadline_factor = SETTINGS.deadline_factor


def test_everything_is_found_by_tag_alone(cloud: EC2, server: tuple[EC2, AwsClients]) -> None:
    """Two pools in two regions, from a process that has forgotten both; what is another's stays."""
    clients = server[1]
    cloud.on("DescribeRegions", lab.regions("eu-west-1", REGION, "us-west-2"))
    Case(clients, "one-1").lease.acquire([A], 2)
    Case(clients, "two-2").lease.acquire([WEST], 1)
    others = Case(clients, "hers-3")
    object.__setattr__(others.lease.label, "owner", "arn:aws:iam::123456789012:user/bea")
    others.lease.acquire([A], 1)
    said: list[str] = []
    fresh = AwsClients(endpoint_url=cloud.url, deadline_factor=SETTINGS.deadline_factor)
    assert sweep.release_everything(fresh, said.append) == []
    assert any("one-1" in line for line in said)
    assert len(lab.left()["instances"]) == 1
    assert lab.left("us-west-2") == {}
    assert not boot.keys_folder("one-1").exists()
    others.lease.release()


def test_pools_are_listed_and_ended_one_by_one_by_their_tags(
    cloud: EC2, server: tuple[EC2, AwsClients]
) -> None:
    """From a process that has forgotten all: in two regions, stopped ones too; what is another's is not seen."""
    clients = server[1]
    cloud.on("DescribeRegions", lab.regions("eu-west-1", REGION, "us-west-2"), times=1 << 30)
    Case(clients, "one-1").lease.acquire([replace(A, instance_type="g5.12xlarge")], 2)
    stopped = Case(clients, "two-2")
    stopped.lease.acquire([WEST], 1)
    for machine in lab.instances("us-west-2"):
        lab.set_state(machine, "stopped")
    others = Case(clients, "hers-3")
    object.__setattr__(others.lease.label, "owner", "arn:aws:iam::123456789012:user/bea")
    others.lease.acquire([A], 1)
    settings = replace(SETTINGS, endpoint_url=cloud.url)
    cloud.on(
        "DescribeInstances",
        error("UnauthorizedOperation", "no", 403),
        when=lambda call: call.region == "eu-west-1",
        times=4,
    )

    def stop(name: str | None = None, own: Sequence[str] = ()) -> list[str] | None:
        request = DownRequest(name, provider="aws")
        return stopping.stop_in_location(request, settings, own, lambda text: None)

    request = pool_listing.StatusRequest(provider="aws")
    found = pool_listing.listing(request, settings)
    one, two = json.loads(json.dumps(found.plain()))["pools"]
    assert [each["type"] for each in one["nodes"]] == ["g5.12xlarge"] * 2
    assert [each["state"] for each in two["nodes"]] == ["stopped"]
    assert one["ends"] > one["started"] > 1e9
    assert [*found.result.unreached] == ["eu-west-1"]
    text = found.text(["one-1"])
    assert "pool 'train' (one-1): us-east-1; " in text
    assert "pool 'train' (two-2): us-west-2; started by ann@laptop " in text
    assert text.count("4 × A10G") == 2
    assert re.findall("%sky_down .*", text) == ["%sky_down two-2 --provider aws"], (
        "not this notebook's own"
    )
    named: Any = pool_listing.listing(replace(request, name="two-2"), settings).plain()
    assert [pool["job_id"] for pool in named["pools"]] == ["two-2"]

    both = r"one-1 \(ann@laptop\), two-2 \(ann@laptop\)"
    with raises(RequestError, "pool-ambiguous", both):
        stop("train")
    with raises(PoolError, "no-pool", "'hers-3'.*; eu-west-1: "):
        stop("hers-3")
    with raises(RequestError, "pool-of-notebook", "%sky_down train"):
        stop("one-1", ["one-1"])
    assert stop("two-2") == ["pool 'train' (two-2) is down"]
    assert lab.left("us-west-2") == {}
    assert stop() == ["pool 'train' (one-1) is down"], "the only one"
    with raises(RequestError, "no-pool"):
        stop()
    others.lease.release()
    assert lab.left(REGION, "us-west-2") == {}


def test_lost_pool_is_not_attached_and_is_cleaned_up(cloud: EC2, case: Case) -> None:
    _, instances = case.lease.acquire([A], 2)
    request = PoolRequest(provider="aws", cloud=replace(SETTINGS, endpoint_url=cloud.url))
    plan = plan_rented(request, Rental("aws", "m5.large", "us-east-1a", REGION, 2, 8.0))
    nothing: Any = None
    accesses = [
        RentedAccess(nothing, nothing, REGION, one.id, case.lease.label, A) for one in instances
    ]
    for one in lab.instances():
        lab.set_state(one, "terminated", "Client.InstanceInitiatedShutdown")
    with raises(CloudError, "cloud-missing", "terminated"):
        AWS().attach(plan, accesses)
    assert lab.left() == {}
    assert not case.keys.folder.exists()


def test_stopped_machines_survive_an_attach(cloud: EC2, case: Case) -> None:
    """In EC2's console; attaching ends what is left of pools that are gone, and these are not."""
    _, instances = case.lease.acquire([A], 2)
    for one in lab.instances():
        lab.set_state(one, "stopped")
    request = PoolRequest(provider="aws", cloud=replace(SETTINGS, endpoint_url=cloud.url))
    plan = plan_rented(request, Rental("aws", "m5.large", "us-east-1a", REGION, 2, 8.0))
    nothing: Any = None
    accesses = [
        RentedAccess(nothing, nothing, REGION, one.id, case.lease.label, A) for one in instances
    ]
    with raises(CloudError, "cloud-stopped", "%sky_down train"):
        AWS().attach(plan, accesses)
    assert {one.state for one in lab.instances()} == {"stopped"}


def test_one_pool_of_several_is_given_back_by_its_job(
    cloud: EC2, server: tuple[EC2, AwsClients]
) -> None:
    Case(server[1], "one-1").lease.acquire([A], 1)
    two = Case(server[1], "two-2")
    two.lease.acquire([A], 1)
    assert sweep.release_job(server[1], "one-1", [REGION]) == []
    running = sweep.instances(server[1], REGION, [], ("running",))
    assert [instance.tag(tags.JOB) for instance in running] == ["two-2"]
    assert not boot.keys_folder("one-1").exists()
    two.lease.release()


def test_owners_are_the_same_tomorrow() -> None:
    role = "arn:aws:sts::1:assumed-role/Researcher"
    assert owner(f"{role}/botocore-session-1763816000") == owner(f"{role}/i-0abc") == role
    assert owner(f"{role}/ann@example.org") == f"{role}/ann@example.org"
    assert owner("arn:aws:iam::1:user/ann") == "arn:aws:iam::1:user/ann"
