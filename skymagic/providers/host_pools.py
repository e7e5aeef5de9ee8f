"""Find and end the user's pools on hosts without a local record of them.

One script asks each host what its agents have recorded.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from skymagic.bootstrap.running import end_script, list_script, parse_end, parse_list
from skymagic.display import live
from skymagic.display.live import secret_prompt
from skymagic.errors import HostError, HostsError, PoolError
from skymagic.plan.units import count, rank_words, rough_duration
from skymagic.providers.provider import RemotePool, RemotePools
from skymagic.providers.ssh import call_concurrently
from skymagic.ssh import connecting
from skymagic.ssh.config import endpoints
from skymagic.ssh.host import HostConnection
from skymagic.wire.record import AgentRecord


@dataclass(frozen=True)
class HostNode:
    """A node of a running pool.

    Attributes:
        host: the machine, as the user names it.
        clock: seconds since 1970 on the host's clock when it answered.
    """

    columns: ClassVar[tuple[str, ...]] = ("host", "node", "ranks", "GPUs", "state")
    host: str
    clock: float
    record: AgentRecord

    def row(self) -> tuple[object, ...]:
        """Return the node as a row of a table for users."""
        ranks = _numbers(sorted(map(int, self.record.ranks)), "rank")
        gpus = _numbers(self.record.devices, "GPU")
        return self.host, self.record.node, ranks, gpus, self.state

    @property
    def state(self) -> str:
        """The node's activity and when it ends by itself.

        Example: "idle for 12m; its notebook is away for 1h; ends in 18m".
        """
        record, now = self.record, self.clock
        busy = (
            f"a cell runs for {rough_duration(now - record.busy_since)}"
            if record.busy_since
            else ""
        )
        parts = [busy or f"idle for {rough_duration(now - (record.idle_since or record.started))}"]
        if record.away_since:
            parts.append(f"its notebook is away for {rough_duration(now - record.away_since)}")
        if self.ends is not None:
            parts.append(f"ends in {rough_duration(self.ends - now)}")
        return "; ".join(parts)

    @property
    def ends(self) -> float | None:
        """Time on the host's clock when the node ends if nothing else happens, or None."""
        record = self.record
        limits = [record.started + record.max_lifetime] if record.max_lifetime is not None else []
        if not record.busy_since and record.idle_timeout is not None:
            limits.append(record.idle_since + record.idle_timeout)
        if not record.busy_since and record.away_since and record.detached_timeout is not None:
            limits.append(max(record.idle_since, record.away_since) + record.detached_timeout)
        return min(limits, default=None)

    def plain(self) -> dict[str, object]:
        """Return the node as plain values for programs, by the host's clock."""
        record = self.record
        return {
            "host": self.host,
            "node": record.node,
            "version": record.version,
            "ranks": record.ranks,
            "devices": list(record.devices),
            "busy_since": record.busy_since or None,
            "idle_since": record.idle_since or None,
            "away_since": record.away_since or None,
            "ends": self.ends,
            "clock": self.clock,
        }


def _numbers(numbers: Sequence[int], noun: str) -> str:
    return rank_words(numbers, noun).partition(" ")[2] if numbers else "-"


@dataclass(frozen=True)
class HostPools:
    """The user's pools on hosts, or on this machine if no hosts are given."""

    hosts: tuple[str, ...] = ()

    def pools(self) -> RemotePools:
        """Find the running pools, in one round trip to each host.

        Raises:
            RequestError: a host name is invalid.
            PoolError: no host could be reached; the message gives the reasons.
        """
        answers, unreached = ask(self.hosts, lambda _: list_script(), parse_list)
        if not answers:
            raise PoolError("; ".join(f"{host}: {reason}" for host, reason in unreached.items()))
        nodes: dict[tuple[str, str, int], HostNode] = {}
        for host, running in answers.items():
            for record in running.records:  # a machine may have been asked by two names
                key = record.boot, record.job_id, record.node
                nodes.setdefault(key, HostNode(host, running.clock, record))
        unread = {host: running.unread for host, running in answers.items() if running.unread}
        return RemotePools(pools_of(nodes.values()), tuple(answers), unreached, unread)

    def end(self, pool: RemotePool) -> str:
        """End a pool on the hosts where it was found: ranks, scripts, agents, and their files.

        Raises:
            PoolError: it could not be ended on some of them.
        """
        command = "%sky_down" if live.in_ipython() else "skymagic down"
        script = end_script([pool.job_id], f"`{command}` on {socket.gethostname()}")
        hosts = [node.host for node in pool.nodes if isinstance(node, HostNode)]
        answers, problems = ask(hosts if self.hosts else (), lambda _: script, parse_end)
        for host, (_, survivors) in answers.items():
            if survivors:
                problems[host] = (
                    "it does not exit, not even on SIGKILL: a process is stuck in the system"
                )
        text = f" on {', '.join(host for host in hosts if host not in problems) or 'no host'}"
        if pool.nodes_elsewhere:
            text += (
                f"; {count(pool.nodes_elsewhere, 'node')} of it "
                f"{'is' if pool.nodes_elsewhere == 1 else 'are'} on hosts that were not named"
            )
        if problems:
            reasons = [f"{host}: {reason}" for host, reason in problems.items()]
            raise PoolError(
                "; ".join([f"pool {pool.name!r} ({pool.job_id}) is down{text}", *reasons])
            )
        return text


def pools_of(nodes: Iterable[HostNode]) -> tuple[RemotePool, ...]:
    """Group nodes by pool, the oldest pool first; pure but for the clock."""
    nodes_by_job: dict[str, list[HostNode]] = {}
    for node in sorted(nodes, key=lambda node: (node.record.started, node.record.node)):
        nodes_by_job.setdefault(node.record.job_id, []).append(node)
    return tuple(map(_pool, nodes_by_job.values()))


def _pool(nodes: list[HostNode]) -> RemotePool:
    first = nodes[0]
    nodes.sort(key=lambda node: node.record.node)
    return RemotePool(
        first.record.pool,
        first.record.job_id,
        ", ".join(dict.fromkeys(node.host for node in nodes)),
        client=first.record.client,
        # by this machine's clock; the host's may differ
        started=time.time() - (first.clock - first.record.started),
        nodes=tuple(nodes),
        nodes_elsewhere=max(node.record.nodes for node in nodes) - len(nodes),
    )


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

    def answer(connection: HostConnection) -> T | HostError:
        try:
            done = connection.run(script(connection.label), timeout=SCRIPT_TIMEOUT)
            return parse(done.out)
        except HostError as problem:
            return problem
        except ValueError as problem:
            error_output = done.err.strip()[-500:]
            return HostError(
                connection.label, f"{problem}" + (f": {error_output}" if error_output else "")
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
