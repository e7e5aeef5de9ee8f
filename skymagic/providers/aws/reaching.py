"""Connect to running machines.

sshd starts some time after EC2 reports "running", and presents the host key assigned by us.
Machines without public addresses are reached through the user's jump host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from skymagic.display.panel import StartStep
from skymagic.errors import HostError, HostsError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import launch
from skymagic.providers.aws.boot import PoolKeys
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.launch import RunningInstance
from skymagic.ssh import connecting, hostlist
from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.host import HostConnection


def jump(settings: CloudSettings) -> tuple[Endpoint, ...]:
    """Return the jump host, as configured in the user's ssh configuration; () without one.

    Raises:
        RequestError: its name or the configuration cannot be read, or `ssh_from` is missing.
    """
    if not settings.via:
        return ()
    if not settings.ssh_from:
        raise RequestError(
            f"via={settings.via!r}: the machines let SSH in from that host alone, "
            "so say its address as they see it "
            "(as a rule its private one): ssh_from='10.0.0.5/32'"
        )
    (spec,) = hostlist.expand((str(settings.via),))
    return (SshConfig().endpoint(spec),)


def check_way(settings: CloudSettings) -> None:
    """Test the connection to the jump host before renting machines that could not be reached.

    Raises:
        HostError: the jump host refuses the connection.
        RequestError: see `jump`.
    """
    for endpoint in jump(settings):
        connecting.connect(endpoint).close()


REACH_SECONDS = 420.0
"""Time limit of the first boot until sshd accepts the pool's key.

Machines with 8 GPUs take 3 to 5 minutes.
"""
POLL_SECONDS = 2.0
DESCRIBE_SECONDS = 10.0
"""Interval between checks with EC2 that the machines still run."""

Say = Callable[[str], None]


def endpoints(
    instances: Sequence[RunningInstance],
    keys: PoolKeys,
    settings: CloudSettings,
    head: Endpoint | None = None,
) -> list[Endpoint]:
    """Return how to reach the machines of a pool.

    Machines without a public address are reached through the head.

    Args:
        head: endpoint of the pool's head; None if the head is the first of these machines.
    """
    if settings.use_private_ips:
        return [
            replace(
                keys.endpoint(instance.id, instance.private, settings.ssh_port, settings.user),
                proxy_jump=jump(settings),
            )
            for instance in instances
        ]
    first = head or keys.endpoint(
        instances[0].id, instances[0].public, settings.ssh_port, settings.user
    )
    return [
        first
        if head is None and instance is instances[0]
        else keys.endpoint(
            instance.id,
            instance.public or instance.private,
            settings.ssh_port,
            settings.user,
            () if instance.public else (first,),
        )
        for instance in instances
    ]


def connect(
    clients: AwsClients,
    instances: Sequence[RunningInstance],
    reached: Sequence[Endpoint],
    say: Say,
    seconds: float = REACH_SECONDS,
) -> list[HostConnection]:
    """Connect to all machines once they accept the pool's key.

    Raises:
        HostError: a machine presents a host key other than the assigned one; or they do not answer
            in time, with the last failure.
        CloudError: a machine has ended meanwhile, with EC2's reason.
    """
    end, last_described = time.monotonic() + seconds, time.monotonic()
    while True:
        try:
            return connecting.connect_all(reached)
        except (HostError, HostsError) as problem:
            failed = problem.failures if isinstance(problem, HostsError) else (problem,)
            if wrong := [failure for failure in failed if "host key" in failure.reason]:
                raise _not_ours(wrong[0]) from problem
            if time.monotonic() >= end:
                raise _silent(failed, seconds) from problem
        if time.monotonic() >= last_described + DESCRIBE_SECONDS * clients.deadline_factor:
            last_described = time.monotonic()
            hosts = [failure.host for failure in failed]
            say(StartStep(f"waiting for sshd on {', '.join(hosts)} …", "connecting", hosts))
            region = instances[0].region
            launch.check_running(
                launch.describe(clients, region, [instance.id for instance in instances]).values(),
                region,
            )
        time.sleep(POLL_SECONDS * clients.deadline_factor)


def _not_ours(failure: HostError) -> HostError:
    reason = (
        f"{failure.reason.partition(':')[0]}: it is not the key that this machine was given "
        "when it was launched"
    )
    remedy = (
        "another machine may answer at its address, or its image does not run cloud-init; "
        "nothing was sent there"
    )
    return HostError(failure.host, reason, remedy, code="host-key-changed")


def _silent(failures: Sequence[HostError], seconds: float) -> HostError:
    first = failures[0]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    remedy = (
        "is the subnet routed to where this notebook runs "
        "(an internet gateway; or use_private_ips=True and a VPN), does its network "
        "ACL let SSH in, and is the image's user the right one (user=…)?"
    )
    return HostError(
        first.host,
        f"no SSH within {seconds:.0f} s of its start: {first.reason}{more}",
        remedy,
        code="host-no-ssh",
    )
