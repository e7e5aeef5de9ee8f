"""Rented machines: results of planning and acquiring, and access for another notebook."""

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
    """Access to one machine.

    Attributes:
        agent: access to its agent.
        endpoint: access to its sshd, with the keys of the pool.
        label: tags of everything created for the pool.
        offer: the offer that was accepted.
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
        """Secret that the machine's daemon expects from its notebooks."""
        return self.agent.secret


def nodes_of(
    machines: Sequence[ssh.Machine], offer: MachineOffer, lease: Lease, numbers: Sequence[int] = ()
) -> list[Node]:
    """Return the machines as nodes of their pool, each with access for another notebook.

    Args:
        numbers: indexes of the nodes in the pool; 0, 1, … by default.
    """
    nodes = [
        machine.node(index, f"{lease.label.job}-{index}")
        for index, machine in zip(numbers or range(len(machines)), machines, strict=True)
    ]
    return [
        replace(
            node,
            access=RentedAccess(
                node.access, machine.endpoint, offer.region, machine.name, lease.label, offer
            ),
            alive=partial(lease.alive, offer.region, machine.name),
        )
        for node, machine in zip(nodes, machines, strict=True)
    ]


def adopt_machines(
    accesses: Sequence[RentedAccess], lease: Lease
) -> tuple[list[ssh.Machine], list[Node]]:
    """Return running machines and their nodes. Connects to nothing yet."""
    machines = [
        ssh.Machine(
            access.endpoint,
            None,
            access.agent.installation.facts,
            access.agent.secret,
            access.agent.installation,
        )
        for access in accesses
    ]
    nodes = [
        machine.node(index, accesses[index].agent.daemon) for index, machine in enumerate(machines)
    ]
    return machines, [
        replace(node, access=access, alive=partial(lease.alive, access.region, access.instance))
        for node, access in zip(nodes, accesses, strict=True)
    ]


def ended_instances(clients: AwsClients, accesses: Sequence[RentedAccess]) -> list[str]:
    """Return the machines that no longer run.

    Raises CloudError if EC2 does not answer, or some machines are stopped.
    """
    ids = [access.instance for access in accesses]
    instances = launch.describe(clients, accesses[0].region, ids)
    states = {
        instance_id: instances[instance_id].state if instance_id in instances else "terminated"
        for instance_id in ids
    }
    # they may have been stopped in EC2's console
    if any(state in ("stopped", "stopping") for state in states.values()):
        reason = f"its machines are stopped; %sky_down {accesses[0].label.pool} ends them"
        raise CloudError("stopped", "", reason, "start them in EC2's console")
    return [instance_id for instance_id in ids if states[instance_id] not in ("pending", "running")]


def gone_error(ids: Sequence[str], of: int) -> CloudError:
    """Return the error for machines that no longer run."""
    if len(ids) == of:
        return CloudError("missing", "", "its machines are terminated")
    return CloudError(
        "ended", "", f"{len(ids)} of its {of} machines no longer run ({', '.join(ids)})"
    )


@dataclass
class HeldMachines:
    """Resources acquired so far."""

    lease: Lease | None = None
    offer: MachineOffer | None = None
    """The accepted offer."""
    keys: PoolKeys | None = None
    connections: list[HostConnection] = field(default_factory=list)
    machines: list[ssh.Machine] = field(default_factory=list)

    @property
    def rented(self) -> tuple[Lease, MachineOffer]:
        """The lease and the offer, once machines are rented."""
        assert self.lease is not None and self.offer is not None
        return self.lease, self.offer


@dataclass(frozen=True)
class RentedSurvey(Survey):
    """Offers for a pool in the order of trial; owns everything rented for it."""

    clients: AwsClients
    offers: tuple[MachineOffer, ...]
    requirements: Requirements
    held: HeldMachines = field(default_factory=HeldMachines)

    def outcome(self) -> Plan:
        """Return the plan with the machines actually rented and their price."""
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
        """Close all connections, end the machines, and wait until EC2 confirms it.

        Twice is safe.
        """
        held = self.held
        try:
            ssh.call_concurrently(ssh.Machine.close, held.machines)
            ssh.call_concurrently(HostConnection.close, held.connections)
        finally:
            if held.lease is not None:
                held.lease.release()
