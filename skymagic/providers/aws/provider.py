"""Machines rented from EC2 for one pool: planned, asked for, reached, used as hosts of SSH are, and given back."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skymagic.bootstrap.provision import probe
from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, topology
from skymagic.plan.renting import bounded, plan_rented
from skymagic.plan.requests import PoolRequest
from skymagic.providers import ssh
from skymagic.providers.aws import keys, listing, machine, market, sweep, userdata
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.tags import Label
from skymagic.providers.aws.watchdog import Bounds
from skymagic.providers.provider import Say, Survey
from skymagic.ssh.connection import Connection

UNBOUNDED = 365 * 86400.0
"""Seconds for a limit that the user has switched off."""


@dataclass
class Held:
    """What acquiring has made so far."""

    lease: Lease | None = None
    connections: list[Connection] = field(default_factory=list)
    machines: list[ssh.Machine] = field(default_factory=list)


@dataclass(frozen=True)
class Rented(Survey):
    """Offers for a pool, in the order in which they are tried; owns what is rented for it."""

    clients: Clients
    offers: tuple[Offer, ...]
    requirements: Requirements
    held: Held = field(default_factory=Held)

    def close(self) -> None:
        """Close all connections, end the machines, and wait until EC2 says that they are terminated; twice is safe."""
        held = self.held
        try:
            ssh.side_by_side(ssh.Machine.close, held.machines)
            ssh.side_by_side(Connection.close, held.connections)
        finally:
            if held.lease is not None:
                held.lease.release()


class AWS:
    """The provider of EC2's machines."""

    def plan(self, request: PoolRequest, say: Say) -> Rented:
        """Find out what is offered and what it costs; nothing is made."""
        settings = request.cloud
        clients = Clients(settings.profile, settings.endpoint_url, settings.patience)
        request = bounded(request)
        image, requirements = ssh.needs(request, topology(request), say)
        found = market.survey(request, clients)
        offers = market.choice(request, found)
        plan = plan_rented(request, listing.rental(offers, found, request.nodes or 1))
        return Rented(replace(plan, image=image), clients, offers, requirements)

    def acquire(self, survey: Rented, job_id: str, say: Say) -> Sequence[Node]:
        """Rent them all together, connect to them by the keys that they were given, and set them up side by side."""
        plan, held, settings = survey.plan, survey.held, survey.plan.request.cloud
        limits = bounds(plan.request)
        label = _label(survey, job_id, limits)
        made = keys.make(job_id)
        user_data = userdata.cloud_config(made, job_id, settings.user, settings.ssh_port, limits)
        held.lease = Lease(survey.clients, settings, label, user_data, say)
        offer, instances = held.lease.acquire(survey.offers, plan.topology.nodes)
        say(f"{', '.join(one.id for one in instances)} run in {offer.zone} …")
        reached = machine.endpoints(instances, made, settings)
        held.connections += machine.connect(survey.clients, instances, reached, say)
        facts = ssh.side_by_side(lambda one: probe(one, survey.requirements, False), held.connections)
        held.machines += map(ssh.Machine, reached, held.connections, facts)
        check(plan, held.machines, survey.requirements)
        ssh.side_by_side(lambda one: one.set_up(survey.requirements, say), held.machines)
        return [one.node(index, f"{job_id}-{index}") for index, one in enumerate(held.machines)]


def bounds(request: PoolRequest) -> Bounds:
    """When the machines of a pool end by themselves."""
    return Bounds(request.idle or UNBOUNDED, request.max_lifetime or UNBOUNDED)


def check(plan: Plan, machines: Sequence[ssh.Machine], requirements: Requirements) -> None:
    """Raise RequestError where a machine has not what its type has: GPUs that its driver does not find, above all."""
    here = [replace(one.facts.inventory(requirements.minor), hostname=one.name) for one in machines]
    plan_over(replace(plan.request, region=None, spot=False), here, "aws")


def _label(survey: Rented, job: str, limits: Bounds) -> Label:
    client = f"{getpass.getuser()}@{socket.gethostname()}"
    pool = job.rpartition("-")[0] or job
    return Label(pool, job, sweep.caller(survey.clients), client, time.time() + limits.lifetime)
