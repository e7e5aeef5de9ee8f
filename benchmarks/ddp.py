"""Steps of DDP per second in a cell, against the same script under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks import cluster, peers
from benchmarks.figures import Figure, alternate, median, say

RANKS = 2
ROUNDS = 5
BODY = """\
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)]
model = DDP(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = torch.nn.CrossEntropyLoss()
x, y = torch.randn(256, 256), torch.randint(0, 10, (256,))
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()
train(50)
dist.barrier()
begun = time.perf_counter()
train(300)
rate = 300 / (time.perf_counter() - begun)
"""


def figures() -> Iterator[Figure]:
    """One pool for all rounds; it idles while torchrun works."""
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # what torchrun sets, and what a rank gets; here for both, whatever was set
    )
    script = (
        peers.INIT + BODY + "print('rate', rate, flush=True) if dist.get_rank() == 0 else None" + peers.END
    )
    with cluster.started(RANKS, "torch") as pool:
        say(f"DDP on {RANKS} ranks, steps/s: ours, torchrun")
        ours, theirs = alternate(
            ROUNDS,
            lambda: cluster.run(pool, BODY + "rate")[0],
            lambda: peers.torchrun(script, RANKS).number("rate"),
        )
    yield Figure(
        f"DDP on {RANKS} ranks, steps per second", median(ours), "/s", median(theirs), "torchrun",
        limit=0.98, relative=True, least=True,
    )  # fmt: skip
