"""From a pool's plan to the specification of each node's agent and each rank; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import skymagic
from skymagic.cluster import Node
from skymagic.plan.plans import Plan
from skymagic.plugins import table
from skymagic.pool.status import Status
from skymagic.runtime.info import InstanceInfo, Peer
from skymagic.wire import agent as wire


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of everything on a node.

    Args:
        environ: the notebook's own: values of secrets, and, on this machine, what is inherited.
    """
    shape = plan.topology
    on_machine = shape.procs_per_node if plan.remote else shape.world_size
    threads = {"OMP_NUM_THREADS": str(max(1, plan.cpus // on_machine))}
    env = threads if plan.remote or "OMP_NUM_THREADS" not in environ else {}
    secret = {name: environ[name] for name in plan.request.secrets if name in environ}
    return {**env, **dict(plan.image.env), **dict(plan.request.env), **secret}


def devices_environment(plan: Plan, rank: int) -> dict[str, str]:
    """What tells CUDA which GPUs a rank sees: those of its node, of which it takes its own by LOCAL_RANK, as under torchrun.

    Of parts of GPUs (MIG) CUDA shows a process one alone, the first in the list: there each rank has a list of its own.
    """
    if not plan.devices:
        return {}
    node = plan.devices[plan.topology.node_of(rank)]
    seen = plan.devices_of(rank) if any(one.part for one in node) else node
    # where UUIDs are not known yet, numbers count as nvidia-smi does
    order = {} if all(one.uuid for one in seen) else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(one.word for one in seen), **order}


def of_agents(
    status: Status, nodes: Sequence[Node], detached_timeout: float | None, environ: Mapping[str, str]
) -> list[wire.AgentSpec]:
    """The specification of each machine's agent, the head's first.

    Args:
        detached_timeout: seconds without the notebook after which agents that outlive it end everything.
        environ: as of `environment`.
    """
    plan, request = status.plan, status.plan.request
    # modules that each node imports before it forks its ranks
    preload = tuple(dict.fromkeys(module for plugin in status.plugins for module in plugin.preload))
    return [
        wire.AgentSpec(
            pool=status.name, job_id=status.job_id, node=node.index, head=node.index == 0, preload=preload,
            nodes=len(nodes), client=status.client, version=skymagic.__version__,
            devices=tuple(one.index for one in plan.devices[node.index]) if plan.remote and plan.devices else (),
            env=environment(plan, environ), address=node.address or None,
            idle_timeout=request.idle, max_lifetime=request.max_lifetime,
            detached_timeout=detached_timeout if plan.outlives else None, max_away=request.max_away,
            notices="ec2-spot" if plan.provider == "aws" and request.spot else "",
            log_limit=status.defaults.log_limit,
        )
        for node in nodes
    ]  # fmt: skip


def of_ranks(status: Status, nodes: Sequence[Node], head_port: int) -> dict[int, tuple[int, wire.RankSpec]]:
    """Rank → (index of its machine, its specification).

    Args:
        nodes: the machines, which have met, the head first; one machine may serve all nodes of the plan.
        head_port: a port that is free on the head.
    """
    plan, shape = status.plan, status.plan.topology
    packed = tuple(map(table.packed_plugin, status.plugins))
    machines = [min(node, len(nodes) - 1) for node in range(shape.nodes)]
    peers = tuple(Peer(node, nodes[index].address, nodes[index].hostname) for node, index in enumerate(machines))
    found = {}
    for rank in range(shape.world_size):
        node = shape.node_of(rank)
        info = InstanceInfo(
            node=node, total_nodes=shape.nodes, head_addr=nodes[0].address, head_port=head_port,
            accelerators=len(plan.devices[node]) if plan.devices else 0, peers=peers, rank=rank,
            world_size=shape.world_size, local_rank=shape.local_rank(rank), local_world_size=shape.procs_per_node,
            hostname=peers[node].hostname, job_id=status.job_id,
        )  # fmt: skip
        held = tuple(one.uuid for one in plan.devices_of(rank) if one.uuid)
        found[rank] = (
            machines[node],
            wire.RankSpec(rank, info.plain(), packed, devices_environment(plan, rank), gpus=held),
        )
    return found
