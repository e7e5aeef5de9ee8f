"""What planning has found for a pool, what acquiring has made of it, and what leads another notebook to its machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.errors import CloudError, RequestError
from skymagic.plan.plans import Plan, monthly_words
from skymagic.providers import ssh
from skymagic.providers.aws import launch, ledger, listing
from skymagic.providers.aws.boot import PoolKeys
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.selection import MachineOffer, per_hour
from skymagic.providers.aws.tags import Label
from skymagic.providers.provider import Survey
from skymagic.ssh.config import Endpoint
from skymagic.ssh.connection import SSHConnection


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
        """Its agent's daemon, as of all machines."""
        return self.agent.daemon

    @property
    def secret(self) -> str:
        """What that knows its notebooks by."""
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


def ended_instances(
    clients: AwsClients, accesses: Sequence[RentedAccess], running: Collection[str] = ("pending", "running")
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
    if any(states[one] in launch.STOPPED for one in away):
        pool = accesses[0].label.pool
        raise CloudError(
            "stopped", "", "its machines are stopped", f"%sky_pool {pool} starts them, %sky_down {pool} ends them"
        )
    return away


def gone_error(ids: Sequence[str], of: int) -> CloudError:
    """The error for machines that run no more."""
    if len(ids) == of:
        return CloudError("missing", "", "its machines are terminated")
    return CloudError("ended", "", f"{len(ids)} of its {of} machines no longer run ({', '.join(ids)})")


@dataclass
class HeldMachines:
    """What acquiring has made so far."""

    lease: Lease | None = None
    offer: MachineOffer | None = None
    """What was taken."""
    keys: PoolKeys | None = None
    connections: list[SSHConnection] = field(default_factory=list)
    machines: list[ssh.Machine] = field(default_factory=list)
    keeps: bool = False
    """Whether closing stops the machines with their disks, instead of ending them."""

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
    stopped: tuple[RentedAccess, ...] = ()
    """Machines that are stopped, and that acquiring starts again instead of renting others."""

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

    def stopping(self) -> str:
        """What goes on to cost when the machines are stopped, who has to end them, and what is lost.

        Raises:
            RequestError: they cannot be stopped, or not now, with all reasons.
            CloudError: EC2 does not say whether they can.
        """
        held, request = self.held, self.plan.request
        if held.lease is None or held.offer is None:
            raise RequestError("--stop: nothing of it is rented yet")
        offer, ids = held.offer, [one.name for one in held.machines]
        found = launch.stop_mistakes(request, offer) or launch.stop_refusals(self.clients, offer.region, ids)
        if found:
            raise RequestError(found)
        cost = f"their disks cost {monthly_words(self._monthly)} until you end them, because nothing terminates them automatically"
        return f"{listing.machines(offer, len(ids))}, stopped: {cost}; what the ranks hold is lost"

    def keep(self) -> None:
        """Have `close` stop the machines with their disks."""
        self.held.keeps = True

    def ready(self) -> None:
        """What was stopped runs again: `close` ends it from now on."""
        self.held.keeps = False

    @property
    def monthly(self) -> float | None:
        """Dollars a month for machines that closing stops, or has stopped; None where it ends them."""
        return self._monthly if self.held.keeps and self.held.lease is not None else None

    @property
    def _monthly(self) -> float:
        lease, offer = self.held.taken
        beside = ledger.beside_stopped(lease.label.job, offer, self.plan.topology.nodes, lease.settings)
        return beside * launch.MONTH_HOURS

    def close(self) -> None:
        """Close all connections, end the machines, or stop them where `keep` was called, and wait until EC2 says so; twice is safe."""
        held = self.held
        try:
            ssh.side_by_side(ssh.Machine.close, held.machines)
            ssh.side_by_side(SSHConnection.close, held.connections)
        finally:
            if held.lease is not None and held.keeps and held.offer is not None:
                held.lease.stop(held.offer)
            elif held.lease is not None:
                held.lease.release()
