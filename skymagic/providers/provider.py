"""Interface between pools and the providers that allocate their machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from skymagic.cluster import Node
from skymagic.errors import PoolError, RequestError
from skymagic.plan.plans import Plan
from skymagic.plan.requests import CloudSettings, PoolRequest

Say = Callable[[str], None]
"""Callback that receives a line about the current step and its progress."""


@dataclass(frozen=True)
class Survey:
    """A plan, with the facts and connections that the provider needs to carry it out.

    Owns everything that planning and acquiring have opened.
    """

    plan: Plan

    def outcome(self) -> Plan:
        """Return the plan as it was carried out. Call it after `acquire`.

        Machines that were only available elsewhere have another price.
        """
        return self.plan

    def mark_ready(self) -> None:
        """Called once all ranks are up."""

    def close(self) -> None:
        """Release everything.

        Called after the agents have ended, and also if acquiring failed. Calling it twice is safe.
        """


class Provider(Protocol):
    """Plans, then acquires machines.

    Keeps no state between the calls: everything it found or opened is in the survey.
    """

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """Return what would be created, with its price. Inspects, but starts nothing.

        Raises:
            RequestError: lists all mistakes in the request.
        """

    def acquire(self, survey: Any, job_id: str, say: Say) -> Sequence[Node]:
        """Return machines that can run an agent, the head first.

        Called once with the survey that `plan` returned. The survey releases the machines.
        """


@runtime_checkable
class Attachable(Protocol):
    """Implemented by providers whose nodes outlive their notebook (`Node.access`)."""

    def attach(self, plan: Plan, accesses: Sequence[Any]) -> tuple[Survey, Sequence[Node]]:
        """Return the machines of a pool that another notebook created from this plan.

        Called once. Starts nothing. The caller now owns everything that the survey's `close`
        releases.

        Args:
            plan: the plan of the pool.
            accesses: the `access` of each of its nodes.

        Raises:
            CloudError: some machines no longer exist. `kind` is ``missing`` if none of them do;
                then nothing of the pool remains.
        """


@dataclass(frozen=True)
class PoolLocation:
    """A location to search for the user's pools, whichever notebook created them.

    Attributes:
        hosts: hosts as users write them; this machine without hosts and provider.
        provider: provider that allocates machines; None for hosts.
        login: login node through which a Slurm cluster is reached.
        cloud: account and access of rented machines.
        regions: regions of rented machines; all that the account uses if empty.
    """

    hosts: tuple[str, ...] = ()
    provider: str | None = None
    login: str | None = None
    cloud: CloudSettings = CloudSettings()
    regions: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """True for this machine, which is reached without any connection."""
        return not (self.hosts or self.provider)

    @property
    def options(self) -> str:
        """Options that name the location on a command line, each after a space."""
        options = {"hosts": ",".join(self.hosts), "provider": self.provider, "login": self.login}
        return "".join(f" --{name} {value}" for name, value in options.items() if value)


class RemoteNode(Protocol):
    """A node of a running pool, as its host or provider reports it."""

    columns: ClassVar[tuple[str, ...]]
    """Headings of `row`."""

    def row(self) -> tuple[object, ...]:
        """Return the node as a row of a table for users."""

    def plain(self) -> dict[str, object]:
        """Return the node as plain values for programs; times are seconds since 1970."""


@dataclass(frozen=True)
class RemotePool:
    """A pool of this user as its hosts or its provider report it.

    Attributes:
        where: location of the pool: "gpu1, gpu2", "Slurm job 7 on n[1-2]", "us-east-1".
        state: state of the pool, readable by users; "" if only its nodes have one.
        client: user and machine that started it, as in ``ann@laptop``; "" if unknown.
        started: time of its start in seconds since 1970, or None if unknown.
        ends: latest possible end in seconds since 1970, or None if unknown.
        nodes: its nodes, by index; empty if the provider does not list them.
        nodes_elsewhere: number of its nodes on hosts outside the search.
    """

    name: str
    job_id: str
    where: str
    state: str = ""
    client: str = ""
    started: float | None = None
    ends: float | None = None
    nodes: tuple[RemoteNode, ...] = ()
    nodes_elsewhere: int = 0

    def plain(self) -> dict[str, object]:
        """Return the pool as plain values for programs; the fields are stable across versions."""
        return {**vars(self), "nodes": [node.plain() for node in self.nodes]}


@dataclass(frozen=True)
class RemotePools:
    """Result of a search for pools in a location.

    Attributes:
        pools: pools by start time, the oldest first.
        reached: hosts that have reported all their pools.
        unreached: reason by host or region that gave no answer.
        unread: number of agents, by host, whose record this version cannot read.
    """

    pools: tuple[RemotePool, ...]
    reached: tuple[str, ...] = ()
    unreached: dict[str, str] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)

    def named(self, name: str | None) -> RemotePools:
        """Keep the pools with this name or job ID, or all if it is None."""
        matching = (pool for pool in self.pools if name in (None, pool.name, pool.job_id))
        return replace(self, pools=tuple(matching))

    def select(self, name: str | None, select_all: bool = False) -> tuple[RemotePool, ...]:
        """Return the pools to end: the only match or, if `select_all` is set, all matches.

        Raises:
            RequestError: no pool matches, or the choice is ambiguous.
            PoolError: no pool matches, and some hosts or regions gave no answer.
        """
        matching = self.named(name).pools
        if len(matching) == 1 or (matching and select_all):
            return matching
        if matching:
            listed = ", ".join(f"{pool.job_id} ({pool.client or pool.where})" for pool in matching)
            raise RequestError(
                f"{len(matching)} pools were found: name one by its job id: {listed}",
                code="pool-ambiguous",
                names=[pool.job_id for pool in matching],
            )
        missing = f"no pool {f'{name!r} ' if name else ''}was found there"
        if self.unreached:
            reasons = "; ".join(f"{source}: {reason}" for source, reason in self.unreached.items())
            raise PoolError(f"{missing}; {reasons}", code="no-pool", names=list(self.unreached))
        available = ", ".join(pool.name for pool in self.pools)
        raise RequestError(
            missing + (f"; available: {available}" if available else ""), code="no-pool"
        )


@runtime_checkable
class Listable(Protocol):
    """Implemented by providers that can list the user's pools from any machine with access."""

    def pools(self) -> RemotePools:
        """Return the user's pools. Raises SkyError if no host or region answers."""

    def end(self, pool: RemotePool) -> str:
        """End a pool that `pools` listed or that was abandoned. Twice is safe.

        Also ends a pool that a notebook uses.

        Returns:
            What to add to "pool … is down", such as " on gpu1, gpu2", or "".

        Raises:
            SkyError: not everything could be ended; the message gives the reason.
        """


@runtime_checkable
class Replaceable(Protocol):
    """Implemented by providers whose machines may be taken away while they run."""

    def replace(
        self, survey: Any, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Replace lost machines and return the new ones by node index.

        Blocks until they are available.

        Called on its own thread after machines are lost, with no other call to the provider
        meanwhile. The survey releases the machines created here.

        Args:
            stop: set when the replacements are no longer needed; the call then returns soon, with
                none.

        Raises:
            ProvisionError: no replacement is possible.
        """
