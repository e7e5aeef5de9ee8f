"""Machines in the place of others: of those that a check finds broken before the first cell, and of those that are lost later."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skymagic.bootstrap.provision import probe
from skymagic.cluster import Node
from skymagic.cluster.health import Findings
from skymagic.errors import CloudError, ProvisionError
from skymagic.providers import ssh
from skymagic.providers.aws import access, keys, machine, nvme, preflight, userdata
from skymagic.providers.aws.errors import Kind
from skymagic.providers.aws.launch import Instance
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.offer import Offer
from skymagic.providers.aws.survey import Rented
from skymagic.providers.aws.watchdog import Bounds
from skymagic.providers.provider import Say
from skymagic.ssh.config import Endpoint

RETRY_SECONDS = 60.0
"""Between two attempts to rent a machine where EC2 has none: capacity returns within minutes or hours, and each is a call of its API."""
RETURNING = {kind.name.lower() for kind in (Kind.CAPACITY, Kind.PRICE, Kind.THROTTLED)}
"""What may be otherwise a little later, and has rented nothing. After other errors a second launch might be one too many."""
LEAST_SECONDS = 600.0
"""Of a pool's lifetime for which a machine is still rented."""


def ready(
    survey: Rented,
    offer: Offer,
    instances: Sequence[Instance],
    made: keys.PoolKeys,
    say: Say,
    head: Endpoint | None = None,
) -> tuple[list[ssh.Machine], Findings]:
    """Machines that run, reached, set up side by side, and checked meanwhile.

    Args:
        head: leads to the pool's first machine; None where it is the first of these.
    """
    held = survey.held
    reached = machine.endpoints(instances, made, survey.plan.request.cloud, head)
    connections = machine.connect(survey.clients, instances, reached, say)
    held.connections += connections
    if offer.nvme:
        ssh.side_by_side(lambda one: nvme.use(one, say), connections)
    facts = ssh.side_by_side(lambda one: probe(one, survey.requirements, False), connections)
    machines = list(map(ssh.Machine, reached, connections, facts))
    try:
        found = preflight.during(
            lambda: ssh.set_up(machines, survey.requirements, say, alone=True),
            machines,
            instances,
            offer,
            say,
            survey.clients.deadline_factor,
        )
    except BaseException:
        ssh.side_by_side(ssh.Machine.close, machines)
        raise
    return machines, preflight.tell(found)


def acquired(survey: Rented, offer: Offer, instances: Sequence[Instance], made: keys.PoolKeys, say: Say) -> None:
    """The machines of a pool, ready; others come once in the place of those that cannot be worked with. Raises ProvisionError."""
    held, running = survey.held, list(instances)
    assert held.lease is not None
    machines, found = ready(survey, offer, instances, made, say)
    held.machines += machines
    if not found.broken:
        return
    if 0 in found.broken and _through_head(survey, offer):
        raise ProvisionError(f"{preflight.broken(found)}; the other machines are reached through it: start again")
    preflight.agreed(found, offer, survey.plan.request.yes)
    others = held.lease.replace(offer, [running[index].id for index in found.broken])
    head = None if 0 in found.broken else held.machines[0].endpoint
    news, _ = ready(survey, offer, others, made, say, head)
    for index, one, new in zip(found.broken, others, news, strict=True):
        held.machines[index].close()
        held.machines[index], running[index] = new, one
    # the links between the new ones and the others too
    nodes = access.nodes(held.machines, offer, held.lease)
    again = preflight.tell(preflight.look(nodes, running, offer, say, survey.clients.deadline_factor))
    if again.broken:
        raise ProvisionError(f"{preflight.broken(again)}; other machines were rented once, and not again")


def lost_replaced(
    survey: Rented, lost: Sequence[int], limits: Bounds, say: Say, stop: threading.Event
) -> Mapping[int, Node]:
    """Others in the place of machines that are gone, of the same offer, as soon as EC2 has them (`provider.Replaceable`)."""
    held = survey.held
    lease, offer = held.lease, held.offer
    assert lease is not None and offer is not None
    if 0 in lost and _through_head(survey, offer):
        raise ProvisionError("the other machines are reached through the first one, which is gone")
    made = held.keys or keys.again(lease.label.job)
    gone = [held.machines[index].name for index in lost]
    head = None if 0 in lost else held.machines[0].endpoint
    while (instances := _rented(survey, lease, offer, gone, made, limits, say, stop)) is not None:
        ids = [one.id for one in instances]
        try:
            new, found = ready(survey, offer, instances, made, say, head)
            nodes = access.nodes(new, offer, lease, lost)
        except BaseException:
            lease.end(offer.region, ids)
            raise
        if not found.broken:
            for index, one in zip(lost, new, strict=True):
                held.machines[index].close()
                held.machines[index] = one
            return dict(zip(lost, nodes, strict=True))
        say(preflight.broken(found))
        gone = ids
    return {}


def _rented(
    survey: Rented,
    lease: Lease,
    offer: Offer,
    gone: Sequence[str],
    made: keys.PoolKeys,
    limits: Bounds,
    say: Say,
    stop: threading.Event,
) -> list[Instance] | None:
    """Machines that run, as soon as there are some; None once nobody wants them any more."""
    settings = survey.plan.request.cloud
    while not stop.is_set():
        left = lease.label.ends - time.time()
        if left < LEAST_SECONDS:
            raise ProvisionError("the pool's lifetime is nearly over (--max-lifetime)")
        bounds = replace(limits, lifetime=left)  # it ends with the others
        lease.user_data = userdata.cloud_config(made, lease.label.job, settings.user, settings.ssh_port, bounds)
        try:
            return lease.replace(offer, gone)
        except CloudError as problem:
            if problem.kind not in RETURNING:
                raise
            hint = (
                "; %sky_pool without --spot rents them on demand" if offer.spot and problem.kind == "capacity" else ""
            )
            say(f"no machine in the place of {', '.join(gone)} yet ({problem.reason}); asking again every minute{hint}")
        stop.wait(RETRY_SECONDS * survey.clients.deadline_factor)
    return None


def _through_head(survey: Rented, offer: Offer) -> bool:
    """Whether other machines are reached through the first one."""
    return offer.cards > 1 and survey.plan.topology.nodes > 1 and not survey.plan.request.cloud.use_private_ips
