"""What planning has found for a pool, and what acquiring has made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from skymagic.bootstrap.requirements import Requirements
from skymagic.errors import RequestError
from skymagic.plan.plans import Plan, monthly_words
from skymagic.providers import ssh
from skymagic.providers.aws import ledger, listing, stopping
from skymagic.providers.aws.access import RentedAccess
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.keys import PoolKeys
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.selection import per_hour
from skymagic.providers.provider import Survey
from skymagic.ssh.connection import Connection


@dataclass
class Held:
    """What acquiring has made so far."""

    lease: Lease | None = None
    offer: Offer | None = None
    """What was taken."""
    keys: PoolKeys | None = None
    connections: list[Connection] = field(default_factory=list)
    machines: list[ssh.Machine] = field(default_factory=list)
    keeps: bool = False
    """Whether closing stops the machines with their disks, instead of ending them."""


@dataclass(frozen=True)
class Rented(Survey):
    """Offers for a pool, in the order in which they are tried; owns what is rented for it."""

    clients: Clients
    offers: tuple[Offer, ...]
    requirements: Requirements
    held: Held = field(default_factory=Held)
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
        found = stopping.mistakes(request, offer) or stopping.forbidden(self.clients, offer.region, ids)
        if found:
            raise RequestError(found)
        cost = f"their disks cost {monthly_words(self._monthly)} until you end them, for nothing ends them by itself any more"
        return f"{listing.machines(offer, len(ids))}, stopped: {cost}; {stopping.lost(offer)}"

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
        lease, offer = self.held.lease, self.held.offer
        assert lease is not None and offer is not None
        beside = ledger.beside_stopped(lease.label.job, offer, self.plan.topology.nodes, lease.settings)
        return beside * stopping.MONTH_HOURS

    def close(self) -> None:
        """Close all connections, end the machines, or stop them where `keep` was called, and wait until EC2 says so; twice is safe."""
        held = self.held
        try:
            ssh.side_by_side(ssh.Machine.close, held.machines)
            ssh.side_by_side(Connection.close, held.connections)
        finally:
            if held.lease is not None and held.keeps and held.offer is not None:
                held.lease.stop(held.offer)
            elif held.lease is not None:
                held.lease.release()
