"""Scripts on two nodes: against two torchruns started by hand, and how long a run lasts after one of its workers was killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cluster, peers
from benchmarks.figures import Figure, alternate, median, say
from skymagic.jobs import cell, script
from skymagic.magics.arguments.cell_magics import parse_sh
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import Pool
from skymagic.pool.launch import ensure
from skymagic.run.interrupt import StopSignal
from skymagic.run.state import Limits
from skymagic.runtime.rendezvous import free_port

ROUNDS = 5
NODES, PROCESSES = 2, 2
REDUCE = (
    peers.INIT
    + "dist.barrier()\nimport time\nprint(f'reduced {time.time()}\\n', end='', flush=True)"
    + peers.END
)
KILLED = """\
import os, signal, time, torch.distributed as dist
dist.init_process_group('gloo')
if dist.get_rank() == 3:
    print(f'killed {time.time()}\\n', end='', flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""
SCRIPT = """\
torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
    --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT --node_rank=$SKYPILOT_NODE_RANK train.py
"""


def figures() -> Iterator[Figure]:
    """Ours and by hand in turn, with the same processes on the same machine."""
    request = PoolRequest(
        name=f"bench-{os.getpid()}", provider="local", nodes=NODES, procs_per_node=PROCESSES
    )
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        contextlib.closing(ensure(request, {}, Defaults(), lambda text: None)) as one,
    ):
        train = Path(folder) / "train.py"
        train.write_text(REDUCE)
        say(
            f"{NODES} × {PROCESSES} processes to the end of a first barrier: %%sky_sh, torchrun by hand"
        )
        ours, theirs = alternate(ROUNDS, lambda: by_script(one, folder), lambda: by_hand(folder))
        yield Figure(
            "script to its first barrier", median(ours), peer=median(theirs), who="torchrun by hand"
        )
        yield Figure("  … over torchrun by hand", median(ours) - median(theirs), limit=1.0)
        train.write_text(KILLED)
        say("a worker is killed: until the cell has failed on all nodes")
        ended = [by_script(one, folder, "killed") for _ in range(ROUNDS)]
        yield Figure("worker killed → cell failed", max(ended), limit=5.0)


def by_script(one: Pool, folder: str, label: str = "reduced") -> float:
    """Seconds from the cell's start to what the script says; for "killed", from there to the cell's end."""
    screen = cluster.Quiet()
    spec = script.spec_of(parse_sh(f"--workdir {folder} --only all"), one, cell.Cell(SCRIPT))
    begun = time.time()
    one.runs.run(spec, screen, Limits(), StopSignal())
    ended = time.time()
    texts: dict[int, str] = {}
    for rank, piece in screen.pieces:  # a word may come in two
        texts[rank] = texts.get(rank, "") + piece
    said = [float(words) for text in texts.values() for words in numbers(text, label)]
    return ended - said[0] if label == "killed" else max(said) - begun


def by_hand(folder: str) -> float:
    """The same from the start of a torchrun for each node."""
    port = free_port("127.0.0.1")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={NODES}",
        f"--nproc_per_node={PROCESSES}",
    ]
    launch += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    begun = time.time()
    nodes = [
        subprocess.Popen(
            [*launch, f"--node_rank={node}", "train.py"], cwd=folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for node in range(NODES)
    ]  # fmt: skip
    said = [
        float(words)
        for node in nodes
        for words in numbers(node.communicate(timeout=120)[0], "reduced")
    ]
    return max(said) - begun


def numbers(text: str, label: str) -> list[str]:
    """The words that follow a label."""
    words = text.split()
    return [after for word, after in zip(words, words[1:], strict=False) if word == label]
