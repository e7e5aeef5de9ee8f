"""Environment of a script: the node's own plus the cluster in SkyPilot's variables.

Variables of a rank's framework are removed.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from skymagic.kernels import network
from skymagic.kernels.network import interfaces
from skymagic.runtime.info import VARIABLE, InstanceInfo

RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_|)RANK|(LOCAL_|GROUP_|ROLE_|)WORLD_SIZE|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|JAX_(COORDINATOR_ADDRESS|COORDINATOR_PORT|PROCESS_ID|NUM_PROCESSES|LOCAL_DEVICE_IDS)"
    r"|COMPUTE_POOL"
)
"""Variables that describe a process's position among others.

A script's launcher sets them for its processes.
"""

HOSTFILE = "SKYMAGIC_HOSTFILE"
"""Variable with the path of the script's `hostfile`."""
C10D_RENDEZVOUS = re.compile(r"--rdzv[-_]backend[= ]+[\"']?c10d")
STANDALONE = "--standalone"
"""If a script has both options, each torchrun in it needs its own store."""
LAUNCHER = re.compile(r"\btorchrun\b|torch\.distributed\.(run|launch)\b")
ALONE = re.compile(rf"{STANDALONE}|--nnodes[= ]+[\"']?1(:1)?(?!\d)")
"""Options of a launcher that runs on its node alone."""
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "accel*", "davinci*", "dxg", "dri/render*")
"""Device files of GPUs by NVIDIA, AMD, Habana, Ascend, WSL and Intel."""


def cluster_of(info: InstanceInfo, nodes: Sequence[int], task: str, port: int) -> InstanceInfo:
    """Describe the cluster of the `nodes` that run a script, from `info`'s node.

    It has one process on each node.
    """
    peers = {peer.node: peer for peer in info.peers}
    node_rank = nodes.index(info.node)
    participants = tuple(replace(peers[node], node=index) for index, node in enumerate(nodes))
    return replace(
        info,
        node=node_rank,
        total_nodes=len(nodes),
        head_addr=peers[nodes[0]].addr,
        head_port=port,
        peers=participants,
        rank=node_rank,
        world_size=len(nodes),
        local_rank=0,
        local_world_size=1,
        job_id=task,
    )


def environment(
    base: Mapping[str, str],
    cluster: InstanceInfo,
    processes: int,
    own: Mapping[str, str],
    error_file: str,
    text: str,
) -> dict[str, str]:
    """Return all environment variables of a script.

    Args:
        base: variables of the node's processes, before a process becomes a rank.
        cluster: result of `cluster_of`.
        processes: number of processes for a launcher to start on each node: one per GPU, or as many
            as the pool has ranks there.
        own: variables of this script alone; they take precedence.
        error_file: path for the first error, which torch's launcher writes.
        text: text of the script.
    """
    inherited = {name: value for name, value in base.items() if not RANK_VARIABLES.fullmatch(name)}
    values = {
        "NODE_IPS": "\n".join(peer.addr for peer in cluster.peers),
        "NUM_NODES": cluster.total_nodes,
        "NODE_RANK": cluster.node,
        "NUM_GPUS_PER_NODE": processes,
        "TASK_ID": cluster.job_id,
    }
    cluster_variables = {
        f"{prefix}_{name}": str(value)
        for prefix in ("SKYPILOT", "SKYMAGIC")
        for name, value in values.items()
    }
    # later entries win: defaults, the node's variables, the cluster's, the script's own
    return {
        "PYTHONUNBUFFERED": "1",
        # the screen has one line for all bars of a stream, including nested ones
        "TQDM_POSITION": "0",
        **torchrun(cluster, text),
        **launch(cluster, processes, text),
        **accelerate(cluster),
        **inherited,
        **cluster_variables,
        **interfaces(cluster, inherited),
        "PATH": os.pathsep.join(
            [os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)]
        ),
        "MASTER_ADDR": cluster.head_addr,
        "MASTER_PORT": str(cluster.head_port),
        VARIABLE: cluster.to_json(),
        "TORCHELASTIC_ERROR_FILE": error_file,
        **own,
    }


def rank_place(info: InstanceInfo) -> dict[str, str]:
    """Return the variables with a rank's position in the pool, for a script that acts for the rank.

    The rendezvous address is left out: the ranks use the pool's own, and the script gets a free
    one.
    """
    return {
        name: value
        for name, value in network.environment(info).items()
        if RANK_VARIABLES.fullmatch(name) and not name.startswith("MASTER_")
    }


def torchrun(cluster: InstanceInfo, text: str) -> dict[str, str]:
    """Return defaults for torchrun options that it would otherwise guess from the hostname.

    With --rdzv_backend=c10d it resolves the hostname to see if the endpoint is this machine, which
    on many clouds gives 127.0.1.1 or nothing: then no node hosts the store. If all nodes are on one
    machine, the endpoint matches all of them, and a port in use looks like the store of another
    node. And torchrun sends other nodes its fully qualified name, which they may not be able to
    resolve.
    """
    on_one_machine = cluster.head_addr.startswith("127.")
    # torchrun would send other nodes a hostname that they may not be able to resolve
    defaults = {} if on_one_machine else {"PET_LOCAL_ADDR": cluster.peers[cluster.node].addr}
    if C10D_RENDEZVOUS.search(text) and STANDALONE not in text:
        defaults["PET_RDZV_CONF"] = f"is_host={int(cluster.is_head)}"
    elif cluster.is_head and not on_one_machine:
        defaults["PET_RDZV_CONF"] = "is_host=1"
    elif not on_one_machine and not resolves(socket.gethostname()):
        # torchrun fails on such a name, unless it need not resolve it
        defaults["PET_RDZV_CONF"] = "is_host=0"
    return defaults


def launch(cluster: InstanceInfo, processes: int, text: str) -> dict[str, str]:
    """Return defaults for a torchrun in the script: its nodes, processes and rendezvous.

    They apply only if the script's text calls torchrun: a torchrun in another file may be intended
    for its node alone, and would wait for other nodes.
    """
    if not LAUNCHER.search(text) or ALONE.search(text):
        return {}
    defaults: dict[str, object] = {"NPROC_PER_NODE": processes}
    if cluster.total_nodes > 1:  # a single node uses a port that torchrun picks
        defaults["NNODES"] = cluster.total_nodes
        if C10D_RENDEZVOUS.search(text):
            defaults |= {
                "RDZV_ENDPOINT": f"{cluster.head_addr}:{cluster.head_port}",
                "RDZV_ID": cluster.job_id,
            }
        else:
            defaults |= {
                "NODE_RANK": cluster.node,
                "MASTER_ADDR": cluster.head_addr,
                "MASTER_PORT": cluster.head_port,
            }
    return {f"PET_{name}": str(value) for name, value in defaults.items()}


def hostfile(cluster: InstanceInfo, processes: int) -> str:
    """Return an MPI-style hostfile: ``ADDRESS slots=PROCESSES``, one line per node in order.

    DeepSpeed refuses duplicate names, so nodes that share an address are named by their numbers, to
    which no launcher can connect. A launcher that is started on each node (``deepspeed --no_ssh``)
    does not need to.
    """
    names = [peer.addr for peer in cluster.peers]
    if len(set(names)) < len(names):
        # DeepSpeed refuses duplicate names
        names = [f"node{peer.node}" for peer in cluster.peers]
    return "".join(f"{name} slots={processes}\n" for name in names)


def accelerate(cluster: InstanceInfo) -> dict[str, str]:
    """Return the variables that make accelerate run distributed on CPUs.

    Without them accelerate, and with it HuggingFace's Trainer, would train in each process
    independently on machines without GPUs.
    """
    has_devices = sys.platform != "linux" or any(
        glob.glob(f"/dev/{device}") for device in GPU_DEVICES
    )
    return {} if cluster.accelerators or has_devices else {"ACCELERATE_USE_CPU": "true"}


def resolves(hostname: str) -> bool:
    """Return True if this machine can resolve a host name."""
    try:
        return bool(socket.getaddrinfo(hostname, None))
    except OSError:
        return False
