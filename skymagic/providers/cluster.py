"""Base of the cluster providers: nodes that a scheduler allocates to a pool together.

Each node is reached through a channel and then used like an SSH host. A provider translates the
request, asks its scheduler for nodes, waits while showing the reason, and releases the nodes.
Everything else is here::

    plan ──▶ ClusterSurvey ──acquire──▶ ClusterNode, each ──prepare_nodes──▶ HostMachine ──▶ Node
                  └──close──▶ give_back, then all connections
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.bootstrap.provision import probe
from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, HostError, HostGone, RequestError, SkyError
from skymagic.plan.accelerators import Accelerator, GpuChoice
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest
from skymagic.providers import head
from skymagic.providers.channel_key import ChannelKey
from skymagic.providers.provider import Say, Survey
from skymagic.providers.ssh import (
    HostAccess,
    HostMachine,
    call_concurrently,
    container_shells,
    set_up,
)
from skymagic.ssh import container
from skymagic.ssh.container import ContainerShells
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.sealed import UntrustedHost
from skymagic.wire import processes, tls
from skymagic.wire.codec import Transport
from skymagic.wire.threads import start_all

logger = logging.getLogger(__name__)

BULK: tuple[str, ...] = (processes.VALUES, processes.TRANSFER_SERVER)
"""Programs with much traffic, which therefore use the direct connection to a node."""
DIRECT_TIMEOUT = 3.0
"""Seconds that a node has to answer at its own address before its channel is used instead."""


@dataclass(frozen=True)
class ClusterAccess(HostAccess):
    """Everything another notebook of the same user needs to reach a cluster node.

    Attributes:
        location: provider-specific location: the Slurm job number, the pod's namespace, …
        channel_key: key that authenticates notebook and node in the scheduler's channel; "" if the
            channel is already encrypted.
    """

    location: tuple[str, ...] = ()
    channel_key: str = field(default="", repr=False)

    @property
    def job_id(self) -> str:
        """Job ID of the pool."""
        return self.daemon.rpartition("-")[0]


@dataclass(frozen=True)
class ClusterNode(ABC):
    """A node allocated by a scheduler: how to connect to it, and how to ask what became of it.

    Attributes:
        name: node name as users know it.
        job_id: job ID of the pool.
    """

    name: str
    job_id: str

    @property
    @abstractmethod
    def location(self) -> tuple[str, ...]:
        """Provider-specific location, see `ClusterAccess`."""

    @property
    def channel_key(self) -> str:
        """Key of the node's channel, see `ClusterAccess`."""
        return ""

    @abstractmethod
    def connection(self) -> ChannelConnection:
        """Return a connection whose shells start daemons by the node's holder.

        Does not ask the scheduler.
        """

    def address(self) -> str:
        """Return the node's address for direct connections that bypass its channel.

        Returns "" if direct connections are not attempted. Raises OSError if the node has no
        address.
        """
        return ""

    @abstractmethod
    def fate(self) -> str:
        """Return the scheduler's reason why the node is gone, or "" if it is present or unknown."""

    def reconnect(self) -> ChannelConnection:
        """Open another connection. Raises HostGone if the scheduler reports the node as gone."""
        if reason := self.fate():
            raise HostGone(self.name, reason)
        return self.connection()

    def node(self, machine: HostMachine, index: int, daemon: str) -> Node:
        """Return the `Node` that a pool uses.

        Args:
            machine: the node, inspected and set up.
            index: index of the node in the pool.
            daemon: name of the daemon that keeps the agent running on the node.
        """
        node = machine.node(index, daemon)
        direct = DirectConnection(
            self.address, head.NodeAccess(daemon, "", self.name), machine, node.run
        )
        access = ClusterAccess(
            **vars(node.access), location=self.location, channel_key=self.channel_key
        )
        return replace(
            node, access=access, fate=self.fate, run=direct.run, start_agent=direct.start_agent
        )

    def inspect(
        self,
        requirements: Requirements,
        patience: float,
        shells: ContainerShells | None = None,
        report: Callable[[str], None] = lambda step: None,
    ) -> HostMachine:
        """Inspect the node over a first connection, which is closed if the inspection fails.

        Args:
            shells: container that the node's processes run in, if any.
            report: called with a line of text for each step of getting its image.
            patience: seconds to tolerate refused connections, as a freshly allocated node may
                refuse them.
        """
        connection, deadline = self.connection(), time.monotonic() + patience
        while True:
            try:
                # in the loop, because a node that was just allocated may refuse its first steps
                if shells is not None:
                    shells = container.prepare(connection, shells, report)
                    container.enter(connection, shells)
                facts = probe(connection, requirements)
                return HostMachine(self.name, self.reconnect, connection, facts, shells=shells)
            except UntrustedHost:
                connection.close()
                raise
            except HostError as problem:
                reason = self.fate()
                final = problem.code in container.FINAL_ERRORS
                if reason or final or time.monotonic() > deadline:
                    connection.close()
                    raise (
                        HostError(self.name, reason, code="node-lost") if reason else problem
                    ) from None
                time.sleep(1.0)
            except BaseException:
                connection.close()
                raise


class DirectConnection:
    """Direct connection to a node, which bypasses its channel where possible.

    Direct connections need the node's own address to be reachable. They use TLS to a relay that was
    started through the channel. A scheduler's channel is slow: srun and Ray's actors carry 20 and
    40 MB/s, and srun delays small messages by 40 ms.

    Args:
        address: see `ClusterNode.address`.
        access: names the node and its daemon.
        machine: the node.
        run: starts a process on the node through its channel.
    """

    def __init__(
        self,
        address: Callable[[], str],
        access: head.NodeAccess,
        machine: HostMachine,
        run: Callable[..., Transport],
    ) -> None:
        self._address, self._access, self._machine, self._run = address, access, machine, run
        self._unreachable = False
        """True once the node was found to be unreachable at its own address."""
        self._lock = threading.Lock()
        """Held while a relay is started. Never held while a process is started through it."""

    def start_agent(self, state: Callable[[str], None]) -> Transport:
        """Start a new agent and return the tunnel to it.

        The tunnel uses the channel until the node's daemon runs, and then moves to the relay, which
        would end without a daemon on its node.
        """
        tunnel, daemon = self._machine.tunnel, self._access.daemon
        daemon_started = threading.Event()
        if tunnel.takes_over:
            daemon_started.set()

        def connect() -> Transport:
            direct = self._direct(processes.ATTACH, daemon) if daemon_started.is_set() else None
            starts = not daemon_started.is_set()
            return direct or self._machine.attached(daemon, starts=starts)

        def move() -> None:
            if self._ensure_relay():
                tunnel.move()

        def on_state(now: str) -> None:
            state(now)
            if now == "connected" and not daemon_started.is_set():
                daemon_started.set()
                start_all([move], name="skymagic-direct")

        return tunnel.open(connect, on_state)

    def run(self, module: str, *args: str) -> Transport:
        """Start a process that runs this module."""
        direct = self._direct(module, *args) if module in BULK else None
        return direct or self._run(module, *args)

    def _direct(self, *command: str) -> Transport | None:
        """Return a direct connection, or None if the node does not answer at its address.

        If the relay has ended, another one is started, but only once.
        """
        for _ in range(2):
            access = self._access
            with contextlib.suppress(OSError):
                if access.port:
                    return head.RelayedTransport(access, *command, timeout=DIRECT_TIMEOUT)
            with self._lock:
                # Another thread may have started the next relay meanwhile.
                if self._access is access and not self._start_relay():
                    break
        return None

    def _ensure_relay(self) -> bool:
        """Start a relay unless one is running; return True if it listens."""
        with self._lock:
            return bool(self._access.port) or self._start_relay()

    def _start_relay(self) -> bool:
        """Start a relay on the node, and return True if it listens. The caller holds the lock.

        A node that was unreachable is not tried again.
        """
        if self._unreachable:
            return False
        try:
            address = self._address()
            # a pool never listens at a public address
            self._unreachable = not address or not ipaddress.ip_address(address).is_private
            if not self._unreachable:
                access = head.relay(
                    self._run, replace(self._access, address=address, pem=tls.certificate())
                )
                socket.create_connection((address, access.port), DIRECT_TIMEOUT).close()
                self._access = access
        except (OSError, ValueError, SkyError):
            self._unreachable = True
        return not self._unreachable


@dataclass
class Allocation:
    """Nodes that a scheduler allocates to a pool together, and the request for them."""

    job_id: str = ""
    """Job ID under which the scheduler knows the pool; "" before the request and after the release.
    """
    number: str = ""
    """The scheduler's own identifier of the allocation, if it has one."""
    requested: Future[Any] | None = None
    """The request to the scheduler, from the moment it is sent."""
    key: ChannelKey | None = None
    """Key of the pool's channels, if they pass through a scheduler that does not encrypt them."""
    machines: list[HostMachine] = field(default_factory=list)
    plan: Plan | None = None
    ready: bool = False  # True once all ranks are up; the release is then not announced
    closing: threading.Lock = field(default_factory=threading.Lock)

    def run_request(self, request: Callable[[], Any]) -> Any:
        """Send a request to the scheduler on a thread, and wait for its answer.

        An interrupt ends the wait only. `close` still sees the request and releases what it
        allocates.
        """
        logger.info("scheduler is asked for nodes: job=%s", self.job_id)
        (self.requested,) = start_all([request], name="skymagic-allocation")
        return self.requested.result()


@dataclass(frozen=True)
class ClusterSurvey(Survey):
    """The plan of a pool on a cluster, and the owner of what was allocated for it."""

    requirements: Requirements
    allocation: Allocation = field(default_factory=Allocation, kw_only=True)

    def give_back(self) -> str:
        """Release the scheduler's allocation. Safe to call twice.

        Called only by `close`, after the scheduler has answered the request.

        Returns:
            Description of what was released, or "" if there was nothing to release.

        Raises:
            ProvisionError: the allocation is still running; the message gives the reason.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Close the connection to the scheduler. Safe to call twice."""

    def outcome(self) -> Plan:
        """Return the plan with the nodes' actual hardware and the end of their allocation."""
        return self.allocation.plan or self.plan

    def mark_ready(self) -> None:
        """Record that all ranks are up."""
        self.allocation.ready = True

    def close(self) -> None:
        """Release the nodes and close all connections. Safe to call twice.

        An interrupt ends only the wait. The release continues, so an impatient user never leaks
        nodes.
        """
        start_all([self._end], name="skymagic-cluster-end", daemon=False)[0].result()

    def _end(self) -> None:
        allocation = self.allocation
        with allocation.closing:
            try:
                if allocation.job_id:
                    if allocation.requested is not None:
                        wait([allocation.requested])
                    logger.info("allocation is released: job=%s", allocation.job_id)
                    if (what := self.give_back()) and not allocation.ready:
                        print_note(f"[{what}]")
                allocation.job_id = ""
            finally:
                call_concurrently(HostMachine.close, allocation.machines)
                if allocation.key is not None and not allocation.job_id:
                    allocation.key.drop()
                self.leave()

    def prepare_nodes(
        self,
        nodes: Sequence[ClusterNode],
        source: str,
        say: Say,
        *,
        patience: float = 0.0,
        **plan_fields: Any,
    ) -> list[Node]:
        """Connect to the allocated nodes, inspect them and set them up, all in parallel.

        Args:
            nodes: the allocated nodes.
            source: start of the progress line, before the node names: who allocated them.
            patience: see `ClusterNode.inspect`.
            plan_fields: fields of the plan that the inspection cannot tell, such as its end.
        """
        allocation, names = self.allocation, [node.name for node in nodes]
        say(StartStep(f"{source} {', '.join(names)} …", "connecting", names))
        previous_machines = allocation.machines[:]
        shells = self.container_shells()

        def inspect(node: ClusterNode) -> HostMachine:
            return node.inspect(
                self.requirements, patience, shells, lambda step: say(f"{node.name}: {step}")
            )

        allocation.machines[:] = call_concurrently(inspect, nodes)
        call_concurrently(HostMachine.close, previous_machines)
        if allocation.key is not None and (unverified := sorted(allocation.key.unverified)):
            print_note(
                f"[{', '.join(unverified)}: trusted on first use, because without a shared home "
                "folder the node cannot prove who it is (see SECURITY.md)]"
            )
        allocation.plan = replace(
            _with_measured_nodes(self.plan, allocation.machines, self.requirements), **plan_fields
        )
        set_up(allocation.machines, self.requirements, say)
        return self._nodes(nodes, [f"{allocation.job_id}-{index}" for index in range(len(nodes))])

    def container_shells(self) -> ContainerShells | None:
        """Return the container of the nodes, or None if the pool has none.

        Providers whose scheduler starts the containers return None.
        """
        return container_shells(self.plan.request, self.requirements)

    def adopt_nodes(
        self, nodes: Sequence[ClusterNode], accesses: Sequence[ClusterAccess]
    ) -> list[Node]:
        """Return the nodes of a pool that another notebook of this user created.

        Connects to nothing yet.

        Raises:
            CloudError: the scheduler reports that all of them are gone.
        """
        if (reason := nodes[0].fate()) and all(node.fate() for node in nodes[1:]):
            self.leave()
            raise CloudError("missing", "", reason)
        allocation = self.allocation
        allocation.job_id, allocation.plan, allocation.ready = nodes[0].job_id, self.plan, True
        allocation.machines.extend(
            HostMachine(
                node.name,
                node.reconnect,
                None,
                access.installation.facts,
                access.secret,
                access.installation,
                access.shells,
            )
            for node, access in zip(nodes, accesses, strict=True)
        )
        return self._nodes(nodes, [access.daemon for access in accesses])

    def _nodes(self, nodes: Sequence[ClusterNode], daemons: Sequence[str]) -> list[Node]:
        numbered = enumerate(zip(nodes, self.allocation.machines, daemons, strict=True))
        return [node.node(machine, index, daemon) for index, (node, machine, daemon) in numbered]


# ------------------------------------------------------------------------------------ the request


def cpus_of(request: PoolRequest) -> int:
    """Return the CPUs per node: one per rank, unless the request asks for more."""
    return max(int(request.cpus.amount) if request.cpus else 1, topology(request).procs_per_node)


def check_gpu_count(gpu: Accelerator | GpuChoice, who: str, allows_all: bool = True) -> None:
    """Raise RequestError if the request selects individual GPUs, which the cluster chooses itself.

    Unless `allows_all`, a request for all of a node's GPUs is refused too.

    Args:
        who: name of the scheduler, used in the message.
    """
    if isinstance(gpu, GpuChoice) and (gpu.selectors or not (allows_all or gpu.count)):
        raise RequestError(
            f"--gpu {gpu}: {who} chooses the GPUs: "
            f"write how many, as in --gpu {len(gpu.selectors) or 8}"
        )


def _with_measured_nodes(
    plan: Plan, machines: Sequence[HostMachine], requirements: Requirements
) -> Plan:
    """Return the plan with the CPUs and GPUs found on its nodes.

    Raises RequestError if a node lacks what the cluster promised.
    """
    inventories = [
        replace(
            machine.facts.inventory(requirements.minor), hostname=machine.name, machine=machine.name
        )
        for machine in machines
    ]
    measured = plan_over(replace(plan.request, cpus=None, memory=None), inventories, plan.provider)
    return replace(
        plan,
        hosts=measured.hosts,
        cpus=measured.cpus,
        memory_gb=measured.memory_gb,
        devices=measured.devices,
        topology=measured.topology,
        gpu_words=measured.gpu_words,
    )
