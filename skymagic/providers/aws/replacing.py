"""Machines checked before the first cell, and others in the place of broken ones, once, and of lost ones, as capacity returns.

The check needs an interpreter and no packages, so that it runs while these are installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skymagic.bootstrap.provision import probe
from skymagic.cluster import Node, checking
from skymagic.cluster.health import Findings
from skymagic.display.live import confirmed
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, ProvisionError
from skymagic.plan.units import agreeing
from skymagic.providers import ssh
from skymagic.providers.aws import boot, reaching, rented
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.errors import ErrorKind
from skymagic.providers.aws.launch import RunningInstance
from skymagic.providers.aws.rented import RentedSurvey
from skymagic.providers.provider import Say
from skymagic.ssh.config import Endpoint

RETRY_SECONDS = 60.0
"""Between two attempts to rent a machine where EC2 has none: capacity returns within minutes or hours, and each is a call of its API."""
RETURNING = (ErrorKind.CAPACITY, ErrorKind.PRICE, ErrorKind.THROTTLED)
"""What may be otherwise a little later, and has rented nothing. After other errors a second launch might be one too many."""
LEAST_SECONDS = 600.0
"""Of a pool's lifetime for which a machine is still rented."""


def acquired(survey: RentedSurvey, instances: Sequence[RunningInstance], say: Say) -> None:
    """The machines of a pool, ready; others come once in the place of those that cannot be worked with. Raises ProvisionError."""
    held, running = survey.held, list(instances)
    lease, offer = held.taken
    machines, found = ready(survey, instances, say)
    held.machines += machines
    if not found.broken:
        return
    if 0 in found.broken and _through_head(survey):
        raise ProvisionError(
            f"{broken(found)}; the other machines are reached through it: start again"
        )
    agree_to_replace(survey, found)
    others = lease.replace(offer, [running[index].id for index in found.broken])
    news, _ = ready(survey, others, say, None if 0 in found.broken else held.machines[0].endpoint)
    for index, one, new in zip(found.broken, others, news, strict=True):
        held.machines[index].close()
        held.machines[index], running[index] = new, one
    again = check_machines(survey, held.machines, running, say)
    print_findings(again)
    if again.broken:
        raise ProvisionError(f"{broken(again)}; other machines were rented once, and not again")


def ready(
    survey: RentedSurvey,
    instances: Sequence[RunningInstance],
    say: Say,
    head: Endpoint | None = None,
) -> tuple[list[ssh.Machine], Findings]:
    """Machines that run, reached, set up side by side, and checked meanwhile.

    Args:
        head: leads to the pool's first machine; None where it is the first of these.
    """
    held = survey.held
    assert held.keys is not None
    reached = reaching.endpoints(instances, held.keys, survey.plan.request.cloud, head)
    connections = reaching.connect(survey.clients, instances, reached, say)
    held.connections += connections  # so that they are closed whatever follows
    facts = ssh.side_by_side(lambda one: probe(one, survey.requirements, False), connections)
    machines = list(map(ssh.Machine, reached, connections, facts))

    def check_beside() -> Findings | None:
        for one in machines:
            one.runnable.wait()
        return (
            check_machines(survey, machines, instances, say)
            if all(one.runs for one in machines)
            else None
        )

    try:
        _, found = ssh.side_by_side(
            lambda job: job(),
            [lambda: ssh.set_up(machines, survey.requirements, say, alone=True), check_beside],
        )
        if (
            found is None or found.may_pass
        ):  # what may have been the installation's own doing: again after it
            found = check_machines(survey, machines, instances, say)
    except BaseException:
        ssh.side_by_side(ssh.Machine.close, machines)
        raise
    print_findings(found)
    return machines, found


def check_machines(
    survey: RentedSurvey,
    machines: Sequence[ssh.Machine],
    instances: Sequence[RunningInstance],
    say: Say,
) -> Findings:
    """Check machines, in the order of their instances; they need not have met."""
    _, offer = survey.held.taken
    nodes = [
        replace(machine.node(index, ""), address=one.private)
        for index, (machine, one) in enumerate(zip(machines, instances, strict=True))
    ]
    return checking.check(nodes, expected=offer.gpus, say=say)


def print_findings(found: Findings) -> None:
    """Say what is worth knowing of machines, on the thread of a cell."""
    for one in found.verdicts:
        print_note(
            f"[{found.nodes[one.node].name}: {one.words}]"
        )  # it stays when the start's own display has ended


def agree_to_replace(survey: RentedSurvey, found: Findings) -> None:
    """Go on to replace the machines that are broken, or end the start. Raises ProvisionError where nobody agrees."""
    _, offer = survey.held.taken
    words, many = broken(found), len(found.broken)
    cost = (
        "at an unknown price" if offer.price is None else f"for ${many * offer.price:.2f} per hour"
    )
    place = f"in {agreeing(many, 'its', 'their')} place"
    others = f"{many} × {offer.instance_type} {place} {cost}, once {agreeing(many, 'it is', 'they are')} ended"
    if not (survey.plan.request.yes or confirmed(f"{words}: {others}")):
        raise ProvisionError(f"{words}; nothing else was rented {place}: add -y, or start again")


def broken(found: Findings) -> str:
    """The machines that cannot be worked with, each with the reason."""
    return "; ".join(
        f"{found.nodes[one.node].name}: {one.words}" for one in found.verdicts if one.broken
    )


def lost_replaced(
    survey: RentedSurvey,
    lost: Sequence[int],
    limits: WatchdogBounds,
    say: Say,
    stop: threading.Event,
) -> Mapping[int, Node]:
    """Others in the place of machines that are gone, of the same offer, as soon as EC2 has them (`provider.Replaceable`)."""
    held = survey.held
    lease, offer = held.taken
    if 0 in lost and _through_head(survey):
        raise ProvisionError("the other machines are reached through the first one, which is gone")
    held.keys = held.keys or boot.kept_keys(lease.label.job)
    gone = [held.machines[index].name for index in lost]
    head = None if 0 in lost else held.machines[0].endpoint
    while (instances := _rented(survey, gone, limits, say, stop)) is not None:
        ids = [one.id for one in instances]
        try:
            new, found = ready(survey, instances, say, head)
            nodes = rented.nodes_of(new, offer, lease, lost)
        except BaseException:
            lease.end(offer.region, ids)
            raise
        if not found.broken:
            for index, one in zip(lost, new, strict=True):
                held.machines[index].close()
                held.machines[index] = one
            return dict(zip(lost, nodes, strict=True))
        say(broken(found))
        gone = ids
    return {}


def _rented(
    survey: RentedSurvey,
    gone: Sequence[str],
    limits: WatchdogBounds,
    say: Say,
    stop: threading.Event,
) -> list[RunningInstance] | None:
    """Machines that run, as soon as there are some; None once nobody wants them any more."""
    lease, offer = survey.held.taken
    settings = survey.plan.request.cloud
    assert survey.held.keys is not None
    while not stop.is_set():
        left = lease.label.ends - time.time()
        if left < LEAST_SECONDS:
            raise ProvisionError("the pool's lifetime is nearly over (--max-lifetime)")
        bounds = replace(limits, lifetime=left)  # it ends with the others
        lease.user_data = boot.cloud_config(
            survey.held.keys, lease.label.job, settings.user, settings.ssh_port, bounds
        )
        try:
            return lease.replace(offer, gone)
        except CloudError as problem:
            if problem.kind not in RETURNING:
                raise
            spot = offer.spot and problem.kind == ErrorKind.CAPACITY
            hint = "; %sky_pool without --spot rents them on demand" if spot else ""
            say(
                f"no replacement for {', '.join(gone)} yet ({problem.reason}); asking again every minute{hint}"
            )
        stop.wait(RETRY_SECONDS * survey.clients.deadline_factor)
    return None


def _through_head(survey: RentedSurvey) -> bool:
    """Whether other machines are reached through the first one."""
    _, offer = survey.held.taken
    return (
        offer.cards > 1
        and survey.plan.topology.nodes > 1
        and not survey.plan.request.cloud.use_private_ips
    )
