"""Check machines before the first cell, and replace broken and lost ones.

Broken machines are replaced once; lost ones as soon as capacity returns. The check needs an
interpreter but no packages, so it runs while these are installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skymagic.bootstrap.provision import probe
from skymagic.cluster import Node, checking
from skymagic.cluster.health import Findings
from skymagic.display.live import ask_yes_no
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, ProvisionError
from skymagic.plan.units import verb_form
from skymagic.providers import ssh
from skymagic.providers.aws import boot, reaching, rented
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.errors import ErrorKind
from skymagic.providers.aws.launch import RunningInstance
from skymagic.providers.aws.rented import RentedSurvey
from skymagic.providers.provider import Say
from skymagic.ssh.config import Endpoint

RETRY_SECONDS = 60.0
"""Seconds between two attempts to rent a machine while EC2 has none.

Capacity returns within minutes or hours, and each attempt is a call to its API.
"""
RETURNING = (ErrorKind.CAPACITY, ErrorKind.PRICE, ErrorKind.THROTTLED)
"""Errors that rented nothing and may disappear a little later.

After other errors, repeating the launch might rent too many machines.
"""
LEAST_SECONDS = 600.0
"""Remaining lifetime of a pool below which no replacement is rented, in seconds."""


def prepare_machines(survey: RentedSurvey, instances: Sequence[RunningInstance], say: Say) -> None:
    """Prepare the machines of a pool, and replace unusable ones once. Raises ProvisionError."""
    held, running = survey.held, list(instances)
    lease, offer = held.rented
    machines, findings = set_up_machines(survey, instances, say)
    held.machines += machines
    if not findings.broken:
        return
    if 0 in findings.broken and _through_head(survey):
        raise ProvisionError(
            f"{broken(findings)}; the other machines are reached through it: start again",
            code="machine-broken",
        )
    agree_to_replace(survey, findings)
    replacements = lease.replace(offer, [running[index].id for index in findings.broken])
    news, _ = set_up_machines(
        survey, replacements, say, None if 0 in findings.broken else held.machines[0].endpoint
    )
    for index, instance, new in zip(findings.broken, replacements, news, strict=True):
        held.machines[index].close()
        held.machines[index], running[index] = new, instance
    again = check_machines(survey, held.machines, running, say)
    print_findings(again)
    if again.broken:
        raise ProvisionError(
            f"{broken(again)}; other machines were rented once, and not again",
            code="machine-broken",
        )


def set_up_machines(
    survey: RentedSurvey,
    instances: Sequence[RunningInstance],
    say: Say,
    head: Endpoint | None = None,
) -> tuple[list[ssh.Machine], Findings]:
    """Connect to running machines, set them up in parallel, and check them meanwhile.

    Args:
        head: endpoint of the pool's first machine; None if it is the first of these.
    """
    held = survey.held
    assert held.keys is not None
    reached = reaching.endpoints(instances, held.keys, survey.plan.request.cloud, head)
    connections = reaching.connect(survey.clients, instances, reached, say)
    held.connections += connections  # so that they are closed even if the next steps fail
    facts = ssh.call_concurrently(
        lambda connection: probe(connection, survey.requirements), connections
    )
    machines = list(map(ssh.Machine, reached, connections, facts))

    def check_beside() -> Findings | None:
        for machine in machines:
            machine.runnable.wait()
        return (
            check_machines(survey, machines, instances, say)
            if all(machine.runs for machine in machines)
            else None
        )

    try:
        _, findings = ssh.call_concurrently(
            lambda job: job(),
            [lambda: ssh.set_up(machines, survey.requirements, say, alone=True), check_beside],
        )
        # findings that the installation itself may have caused are checked again after it
        if findings is None or findings.may_pass:
            findings = check_machines(survey, machines, instances, say)
    except BaseException:
        ssh.call_concurrently(ssh.Machine.close, machines)
        raise
    print_findings(findings)
    return machines, findings


def check_machines(
    survey: RentedSurvey,
    machines: Sequence[ssh.Machine],
    instances: Sequence[RunningInstance],
    say: Say,
) -> Findings:
    """Check machines in the order of their instances. They need not be connected to each other."""
    _, offer = survey.held.rented
    nodes = [
        replace(machine.node(index, ""), address=instance.private)
        for index, (machine, instance) in enumerate(zip(machines, instances, strict=True))
    ]
    return checking.check(nodes, expected=offer.gpus, say=say)


def print_findings(findings: Findings) -> None:
    """Print noteworthy findings, on the thread of a cell."""
    for verdict in findings.verdicts:
        # a note remains visible after the start's own display has ended
        print_note(f"[{findings.nodes[verdict.node].name}: {verdict.problem}]")


def agree_to_replace(survey: RentedSurvey, findings: Findings) -> None:
    """Ask for permission to replace the broken machines. Raises ProvisionError without it."""
    _, offer = survey.held.rented
    description, many = broken(findings), len(findings.broken)
    cost = (
        "at an unknown price" if offer.price is None else f"for ${many * offer.price:.2f} per hour"
    )
    instead = f"in {verb_form(many, 'its', 'their')} place"
    replacements = (
        f"{many} × {offer.instance_type} {instead} {cost}, "
        f"once {verb_form(many, 'it is', 'they are')} ended"
    )
    if not (survey.plan.request.yes or ask_yes_no(f"{description}: {replacements}")):
        raise ProvisionError(
            f"{description}; nothing else was rented {instead}: add -y, or start again",
            code="machine-broken",
        )


def broken(findings: Findings) -> str:
    """Describe the unusable machines, each with the reason."""
    return "; ".join(
        f"{findings.nodes[verdict.node].name}: {verdict.problem}"
        for verdict in findings.verdicts
        if verdict.broken
    )


def replace_lost(
    survey: RentedSurvey,
    lost: Sequence[int],
    limits: WatchdogBounds,
    say: Say,
    stop: threading.Event,
) -> Mapping[int, Node]:
    """Replace lost machines from the same offer as soon as EC2 has capacity.

    See `provider.Replaceable`.
    """
    held = survey.held
    lease, offer = held.rented
    if 0 in lost and _through_head(survey):
        raise ProvisionError(
            "the other machines are reached through the first one, which is gone",
            code="machine-broken",
        )
    held.keys = held.keys or boot.kept_keys(lease.label.job)
    lost_ids = [held.machines[index].name for index in lost]
    head = None if 0 in lost else held.machines[0].endpoint
    while (instances := _wait_for_replacements(survey, lost_ids, limits, say, stop)) is not None:
        ids = [instance.id for instance in instances]
        try:
            new, findings = set_up_machines(survey, instances, say, head)
            nodes = rented.nodes_of(new, offer, lease, lost)
        except BaseException:
            lease.end(offer.region, ids)
            raise
        if not findings.broken:
            for index, machine in zip(lost, new, strict=True):
                held.machines[index].close()
                held.machines[index] = machine
            return dict(zip(lost, nodes, strict=True))
        say(broken(findings))
        lost_ids = ids
    return {}


def _wait_for_replacements(
    survey: RentedSurvey,
    lost: Sequence[str],
    limits: WatchdogBounds,
    say: Say,
    stop: threading.Event,
) -> list[RunningInstance] | None:
    """Return replacements as soon as they run, or None once they are no longer needed."""
    lease, offer = survey.held.rented
    settings = survey.plan.request.cloud
    assert survey.held.keys is not None
    while not stop.is_set():
        remaining = lease.label.ends - time.time()
        if remaining < LEAST_SECONDS:
            raise ProvisionError(
                "the pool's lifetime is nearly over (--max-lifetime)", code="lifetime"
            )
        bounds = replace(limits, lifetime=remaining)  # it ends with the others
        lease.user_data = boot.cloud_config(
            survey.held.keys, lease.label.job, settings.user, settings.ssh_port, bounds
        )
        try:
            return lease.replace(offer, lost)
        except CloudError as problem:
            if problem.kind not in RETURNING:
                raise
            spot = offer.spot and problem.kind == ErrorKind.CAPACITY
            hint = "; %sky_pool without --spot rents them on demand" if spot else ""
            say(
                f"no replacement for {', '.join(lost)} yet ({problem.reason}); "
                f"asking again every minute{hint}"
            )
        stop.wait(RETRY_SECONDS * survey.clients.deadline_factor)
    return None


def _through_head(survey: RentedSurvey) -> bool:
    """Return True if other machines are reached through the first one."""
    _, offer = survey.held.rented
    return (
        offer.cards > 1
        and survey.plan.topology.nodes > 1
        and not survey.plan.request.cloud.use_private_ips
    )
