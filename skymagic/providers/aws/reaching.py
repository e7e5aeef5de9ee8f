"""From machines that run to connections: sshd opens some time after EC2 says "running", and shows the key that we gave it.

Machines without public addresses are reached through a jump host of the user's.
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
    """The jump host, as the user's ssh configuration has it; () without one.

    Raises:
        RequestError: its name or the configuration cannot be read, or nobody says from where it connects.
    """
    if not settings.via:
        return ()
    if not settings.ssh_from:
        raise RequestError(
            f"via={settings.via!r}: the machines let SSH in from that host alone, so say its address as they see it "
            "(as a rule its private one): ssh_from='10.0.0.5/32'"
        )
    (spec,) = hostlist.expand((str(settings.via),))
    return (SshConfig().endpoint(spec),)


def check_way(settings: CloudSettings) -> None:
    """Try the way as far as it is there before machines are, so that none is rented that nobody can reach.

    Raises:
        HostError: the jump host lets nobody in. RequestError: as `jump`.
    """
    for one in jump(settings):
        connecting.connect(one).close()


REACH_SECONDS = 420.0
"""How long the first boot may take until sshd accepts the pool's key; machines with 8 GPUs take 3 to 5 minutes."""
POLL_SECONDS = 2.0
DESCRIBE_SECONDS = 10.0
"""How often EC2 is asked meanwhile whether they still run."""

Say = Callable[[str], None]


def endpoints(
    instances: Sequence[RunningInstance],
    keys: PoolKeys,
    settings: CloudSettings,
    head: Endpoint | None = None,
) -> list[Endpoint]:
    """How the machines of a pool are reached. Those without a public address are reached through the head.

    Args:
        head: leads to the pool's head; None where it is the first of these.
    """
    if settings.use_private_ips:
        return [
            replace(
                keys.endpoint(one.id, one.private, settings.ssh_port, settings.user),
                proxy_jump=jump(settings),
            )
            for one in instances
        ]
    first = head or keys.endpoint(
        instances[0].id, instances[0].public, settings.ssh_port, settings.user
    )
    return [
        first if head is None and one is instances[0]
        else keys.endpoint(one.id, one.public or one.private, settings.ssh_port, settings.user, () if one.public else (first,))
        for one in instances
    ]  # fmt: skip


def connect(
    clients: AwsClients,
    instances: Sequence[RunningInstance],
    reached: Sequence[Endpoint],
    say: Say,
    seconds: float = REACH_SECONDS,
) -> list[HostConnection]:
    """Connections to all of them, once all accept the pool's key.

    Raises:
        HostError: one shows another host key than the one that it was given; or they do not answer in time: says how the last
            attempt failed.
        CloudError: one has ended meanwhile, with EC2's reason.
    """
    end, asked = time.monotonic() + seconds, time.monotonic()
    while True:
        try:
            return connecting.connect_all(reached)
        except (HostError, HostsError) as problem:
            failed = problem.failures if isinstance(problem, HostsError) else (problem,)
            if wrong := [one for one in failed if "host key" in one.reason]:
                raise _not_ours(wrong[0]) from problem
            if time.monotonic() >= end:
                raise _silent(failed, seconds) from problem
        if time.monotonic() >= asked + DESCRIBE_SECONDS * clients.deadline_factor:
            asked = time.monotonic()
            hosts = [one.host for one in failed]
            say(StartStep(f"waiting for sshd on {', '.join(hosts)} …", "connecting", hosts))
            region = instances[0].region
            launch.check_running(
                launch.describe(clients, region, [one.id for one in instances]).values(), region
            )
        time.sleep(POLL_SECONDS * clients.deadline_factor)


def _not_ours(failure: HostError) -> HostError:
    reason = f"{failure.reason.partition(':')[0]}: it is not the key that this machine was given when it was launched"
    remedy = "another machine may answer at its address, or its image does not run cloud-init; nothing was sent there"
    return HostError(failure.host, reason, remedy)


def _silent(failures: Sequence[HostError], seconds: float) -> HostError:
    first = failures[0]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    remedy = (
        "is the subnet routed to where this notebook runs (an internet gateway; or use_private_ips=True and a VPN), does its network "
        "ACL let SSH in, and is the image's user the right one (user=…)?"
    )
    return HostError(
        first.host, f"no SSH within {seconds:.0f} s of its start: {first.reason}{more}", remedy
    )
