"""Resources of a running pool: machines, agents and store.

They are started in this order and released in reverse. The specification of each agent and each
rank is a pure function of the pool's plan.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import skymagic
from skymagic.cluster import Agents, Node
from skymagic.display.panel import passing_step
from skymagic.plan.plans import Plan
from skymagic.plugins import table
from skymagic.pool.status import SharedStatus
from skymagic.runtime.info import InstanceInfo, Peer
from skymagic.wire import agent as wire
from skymagic.wire import debug_log, processes
from skymagic.wire.typed import JsonObject

if TYPE_CHECKING:
    from skymagic.content.files.upload import DataPlane
    from skymagic.content.remote.remote_store import RemoteStore
    from skymagic.content.store import NodeStore
    from skymagic.data.shipping.shipper import Shipper
    from skymagic.providers import Provider, Survey
    from skymagic.wire.codec import Transport

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Timeout in seconds of each step of a start."""


def node_environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variables of all processes on a node.

    Args:
        environ: the notebook's environment: the source of secrets and, on this machine, of
            inherited variables.
    """
    shape = plan.topology
    on_machine = shape.procs_per_node if plan.remote else shape.world_size
    threads = {"OMP_NUM_THREADS": str(max(1, plan.cpus // on_machine))}
    env = threads if plan.remote or "OMP_NUM_THREADS" not in environ else {}
    secrets = {name: environ[name] for name in plan.request.secrets if name in environ}
    return {**env, **dict(plan.image.env), **dict(plan.request.env), **secrets}


def devices_environment(plan: Plan, rank: int) -> dict[str, str]:
    """Build the variables that tell CUDA which GPUs a rank sees.

    A rank sees all GPUs of its node and uses its own by LOCAL_RANK, as under torchrun. Of parts of
    GPUs (MIG), CUDA shows a process only the first in the list, so there each rank has its own
    list.
    """
    if not plan.devices:
        return {}
    node = plan.devices[plan.topology.node_of(rank)]
    visible = plan.devices_of(rank) if any(device.part for device in node) else node
    # if UUIDs are not known yet, make CUDA count devices as nvidia-smi does
    order = {} if all(device.uuid for device in visible) else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.word for device in visible), **order}


def agent_specs(
    status: SharedStatus,
    nodes: Sequence[Node],
    detached_timeout: float | None,
    environ: Mapping[str, str],
) -> list[wire.AgentSpec]:
    """Build the specification of each machine's agent, the head's first.

    Args:
        detached_timeout: seconds without the notebook after which agents that outlive it end
            everything.
        environ: as in `node_environment`.
    """
    plan, request = status.plan, status.plan.request
    # modules that each node imports before it forks its ranks
    preload = tuple(dict.fromkeys(module for plugin in status.plugins for module in plugin.preload))
    return [
        wire.AgentSpec(
            pool=status.name,
            job_id=status.job_id,
            node=node.index,
            head=node.index == 0,
            preload=preload,
            nodes=len(nodes),
            client=status.client,
            version=skymagic.__version__,
            devices=tuple(device.index for device in plan.devices[node.index])
            if plan.remote and plan.devices
            else (),
            env=node_environment(plan, environ),
            address=node.address or None,
            idle_timeout=request.idle,
            max_lifetime=request.max_lifetime,
            detached_timeout=detached_timeout if plan.outlives else None,
            max_away=request.max_away,
            notices=f"slurm:{plan.notice}"
            if plan.notice
            else "ec2-spot"
            if plan.provider == "aws" and request.spot
            else "",
            log_limit=status.defaults.log_limit,
            log_level=debug_log.level(),
        )
        for node in nodes
    ]


def rank_specs(
    status: SharedStatus, nodes: Sequence[Node], head_port: int
) -> dict[int, tuple[int, wire.RankSpec]]:
    """Build each rank's specification: rank → (index of its machine, specification).

    Args:
        nodes: the machines, which have met, the head first; one machine may serve all nodes of the
            plan.
        head_port: a free port on the head.
    """
    plan, shape = status.plan, status.plan.topology
    packed = tuple(map(table.packed_plugin, status.plugins))
    machines = [min(node, len(nodes) - 1) for node in range(shape.nodes)]
    peers = tuple(
        Peer(node, nodes[index].address, nodes[index].hostname)
        for node, index in enumerate(machines)
    )
    specs = {}
    for rank in range(shape.world_size):
        node = shape.node_of(rank)
        info = InstanceInfo(
            node=node,
            total_nodes=shape.nodes,
            head_addr=nodes[0].address,
            head_port=head_port,
            accelerators=len(plan.devices[node]) if plan.devices else 0,
            peers=peers,
            rank=rank,
            world_size=shape.world_size,
            local_rank=shape.local_rank(rank),
            local_world_size=shape.procs_per_node,
            hostname=peers[node].hostname,
            job_id=status.job_id,
        )
        uuids = tuple(device.uuid for device in plan.devices_of(rank) if device.uuid)
        specs[rank] = (
            machines[node],
            wire.RankSpec(rank, info.plain(), packed, devices_environment(plan, rank), gpus=uuids),
        )
    return specs


Step = tuple[str, Callable[[], object]]
"""(name of a resource, function that releases it)"""


@dataclass(eq=False, repr=False)
class PoolResources:
    """Machines, agents and store of one pool, with their lifetimes."""

    _status: SharedStatus
    _provider: Provider
    _survey: Survey
    """Closed with the other resources."""
    _namespace: dict[str, Any]
    """The notebook's variables."""
    _detached_timeout: float | None
    """Seconds without the notebook after which agents on other machines end everything."""
    _agents: Agents | None = None
    _shipper: Shipper | None = None
    _head_port: int = 0
    """A free port on the head, for process groups that the user's code creates."""

    @property
    def agents(self) -> Agents:
        """The agents of a started pool."""
        if self._agents is None:
            raise self._status.missing()
        return self._agents

    @property
    def shipper(self) -> Shipper:
        """The shipper, which knows which values the ranks hold."""
        if self._shipper is None:
            raise self._status.missing()
        return self._shipper

    @property
    def has_agents(self) -> bool:
        """True if there are agents."""
        return self._agents is not None

    def start(
        self, connect: Callable[[Sequence[Node]], Agents], say: Callable[[str], None]
    ) -> None:
        """Acquire the machines and start all ranks.

        After a failure, `close` releases what was started.
        """
        status = self._status
        provider = type(self._provider).__name__
        logger.info("nodes are allocated: pool=%s provider=%s", status.name, provider)
        nodes = self._provider.acquire(self._survey, status.job_id, say)
        logger.info("nodes are there: pool=%s nodes=%s", status.name, [node.name for node in nodes])
        status.plan = self._survey.outcome()
        agents = self._agents = connect(nodes)
        say(passing_step("starting the agents"))
        agents.start(agent_specs(status, nodes, self._detached_timeout, os.environ))
        import skymagic.data.shipping.shipper  # noqa: F401  # while the agents start

        say(passing_step("starting the forkservers"))
        nodes = agents.find_addresses(START_TIMEOUT)
        self._head_port = agents.started[0].port
        agents.order(rank_specs(status, nodes, self._head_port))
        names = ", ".join(plugin.name for plugin in status.plugins if plugin.preload)
        if names:
            say(passing_step(f"importing {names}"))
        self._shipper = new_shipper(self.agents, status, self._namespace)
        say(passing_step("starting the ranks"))
        agents.wait_ready(START_TIMEOUT)

    def attach(
        self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], port: int
    ) -> list[int]:
        """Connect to what another notebook has started.

        After a failure, `leave` closes the connections.

        Returns:
            The ranks that have died in the meantime.
        """
        status = self._status
        agents = self._agents = connect(nodes)
        self._head_port = port
        ranks = rank_specs(status, nodes, port)
        agents.attach(
            agent_specs(status, nodes, self._detached_timeout, os.environ), ranks, START_TIMEOUT
        )
        self._shipper = new_shipper(self.agents, status, self._namespace)
        dead = [rank for rank, state in agents.ranks.items() if not state.ready]
        logger.info("attached: pool=%s dead_ranks=%s", status.name, dead)
        agents.wait_ready(START_TIMEOUT, [rank for rank in agents.ranks if rank not in dead])
        return dead

    def leave(self) -> None:
        """Close all connections and leave the machines' processes running; safe to call twice."""
        self._close_store()
        if self._agents is not None:
            self._agents.leave()

    def reshape(self) -> dict[int, JsonObject]:
        """End the ranks that the pool's plan no longer has; new ranks are not started yet.

        Returns:
            Rank → its new ``InstanceInfo.plain()``, for the ranks that stay.
        """
        before, after = len(self.agents.ranks), self._status.world_size
        self.agents.signal(range(after, before), signal.SIGKILL)
        ranks = rank_specs(self._status, self.agents.nodes, self._head_port)
        self.agents.reshape(ranks, START_TIMEOUT)
        self.forget(range(after, before))
        return {rank: ranks[rank][1].info for rank in range(min(before, after))}

    def forget(self, ranks: Sequence[int]) -> None:
        """Forget what these ranks held."""
        self.shipper.forget(ranks)

    def lose_node(self, index: int) -> None:
        """Record that a machine is gone, with the values in its store."""
        if (store := self.remote_store()) is not None:
            store.lose(index)

    def revive(self, machines: Mapping[int, Node] = MappingProxyType({})) -> list[int]:
        """Try to reach the lost machines again.

        Args:
            machines: replacements for some of them, by index.

        Returns:
            The ranks of these machines.

        Raises:
            ProvisionError: a machine is still unreachable.
        """
        lost, old_head = tuple(self.agents.gone), self.agents.started.get(0)
        if machines:
            self._status.plan = self._survey.outcome()
        ranks = self.agents.revive(START_TIMEOUT, machines)
        if (store := self.remote_store()) is not None:
            for index in lost:
                store.readmit(self.agents.nodes[index])
        if 0 in lost:
            self._head_port = self.agents.started[0].port
            self._move_store(old_head)
        return ranks

    def _move_store(self, old: wire.AgentStarted | None) -> None:
        """Use the store of a new agent on the head."""
        if not self._status.plan.remote:
            cast("NodeStore", self.shipper.store).move(self.agents.started[0].store)
            _remove_folders(old)

    def remote_store(self) -> RemoteStore | None:
        """Return the store of the values if the nodes are other machines, else None."""
        if self._shipper is None or not self._status.plan.remote:
            return None
        return cast("RemoteStore", self._shipper.store)

    # -- release ----------------------------------------------------------------------------------

    def release_steps(self) -> list[Step]:
        """List the steps that release everything, in order; each is safe to call twice."""
        return [
            ("the values on the nodes", self._close_store),
            ("the node agents", self._close_agents),
            ("the agents' folders", self._remove_folders),
            ("the machines", self._survey.close),
        ]

    def _close_store(self) -> None:
        if (store := self.remote_store()) is not None:
            store.close()

    def _close_agents(self) -> None:
        if self._agents is not None:
            logger.debug("agents are closed: pool=%s", self._status.name)
            self._agents.close()
            self._status.unreached = tuple(self._agents.unreached)

    def _remove_folders(self) -> None:
        if self._agents is not None and not self._status.plan.remote:
            _remove_folders(self._agents.started.get(0))


def _remove_folders(agent: wire.AgentStarted | None) -> None:
    """Delete the folders that a killed agent of this machine could not delete itself."""
    if agent is not None:
        from skymagic.content import store

        store.remove(agent.store)
        shutil.rmtree(agent.directory, ignore_errors=True)


def new_shipper(agents: Agents, status: SharedStatus, namespace: dict[str, Any]) -> Shipper:
    """Create the shipper that sends the notebook's values to ranks.

    Args:
        agents: agents that have completed their handshake.
        status: status of the pool.
        namespace: the notebook's variables.
    """
    from skymagic.data.shipping.shipper import Shipper

    store = open_store(agents, status.plan.remote, status.note, status.name)
    return Shipper(store, namespace, str(Path.cwd()))


def data_plane(resources: PoolResources) -> DataPlane | None:
    """Return what carries files to several nodes at once.

    Returns:
        None for a single node, or for nodes on this machine.
    """
    from skymagic.content.files.upload import DataPlane

    agents = resources.agents
    store = resources.remote_store() if len(agents.nodes) > 1 else None
    return (
        DataPlane(store, lambda node: agents.started[node.index].store)
        if store is not None
        else None
    )


def open_store(
    agents: Agents, remote: bool, tell: Callable[[str], None], pool: str = ""
) -> NodeStore | RemoteStore:
    """Open the store for a pool's values: this machine's memory, or a value server on each node.

    Args:
        agents: agents that have completed their handshake.
        remote: True if the nodes are other machines.
        tell: shows a message to the user.
        pool: name of the pool, for debug logs.
    """
    if not remote:
        from skymagic.content.store import NodeStore

        return NodeStore(agents.started[0].store, notify=tell)
    from skymagic.content.remote.remote_store import RemoteStore

    def run(node: Node) -> Transport:
        # a restarted agent has another folder, so look it up each time
        started = agents.started[node.index]
        logging_arguments = debug_log.arguments(started.directory, "values", pool, node.index)
        return node.run(processes.VALUES, started.store, *logging_arguments)

    return RemoteStore(agents.nodes, run, tell)
