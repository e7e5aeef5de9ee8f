"""The environment of a script: the node's own, with the cluster described in SkyPilot's words, and nothing of a rank's framework."""

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
    r"(LOCAL_|GROUP_|NODE_|ROLE_|)RANK|(LOCAL_|GROUP_|ROLE_|)WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|JAX_(COORDINATOR_ADDRESS|COORDINATOR_PORT|PROCESS_ID|NUM_PROCESSES|LOCAL_DEVICE_IDS)"
    r"|COMPUTE_POOL"
)
"""Variables that tell one process its place among others: a script's own processes are told theirs by their launcher."""

HOSTFILE = "SKYMAGIC_HOSTFILE"
"""Variable with the path of the script's `hostfile`."""
C10D_RENDEZVOUS = re.compile(r"--rdzv[-_]backend[= ]+[\"']?c10d")
STANDALONE = "--standalone"
"""A script with both has torchruns that each need a store of their own."""
LAUNCHER = re.compile(r"\btorchrun\b|torch\.distributed\.(run|launch)\b")
ALONE = re.compile(rf"{STANDALONE}|--nnodes[= ]+[\"']?1(:1)?(?!\d)")
"""A script with one of these in it has a launcher for which its node is all there is."""
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "accel*", "davinci*", "dxg", "dri/render*")
"""Device files of NVIDIA's, AMD's, Habana's, Ascend's, WSL's and Intel's GPUs."""


def cluster_of(info: InstanceInfo, nodes: Sequence[int], task: str, port: int) -> InstanceInfo:
    """The place of a script on `info`'s node in the cluster of the `nodes` that run it, one process on each."""
    peers = {peer.node: peer for peer in info.peers}
    place = nodes.index(info.node)
    taking_part = tuple(replace(peers[node], node=index) for index, node in enumerate(nodes))
    return replace(
        info, node=place, total_nodes=len(nodes), head_addr=peers[nodes[0]].addr, head_port=port, peers=taking_part,
        rank=place, world_size=len(nodes), local_rank=0, local_world_size=1, job_id=task,
    )  # fmt: skip


def environment(
    base: Mapping[str, str],
    cluster: InstanceInfo,
    processes: int,
    own: Mapping[str, str],
    error_file: str,
    text: str,
) -> dict[str, str]:
    """All variables of a script.

    Args:
        base: what the node's processes have, before a rank is made of one.
        cluster: as `cluster_of` gives it.
        processes: how many processes a launcher should start on each node: one per GPU, or as many as the pool has ranks there.
        own: of this script alone; they win.
        error_file: where torch's launcher writes the first error.
        text: the script's own.
    """
    kept = {name: value for name, value in base.items() if not RANK_VARIABLES.fullmatch(name)}
    described = {
        "NODE_IPS": "\n".join(peer.addr for peer in cluster.peers),
        "NUM_NODES": cluster.total_nodes,
        "NODE_RANK": cluster.node,
        "NUM_GPUS_PER_NODE": processes,
        "TASK_ID": cluster.job_id,
    }
    cluster_variables = {
        f"{whose}_{name}": str(value)
        for whose in ("SKYPILOT", "SKYMAGIC")
        for name, value in described.items()
    }
    return {
        "PYTHONUNBUFFERED": "1",
        "TQDM_POSITION": "0",  # the screen has one line for the bars of a stream, nested ones too
        **torchrun(cluster, text),
        **launch(cluster, processes, text),
        **accelerate(cluster),
        **kept,
        **cluster_variables,
        **interfaces(cluster, kept),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)]),
        "MASTER_ADDR": cluster.head_addr,
        "MASTER_PORT": str(cluster.head_port),
        VARIABLE: cluster.to_json(),
        "TORCHELASTIC_ERROR_FILE": error_file,
        **own,
    }


def rank_place(info: InstanceInfo) -> dict[str, str]:
    """Return the variables that tell a rank its place in the pool, for a script that runs on its behalf.

    The meeting point is left out: the pool's own is taken by the ranks, and the script has one that is free.
    """
    return {
        name: value
        for name, value in network.environment(info).items()
        if RANK_VARIABLES.fullmatch(name) and not name.startswith("MASTER_")
    }


def torchrun(cluster: InstanceInfo, text: str) -> dict[str, str]:
    """What torchrun would otherwise guess from the hostname, as the defaults of its options.

    With --rdzv_backend=c10d it looks whether the endpoint is this machine by resolving the hostname, which on many clouds gives
    127.0.1.1 or nothing: then nobody hosts the store. On one machine all nodes are it, and a port that is taken looks like the store
    of another node. And torchrun tells the others its fully qualified name, which they may not be able to resolve.
    """
    on_one_machine = cluster.head_addr.startswith("127.")
    defaults = {} if on_one_machine else {"PET_LOCAL_ADDR": cluster.peers[cluster.node].addr}
    if C10D_RENDEZVOUS.search(text) and STANDALONE not in text:
        defaults["PET_RDZV_CONF"] = f"is_host={int(cluster.is_head)}"
    elif cluster.is_head and not on_one_machine:
        defaults["PET_RDZV_CONF"] = "is_host=1"
    elif not on_one_machine and not resolves(socket.gethostname()):
        defaults["PET_RDZV_CONF"] = (
            "is_host=0"  # torchrun fails over such a name, unless it need not look
        )
    return defaults


def launch(cluster: InstanceInfo, processes: int, text: str) -> dict[str, str]:
    """The nodes, the processes and the meeting point of a torchrun in the script, as the defaults of its options.

    Only where the text calls it: a torchrun in a file that the script calls may be one for its node alone, and would wait for others.
    """
    if not LAUNCHER.search(text) or ALONE.search(text):
        return {}
    defaults: dict[str, object] = {"NPROC_PER_NODE": processes}
    if cluster.total_nodes > 1:  # one node alone meets at a port of torchrun's own choice
        defaults["NNODES"] = cluster.total_nodes
        if C10D_RENDEZVOUS.search(text):
            defaults |= {
                "RDZV_ENDPOINT": f"{cluster.head_addr}:{cluster.head_port}",
                "RDZV_ID": cluster.job_id,
            }
        else:
            defaults |= {
                "NODE_RANK": cluster.node, "MASTER_ADDR": cluster.head_addr, "MASTER_PORT": cluster.head_port,
            }  # fmt: skip
    return {f"PET_{name}": str(value) for name, value in defaults.items()}


def hostfile(cluster: InstanceInfo, processes: int) -> str:
    """The nodes as launchers of the MPI kind read them, ``ADDRESS slots=PROCESSES``, a line for each in the order of their numbers.

    DeepSpeed refuses a name that stands there twice: nodes that share an address are told apart by their numbers, which no launcher
    can connect to. One that is started on each node (``deepspeed --no_ssh``) does not.
    """
    names = [peer.addr for peer in cluster.peers]
    if len(set(names)) < len(names):
        names = [f"node{peer.node}" for peer in cluster.peers]
    return "".join(f"{name} slots={processes}\n" for name in names)


def accelerate(cluster: InstanceInfo) -> dict[str, str]:
    """Without it accelerate, and HuggingFace's Trainer with it, would train each process by itself where there are no GPUs."""
    seen = sys.platform != "linux" or any(glob.glob(f"/dev/{device}") for device in GPU_DEVICES)
    return {} if cluster.accelerators or seen else {"ACCELERATE_USE_CPU": "true"}


def resolves(hostname: str) -> bool:
    """Whether this machine finds an address for a name."""
    try:
        return bool(socket.getaddrinfo(hostname, None))
    except OSError:
        return False
