"""Machines rented from EC2 for one pool: planned, asked for, reached, used as hosts of SSH are, and given back."""

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
from skymagic.plan.renting import bounded, plan_rented
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
"""A machine that boots may hold the lock."""
UNBOUNDED = 365 * 86400.0
"""Seconds for a limit that the user has switched off."""


class AWS:
    """The provider of EC2's machines."""

    def plan(self, request: PoolRequest, say: Say) -> RentedSurvey:
        """Find out what is offered and what it costs; nothing is made."""
        settings = request.cloud
        clients = AwsClients.of(settings)
        request = bounded(request)
        reaching.jump(settings)
        image, requirements = needs(request, topology(request), say)
        try:
            found = market.survey(request, clients)
        except CloudError as problem:
            if not request.dry_run or problem.kind != "credentials":
                raise
            found = market.estimated(request, clients, problem.reason)
        offers = market.choice(request, found)
        plan = plan_rented(request, listing.rental(offers, found, request.nodes or 1))
        return RentedSurvey(replace(plan, image=image), clients, offers, requirements)

    def acquire(self, survey: RentedSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Rent them all together, connect to them by the keys that they were given, and set them up side by side."""
        plan, held, settings = survey.plan, survey.held, survey.plan.request.cloud
        reaching.check_way(settings)
        limits = bounds(plan.request)
        label = _label(survey, job_id, limits)
        made = held.keys = boot.make_keys(job_id)
        user_data = boot.cloud_config(made, job_id, settings.user, settings.ssh_port, limits)
        held.lease = Lease(survey.clients, settings, label, user_data, say)
        used_elsewhere(survey, label, say)
        offer, instances = held.lease.acquire(survey.offers, plan.topology.nodes)
        held.offer = offer
        ids = [one.id for one in instances]
        say(StartStep(f"{', '.join(ids)} run in {offer.zone} …", "booting", ids))
        replacing.acquired(survey, instances, say)
        check(plan, held.machines, survey.requirements)
        return rented.nodes_of(held.machines, offer, held.lease)

    def replace(
        self, survey: RentedSurvey, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Others in the place of machines that are gone, of the same type and in the same zone, as soon as EC2 has them."""
        return replacing.lost_replaced(survey, lost, bounds(survey.plan.request), say, stop)

    def attach(
        self, plan: Plan, accesses: Sequence[RentedAccess]
    ) -> tuple[RentedSurvey, Sequence[Node]]:
        """The machines of a pool that another notebook has rented from this plan; nothing is rented, or connected to yet."""
        settings, first = plan.request.cloud, accesses[0]
        clients = AwsClients.of(settings)
        lease = Lease(clients, settings, first.label, "", lambda text: None)
        lease.take_up(first.region, [one.instance for one in accesses])
        if ended := rented.ended_instances(clients, accesses):
            if len(ended) == len(accesses):
                lease.release(exact=False)
            raise rented.gone_error(ended, len(accesses))
        machines, nodes = rented.taken_up(accesses, lease)
        held = HeldMachines(lease, first.offer, machines=machines)
        return RentedSurvey(plan, clients, (), first.agent.installation.requirements, held), nodes


def needs(request: PoolRequest, shape: Topology, say: Say) -> tuple[Image, Requirements]:
    """As machines of one's own, and system packages."""
    image, requirements = ssh.needs(request, shape, say)
    if not image.apt:
        return image, requirements
    return image, replace(
        requirements, commands=(install_system_packages(image.apt), *requirements.commands)
    )


def install_system_packages(names: Sequence[str]) -> str:
    """sh that installs them, on a machine whose user may use sudo."""
    install = f"sudo -n env DEBIAN_FRONTEND=noninteractive apt-get {_APT} -y install {' '.join(map(quote, names))}"
    return f"sudo -n apt-get {_APT} update && {install}"


def used_elsewhere(survey: RentedSurvey, label: Label, say: Say) -> None:
    """Look for a pool of this name by its tags, whatever is kept here: of somebody with these credentials on another machine it is
    said that it is there.

    Raises:
        CloudError: it was rented from this machine, by a notebook of which nothing is known here any more.
    """
    filters = tags.filters(owner=label.owner, pool=label.pool)
    for region in dict.fromkeys(one.region for one in survey.offers):
        jobs: dict[str, set[str]] = {}
        for one in sweep.instances(survey.clients, region, filters, sweep.LISTED_STATES):
            jobs.setdefault(tags.tag(one, tags.CLIENT), set()).add(tags.tag(one, tags.JOB))
        for client, theirs in jobs.items():
            listed = f"pool {label.pool!r} is in {region} already ({', '.join(sorted(theirs))}, rented by {client})"
            if client != label.client:
                say(listed)
                continue
            raise CloudError(
                "in_use", "", f"{listed}, and its key is no longer here, so it cannot be attached",
                f"%sky_down {min(theirs)} --provider aws ends it; or give the new one another name (%sky_pool NAME …)",
            )  # fmt: skip


def bounds(request: PoolRequest) -> WatchdogBounds:
    """When the machines of a pool end by themselves."""
    return WatchdogBounds(request.idle or UNBOUNDED, request.max_lifetime or UNBOUNDED)


def check(plan: Plan, machines: Sequence[ssh.Machine], requirements: Requirements) -> None:
    """Raise RequestError where a machine has not what its type has: GPUs that its driver does not find, above all."""
    here = [replace(one.facts.inventory(requirements.minor), hostname=one.name) for one in machines]
    plan_over(plan.request, here, "aws")


def _label(survey: RentedSurvey, job: str, limits: WatchdogBounds) -> Label:
    pool = job.rpartition("-")[0] or job
    return Label(
        pool, job, sweep.owner_of(survey.clients), _client(), time.time() + limits.lifetime
    )


def _client() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
