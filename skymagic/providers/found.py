"""Find and end the user's pools on hosts without a local record of them.

One script asks each host what its agents have recorded.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from skymagic.bootstrap.running import end_script, list_script, parse_end, parse_list
from skymagic.display.live import secret_prompt
from skymagic.errors import HostError, HostsError, RequestError
from skymagic.providers.ssh import call_concurrently
from skymagic.ssh import connecting
from skymagic.ssh.config import endpoints
from skymagic.ssh.host import HostConnection
from skymagic.wire.record import AgentRecord


@dataclass(frozen=True)
class FoundNode:
    """A node of a running pool.

    Attributes:
        host: the machine, as the user names it.
        clock: seconds since 1970 on the host's clock when it answered.
    """

    host: str
    clock: float
    record: AgentRecord


@dataclass(frozen=True)
class FoundPool:
    """A running pool, as far as the hosts that answered know it.

    Attributes:
        nodes: the nodes found, by index; hosts that were not asked may have more.
    """

    name: str
    job_id: str
    nodes: tuple[FoundNode, ...]

    @property
    def elsewhere(self) -> int:
        """Number of the pool's nodes that were not found."""
        return max(node.record.nodes for node in self.nodes) - len(self.nodes)


@dataclass(frozen=True)
class Found:
    """Answers of the hosts.

    Attributes:
        pools: pools by start time, the oldest first.
        reached: hosts that answered.
        unreached: reason by host that could not be reached.
        unread: number of agents, by host, whose record this version cannot read.
        here: True if this machine was searched, without any connection.
    """

    pools: tuple[FoundPool, ...]
    reached: tuple[str, ...] = ()
    unreached: dict[str, str] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    here: bool = False


def find(hosts: Iterable[str]) -> Found:
    """Find this user's running pools on the hosts, in one round trip to each.

    Searches this machine if no hosts are given.

    Raises:
        RequestError: a host name is invalid.
    """
    hosts = tuple(hosts)
    answers, unreached = ask(hosts, lambda _: list_script(), parse_list)
    nodes: dict[tuple[str, str, int], FoundNode] = {}
    for host, running in answers.items():
        for record in running.records:  # a machine may have been asked by two names
            nodes.setdefault(
                (record.boot, record.job_id, record.node), FoundNode(host, running.clock, record)
            )
    unread = {host: running.unread for host, running in answers.items() if running.unread}
    return Found(_pools(nodes.values()), tuple(answers), unreached, unread, not hosts)


def _pools(nodes: Iterable[FoundNode]) -> tuple[FoundPool, ...]:
    jobs: dict[str, list[FoundNode]] = {}
    for node in sorted(nodes, key=lambda one: (one.record.started, one.record.node)):
        jobs.setdefault(node.record.job_id, []).append(node)
    return tuple(
        FoundPool(
            listed[0].record.pool, job, tuple(sorted(listed, key=lambda one: one.record.node))
        )
        for job, listed in jobs.items()
    )


def chosen(found: Found, name: str | None, every: bool) -> tuple[FoundPool, ...]:
    """Return the pools to end: those with this name or job ID, all of them, or the only one.

    Raises:
        RequestError: no pool matches, or the choice is ambiguous.
    """
    matching = [pool for pool in found.pools if name in (None, pool.name, pool.job_id)]
    if not matching:
        available = (
            f"; available: {', '.join(pool.name for pool in found.pools)}" if found.pools else ""
        )
        raise RequestError(
            f"no pool {f'{name!r} ' if name else ''}was found there{available}",
            code="no-pool",
            names=filter(None, [name]),
        )
    if len(matching) > 1 and not every:
        listed = ", ".join(f"{pool.job_id} ({pool.nodes[0].record.client})" for pool in matching)
        raise RequestError(
            f"{len(matching)} pools were found: name one of them, or use --all: {listed}",
            code="pool-ambiguous",
        )
    return tuple(matching)


def end(pools: Sequence[FoundPool], who: str, *, here: bool = False) -> dict[str, str]:
    """End pools on the hosts where they were found: ranks, scripts, agents, and their files.

    Args:
        who: named to the pools' own notebooks, as in "the pool was ended by …".
        here: True if they were found on this machine, without a connection.

    Returns:
        What could not be ended and why, by host; empty if everything ended.
    """
    jobs: dict[str, list[str]] = {}
    for pool in pools:
        for node in pool.nodes:
            jobs.setdefault(node.host, []).append(pool.job_id)
    answers, problems = ask(
        () if here else jobs, lambda host: end_script(jobs[host], who), parse_end
    )
    for host, (_, survivors) in answers.items():
        if survivors:
            problems[host] = (
                "it does not exit, not even on SIGKILL: a process is stuck in the system"
            )
    return problems


# -- One script on many hosts, over separate connections -----------------------------------------

T = TypeVar("T")
SCRIPT_TIMEOUT = 120.0
"""Seconds that a script may take on a host."""


def ask(
    hosts: Iterable[str], script: Callable[[str], str], parse: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Run a script on hosts in parallel.

    Args:
        hosts: hosts as users write them, including ranges; none for this machine, without any
            connection.
        script: returns POSIX sh for a host's label.
        parse: parses the script's output; raises ValueError if the script did not finish.

    Returns:
        Answers by host, and reasons by host that gave no answer, in the order of the hosts.

    Raises:
        RequestError: a host name is invalid.
    """
    if not (hosts := tuple(hosts)):
        hostname = socket.gethostname()
        done = subprocess.run(
            ["/bin/sh"],
            input=script(hostname),
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT,
        )
        return {hostname: parse(done.stdout)}, {}
    connections, unreached = _connect(hosts)

    def answer(one: HostConnection) -> T | HostError:
        try:
            done = one.run(script(one.label), timeout=SCRIPT_TIMEOUT)
            return parse(done.out)
        except HostError as problem:
            return problem
        except ValueError as problem:
            error_output = done.err.strip()[-500:]
            return HostError(
                one.label,
                f"{problem}" + (f": {error_output}" if error_output else ""),
                code="unreached",
            )

    try:
        answers = call_concurrently(answer, connections)
    finally:
        call_concurrently(HostConnection.close, connections)
    results: dict[str, T] = {}
    for connection, outcome in zip(connections, answers, strict=True):
        if isinstance(outcome, HostError):
            unreached[connection.label] = outcome.reason
        else:
            results[connection.label] = outcome
    return results, unreached


def _connect(hosts: Iterable[str]) -> tuple[list[HostConnection], dict[str, str]]:
    """Connect to the reachable hosts.

    Returns the connections, and the reasons for the other hosts.
    """
    remaining = endpoints(hosts)
    unreached: dict[str, str] = {}
    while remaining:
        try:
            return connecting.connect_all(remaining, secret_prompt()), unreached
        except (HostError, HostsError) as problem:
            failures = problem.failures if isinstance(problem, HostsError) else [problem]
            unreached |= {failure.host: failure.reason for failure in failures}
            remaining = [endpoint for endpoint in remaining if endpoint.label not in unreached]
    return [], unreached
