"""EC2 provider: plans, rents and releases the machines of one pool.

The machines are used like SSH hosts.
"""

from __future__ import annotations

import getpass
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import quote

from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.errors import CloudError
from skymagic.plan.image import Image
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, Topology, topology
from skymagic.plan.renting import plan_rented, with_bounds
from skymagic.plan.requests import PoolRequest
from skymagic.providers import ssh
from skymagic.providers.aws import boot, listing, market, reaching, rented, replacing, sweep, tags
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.rented import HeldMachines, RentedAccess, RentedSurvey
from skymagic.providers.aws.tags import Label
from skymagic.providers.provider import Say

_APT = "-q -o DPkg::Lock::Timeout=300"
"""Options for apt-get: a machine may still hold the lock while it boots."""
UNBOUNDED = 365 * 86400.0
"""Seconds to use for a limit that the user has disabled."""


class AWS:
    """Provider for EC2's machines."""

    def plan(self, request: PoolRequest, say: Say) -> RentedSurvey:
        """Find out which machines are offered and their prices. Creates nothing."""
        settings = request.cloud
        clients = AwsClients.of(settings)
        request = with_bounds(request)
        reaching.jump(settings)
        image, requirements = needs(request, topology(request), say)
        try:
            offered = market.survey(request, clients)
        except CloudError as problem:
            if not request.dry_run or problem.kind != "credentials":
                raise
            offered = market.estimate(request, clients, problem.reason)
        offers = market.offers_to_try(request, offered)
        plan = plan_rented(request, listing.rental(offers, offered, request.nodes or 1))
        return RentedSurvey(replace(plan, image=image), clients, offers, requirements)

    def acquire(self, survey: RentedSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Rent all machines together, connect to them, and set them up in parallel.

        Connections use the keys that the machines received at launch.
        """
        plan, held, settings = survey.plan, survey.held, survey.plan.request.cloud
        reaching.check_way(settings)
        limits = bounds(plan.request)
        label = _label(survey, job_id, limits)
        keys = held.keys = boot.make_keys(job_id)
        user_data = boot.cloud_config(keys, job_id, settings.user, settings.ssh_port, limits)
        held.lease = Lease(survey.clients, settings, label, user_data, say)
        used_elsewhere(survey, label, say)
        offer, instances = held.lease.acquire(survey.offers, plan.topology.nodes)
        held.offer = offer
        ids = [instance.id for instance in instances]
        say(StartStep(f"{', '.join(ids)} run in {offer.zone} …", "booting", ids))
        replacing.prepare_machines(survey, instances, say)
        check(plan, held.machines, survey.requirements)
        return rented.nodes_of(held.machines, offer, held.lease)

    def replace(
        self, survey: RentedSurvey, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Replace lost machines by others of the same type and zone as soon as EC2 has capacity."""
        return replacing.replace_lost(survey, lost, bounds(survey.plan.request), say, stop)

    def attach(
        self, plan: Plan, accesses: Sequence[RentedAccess]
    ) -> tuple[RentedSurvey, Sequence[Node]]:
        """Return the machines of a pool that another notebook rented from this plan.

        Rents nothing and connects to nothing yet.
        """
        settings, first = plan.request.cloud, accesses[0]
        clients = AwsClients.of(settings)
        lease = Lease(clients, settings, first.label, "", lambda text: None)
        lease.adopt(first.region, [access.instance for access in accesses])
        if ended := rented.ended_instances(clients, accesses):
            if len(ended) == len(accesses):
                lease.release(exact=False)
            raise rented.gone_error(ended, len(accesses))
        machines, nodes = rented.adopt_machines(accesses, lease)
        held = HeldMachines(lease, first.offer, machines=machines)
        return RentedSurvey(plan, clients, (), first.agent.installation.requirements, held), nodes


def needs(request: PoolRequest, shape: Topology, say: Say) -> tuple[Image, Requirements]:
    """Return image and requirements as for SSH hosts, plus system packages."""
    image, requirements = ssh.needs(request, shape, say)
    if not image.apt:
        return image, requirements
    return image, replace(
        requirements, commands=(install_system_packages(image.apt), *requirements.commands)
    )


def install_system_packages(names: Sequence[str]) -> str:
    """Return sh that installs packages on a machine whose user may use sudo."""
    install = (
        f"sudo -n env DEBIAN_FRONTEND=noninteractive apt-get {_APT} -y install "
        f"{' '.join(map(quote, names))}"
    )
    return f"sudo -n apt-get {_APT} update && {install}"


def used_elsewhere(survey: RentedSurvey, label: Label, say: Say) -> None:
    """Look for a pool with this name by its tags, independent of local records.

    Reports a pool that was rented with these credentials from another machine.

    Raises:
        CloudError: it was rented from this machine, by a notebook that left no record here.
    """
    filters = tags.filters(owner=label.owner, pool=label.pool)
    for region in dict.fromkeys(offer.region for offer in survey.offers):
        jobs: dict[str, set[str]] = {}
        for instance in sweep.instances(survey.clients, region, filters, sweep.LISTED_STATES):
            jobs.setdefault(instance.tag(tags.CLIENT), set()).add(instance.tag(tags.JOB))
        for client, job_ids in jobs.items():
            listed = (
                f"pool {label.pool!r} is in {region} already "
                f"({', '.join(sorted(job_ids))}, rented by {client})"
            )
            if client != label.client:
                say(listed)
                continue
            raise CloudError(
                "in_use",
                "",
                f"{listed}, and its key is no longer here, so it cannot be attached",
                f"%sky_down {min(job_ids)} --provider aws ends it; "
                "or give the new one another name (%sky_pool NAME …)",
            )


def bounds(request: PoolRequest) -> WatchdogBounds:
    """Return the limits after which the machines of a pool end themselves."""
    return WatchdogBounds(request.idle or UNBOUNDED, request.max_lifetime or UNBOUNDED)


def check(plan: Plan, machines: Sequence[ssh.Machine], requirements: Requirements) -> None:
    """Raise RequestError if a machine lacks what its type has.

    Above all, this finds GPUs that are unknown to the machine's driver.
    """
    inventories = [
        replace(machine.facts.inventory(requirements.minor), hostname=machine.name)
        for machine in machines
    ]
    plan_over(plan.request, inventories, "aws")


def _label(survey: RentedSurvey, job: str, limits: WatchdogBounds) -> Label:
    pool = job.rpartition("-")[0] or job
    return Label(
        pool, job, sweep.owner_of(survey.clients), _client(), time.time() + limits.lifetime
    )


def _client() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
