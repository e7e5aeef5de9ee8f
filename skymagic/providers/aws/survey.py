"""What planning has found for a pool, and what acquiring has made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from skymagic.bootstrap.requirements import Requirements
from skymagic.plan.plans import Plan
from skymagic.providers import ssh
from skymagic.providers.aws import listing
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


@dataclass(frozen=True)
class Rented(Survey):
    """Offers for a pool, in the order in which they are tried; owns what is rented for it."""

    clients: Clients
    offers: tuple[Offer, ...]
    requirements: Requirements
    held: Held = field(default_factory=Held)

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
        """Close all connections, end the machines, and wait until EC2 says that they are terminated; twice is safe."""
        held = self.held
        try:
            ssh.side_by_side(ssh.Machine.close, held.machines)
            ssh.side_by_side(Connection.close, held.connections)
        finally:
            if held.lease is not None:
                held.lease.release()
