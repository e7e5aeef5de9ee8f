"""What planning has found for a pool, what acquiring has made of it, and what leads another notebook to its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.errors import CloudError
from skymagic.plan.plans import Plan
from skymagic.providers import ssh
from skymagic.providers.aws import launch, listing
from skymagic.providers.aws.boot import PoolKeys
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.selection import MachineOffer, per_hour
from skymagic.providers.aws.tags import Label
from skymagic.providers.provider import Survey
from skymagic.ssh.config import Endpoint
from skymagic.ssh.host import HostConnection


@dataclass(frozen=True)
class RentedAccess:
    """What leads to one machine.

    Attributes:
        agent: to its agent. endpoint: to its sshd, by the keys of the pool.
        label: the tags of all that was made for the pool.
        offer: what was taken.
    """

    agent: ssh.HostAccess
    endpoint: Endpoint
    region: str
    instance: str
    label: Label
    offer: MachineOffer

    @property
    def daemon(self) -> str:
        """Name of the daemon of the machine's agent."""
        return self.agent.daemon

    @property
    def secret(self) -> str:
        """Secret by which the machine's daemon knows its notebooks."""
        return self.agent.secret


def nodes_of(
    machines: Sequence[ssh.Machine], offer: MachineOffer, lease: Lease, numbers: Sequence[int] = ()
) -> list[Node]:
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
            access=RentedAccess(
                node.access, one.endpoint, offer.region, one.name, lease.label, offer
            ),
            alive=partial(lease.alive, offer.region, one.name),
        )
        for node, one in zip(made, machines, strict=True)
    ]


def taken_up(
    accesses: Sequence[RentedAccess], lease: Lease
) -> tuple[list[ssh.Machine], list[Node]]:
    """Machines that run already, as the provider and as a pool see them; nothing is connected to yet."""
    machines = [
        ssh.Machine(
            one.endpoint,
            None,
            one.agent.installation.facts,
            one.agent.secret,
            one.agent.installation,
        )
        for one in accesses
    ]
    made = [one.node(index, accesses[index].agent.daemon) for index, one in enumerate(machines)]
    return machines, [
        replace(node, access=one, alive=partial(lease.alive, one.region, one.instance))
        for node, one in zip(made, accesses, strict=True)
    ]


def ended_instances(clients: AwsClients, accesses: Sequence[RentedAccess]) -> list[str]:
    """The machines that run no more. Raises CloudError where EC2 does not say, or some are stopped."""
    ids = [one.instance for one in accesses]
    found = launch.describe(clients, accesses[0].region, ids)
    states = {one: found[one]["State"]["Name"] if one in found else "terminated" for one in ids}
    if any(
        state in ("stopped", "stopping") for state in states.values()
    ):  # somebody has stopped them in the console
        words = f"its machines are stopped; %sky_down {accesses[0].label.pool} ends them"
        raise CloudError("stopped", "", words, "start them in EC2's console")
    return [one for one in ids if states[one] not in ("pending", "running")]


def gone_error(ids: Sequence[str], of: int) -> CloudError:
    """The error for machines that run no more."""
    if len(ids) == of:
        return CloudError("missing", "", "its machines are terminated")
    return CloudError(
        "ended", "", f"{len(ids)} of its {of} machines no longer run ({', '.join(ids)})"
    )


@dataclass
class HeldMachines:
    """What acquiring has made so far."""

    lease: Lease | None = None
    offer: MachineOffer | None = None
    """What was taken."""
    keys: PoolKeys | None = None
    connections: list[HostConnection] = field(default_factory=list)
    machines: list[ssh.Machine] = field(default_factory=list)

    @property
    def taken(self) -> tuple[Lease, MachineOffer]:
        """The lease and the offer, once machines were rented."""
        assert self.lease is not None and self.offer is not None
        return self.lease, self.offer


@dataclass(frozen=True)
class RentedSurvey(Survey):
    """Offers for a pool, in the order in which they are tried; owns what is rented for it."""

    clients: AwsClients
    offers: tuple[MachineOffer, ...]
    requirements: Requirements
    held: HeldMachines = field(default_factory=HeldMachines)

    def outcome(self) -> Plan:
        """The plan with the machines that were had, and their price."""
        offer, nodes = self.held.offer, self.plan.topology.nodes
        if offer is None:
            return self.plan
        return replace(
            self.plan,
            hosts=(listing.machines(offer, nodes),),
            price=per_hour(offer, nodes),
            priced=offer.priced,
            region=offer.region,
            cpus=offer.vcpus or self.plan.cpus,
            memory_gb=offer.memory or self.plan.memory_gb,
        )

    def close(self) -> None:
        """Close all connections, end the machines, and wait until EC2 says so; twice is safe."""
        held = self.held
        try:
            ssh.side_by_side(ssh.Machine.close, held.machines)
            ssh.side_by_side(HostConnection.close, held.connections)
        finally:
            if held.lease is not None:
                held.lease.release()
