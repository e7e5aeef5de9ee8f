"""What leads another notebook to rented machines, and to their end: kept in the pool's key, used to take the pool up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skymagic.cluster import Node
from skymagic.errors import CloudError
from skymagic.providers import ssh
from skymagic.providers.aws import launch, stopping
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.tags import Label
from skymagic.ssh.config import Endpoint


@dataclass(frozen=True)
class RentedAccess:
    """What leads to one machine.

    Attributes:
        agent: to its agent. endpoint: to its sshd, by the keys of the pool.
        label: the tags of all that was made for the pool.
        offer: what was taken.
    """

    agent: ssh.Access
    endpoint: Endpoint
    region: str
    instance: str
    label: Label
    offer: Offer

    @property
    def daemon(self) -> str:
        """Its agent's daemon, as of all machines."""
        return self.agent.daemon

    @property
    def secret(self) -> str:
        """What that knows its notebooks by."""
        return self.agent.secret


def nodes(machines: Sequence[ssh.Machine], offer: Offer, lease: Lease, numbers: Sequence[int] = ()) -> list[Node]:
    """The machines as their pool sees them, each with what leads another notebook to it.

    Args:
        numbers: theirs in the pool; in their order from 0 on unless given.
    """
    made = [
        one.node(index, f"{lease.label.job}-{index}")
        for index, one in zip(numbers or range(len(machines)), machines, strict=True)
    ]
    return [
        replace(
            node,
            access=RentedAccess(node.access, one.endpoint, offer.region, one.name, lease.label, offer),
            alive=partial(lease.alive, offer.region, one.name),
        )
        for node, one in zip(made, machines, strict=True)
    ]


def taken_up(accesses: Sequence[RentedAccess], lease: Lease) -> tuple[list[ssh.Machine], list[Node]]:
    """Machines that run already, as the provider and as a pool see them; nothing is connected to yet."""
    machines = [
        ssh.Machine(one.endpoint, None, one.agent.installation.facts, one.agent.secret, one.agent.installation)
        for one in accesses
    ]
    made = [one.node(index, accesses[index].agent.daemon) for index, one in enumerate(machines)]
    return machines, [
        replace(node, access=one, alive=partial(lease.alive, one.region, one.instance))
        for node, one in zip(made, accesses, strict=True)
    ]


def ended(
    clients: Clients, accesses: Sequence[RentedAccess], running: Collection[str] = ("pending", "running")
) -> list[str]:
    """Those of the machines that run no more.

    Args:
        running: states of those that do.

    Raises:
        CloudError: some are stopped with their disks (``stopped``), or EC2 does not say.
    """
    ids = [one.instance for one in accesses]
    found = launch.describe(clients, accesses[0].region, ids)
    states = {one: found[one]["State"]["Name"] if one in found else "terminated" for one in ids}
    away = [one for one in ids if states[one] not in running]
    if any(states[one] in stopping.STOPPED for one in away):
        pool = accesses[0].label.pool
        raise CloudError(
            "stopped", "", "its machines are stopped", f"%sky_pool {pool} starts them, %sky_down {pool} ends them"
        )
    return away


def gone(ids: Sequence[str], of: int) -> CloudError:
    """The error for machines that run no more."""
    if len(ids) == of:
        return CloudError("missing", "", "its machines are terminated")
    return CloudError("ended", "", f"{len(ids)} of its {of} machines run no more ({', '.join(ids)})")
