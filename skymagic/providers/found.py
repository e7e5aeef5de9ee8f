"""The user's pools on hosts of theirs, found and ended without knowing of them: one script asks each host what its agents have written."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from skymagic.bootstrap.running import end_script, list_script, parse_end, parse_list
from skymagic.display.live import asks_secrets
from skymagic.errors import HostError, HostsError, RequestError
from skymagic.providers.ssh import side_by_side
from skymagic.ssh import connecting
from skymagic.ssh.config import endpoints
from skymagic.ssh.host import HostConnection
from skymagic.wire.record import AgentRecord


@dataclass(frozen=True)
class FoundNode:
    """A node of a pool that runs.

    Attributes:
        host: what the user calls the machine.
        clock: seconds since 1970 by its clock, when it was asked.
    """

    host: str
    clock: float
    record: AgentRecord


@dataclass(frozen=True)
class FoundPool:
    """A pool that runs, as far as the hosts that were asked know of it.

    Attributes:
        nodes: those that were found, by number; there may be more on hosts that were not asked.
    """

    name: str
    job_id: str
    nodes: tuple[FoundNode, ...]

    @property
    def elsewhere(self) -> int:
        """How many of its nodes were not found."""
        return max(one.record.nodes for one in self.nodes) - len(self.nodes)


@dataclass(frozen=True)
class Found:
    """What hosts have said.

    Attributes:
        pools: by the time of their start, the oldest first.
        reached: the hosts that were asked.
        unreached: host → why it could not be asked.
        unread: host → agents there whose record this version cannot read.
        here: whether this machine was asked, without any connection.
    """

    pools: tuple[FoundPool, ...]
    reached: tuple[str, ...] = ()
    unreached: dict[str, str] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    here: bool = False


def find(hosts: Iterable[str]) -> Found:
    """What of this user's pools runs on hosts, in one round trip to each; on this machine where none are named.

    Raises:
        RequestError: a host's name is none.
    """
    hosts = tuple(hosts)
    said, unreached = ask(hosts, lambda _: list_script(), parse_list)
    nodes: dict[tuple[str, str, int], FoundNode] = {}
    for host, running in said.items():
        for record in running.records:  # a machine may have been asked by two names
            nodes.setdefault(
                (record.boot, record.job_id, record.node), FoundNode(host, running.clock, record)
            )
    unread = {host: running.unread for host, running in said.items() if running.unread}
    return Found(_pools(nodes.values()), tuple(said), unreached, unread, not hosts)


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
    """The pools that are to end: of this name or job id, all of them, or the only one.

    Raises:
        RequestError: there is none, or it is not clear which one is meant.
    """
    pools = [one for one in found.pools if name in (None, one.name, one.job_id)]
    if not pools:
        there = f"; available: {', '.join(one.name for one in found.pools)}" if found.pools else ""
        raise RequestError(f"no pool {f'{name!r} ' if name else ''}was found there{there}")
    if len(pools) > 1 and not every:
        listed = ", ".join(f"{one.job_id} ({one.nodes[0].record.client})" for one in pools)
        raise RequestError(
            f"{len(pools)} pools were found: name one of them, or use --all: {listed}"
        )
    return tuple(pools)


def end(pools: Sequence[FoundPool], who: str, *, here: bool = False) -> dict[str, str]:
    """End pools on the hosts where they were found, whatever they do: ranks, scripts, agents, and what they have written.

    Args:
        who: what the pools' own notebooks are told, as in "the pool was ended by …".
        here: whether they were found on this machine, without a connection.

    Returns:
        host → what was not ended there, and why; empty when nothing is left.
    """
    jobs: dict[str, list[str]] = {}
    for pool in pools:
        for node in pool.nodes:
            jobs.setdefault(node.host, []).append(pool.job_id)
    said, problems = ask(() if here else jobs, lambda host: end_script(jobs[host], who), parse_end)
    for host, (_, left) in said.items():
        if left:
            problems[host] = (
                "it does not exit, not even on SIGKILL: a process is stuck in the system"
            )
    return problems


# -- One script on many hosts, over connections of its own: what each has said, and why the others could not be asked ---

T = TypeVar("T")
SCRIPT_TIMEOUT = 120.0
"""Seconds that a script may take on a host."""


def ask(
    hosts: Iterable[str], script: Callable[[str], str], parse: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Run a script on hosts, side by side.

    Args:
        hosts: as users write them, ranges too; none for this machine, without any connection.
        script: a host's label → POSIX sh.
        parse: reads what the script has said; raises ValueError where it did not come to its end.

    Returns:
        (host → its answer, host → why there is none), in the order of the hosts.

    Raises:
        RequestError: a host's name is none.
    """
    if not (hosts := tuple(hosts)):
        here = socket.gethostname()
        done = subprocess.run(
            ["/bin/sh"], input=script(here), capture_output=True, text=True, timeout=SCRIPT_TIMEOUT
        )
        return {here: parse(done.stdout)}, {}
    connections, unreached = _connect(hosts)

    def answer(one: HostConnection) -> T | HostError:
        try:
            done = one.run(script(one.label), timeout=SCRIPT_TIMEOUT)
            return parse(done.out)
        except HostError as problem:
            return problem
        except ValueError as problem:
            said = done.err.strip()[-500:]
            return HostError(one.label, f"{problem}" + (f": {said}" if said else ""))

    try:
        answers = side_by_side(answer, connections)
    finally:
        side_by_side(HostConnection.close, connections)
    said: dict[str, T] = {}
    for one, found in zip(connections, answers, strict=True):
        if isinstance(found, HostError):
            unreached[one.label] = found.reason
        else:
            said[one.label] = found
    return said, unreached


def _connect(hosts: Iterable[str]) -> tuple[list[HostConnection], dict[str, str]]:
    """Connections to the hosts that can be reached, and why the others cannot."""
    left = endpoints(hosts)
    unreached: dict[str, str] = {}
    while left:
        try:
            return connecting.connect_all(left, asks_secrets()), unreached
        except (HostError, HostsError) as problem:
            failures = problem.failures if isinstance(problem, HostsError) else [problem]
            unreached |= {one.host: one.reason for one in failures}
            left = [one for one in left if one.label not in unreached]
    return [], unreached
