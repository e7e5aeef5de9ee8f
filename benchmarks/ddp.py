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
EPOCHS = """\
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(1000, 784), torch.randint(0, 10, (1000,))
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank())
loader = DataLoader(dataset, batch_size=64, sampler=sampler)
model = DDP(nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
def train(epochs):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            loss = loss_fn(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: loss={loss.item():.4f}")
train(10)
dist.barrier()
begun = time.perf_counter()
train(50)
rate = 50 * len(loader) / (time.perf_counter() - begun)
"""
"""The whole loop of a first training script: data in batches, a sampler, a line for each epoch."""


def figures() -> Iterator[Figure]:
    """One pool for all rounds; it idles while torchrun works."""
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # what torchrun sets, and what a rank gets; here for both, whatever was set
    )
    with cluster.started(RANKS, "torch") as pool:
        for name, body in (("steps", BODY), ("with a DataLoader, steps", EPOCHS)):
            script = (
                peers.INIT
                + body
                + "print(f'rate {rate}\\n', end='', flush=True) if dist.get_rank() == 0 else None"
            )
            say(f"DDP on {RANKS} ranks, {name}/s: ours, torchrun")
            ours, theirs = alternate(
                ROUNDS,
                lambda body=body: cluster.run(pool, body + "rate")[0],  # type: ignore[misc]
                lambda script=script: peers.torchrun(script + peers.DDP_END, RANKS).number("rate"),  # type: ignore[misc]
            )
            yield Figure(
                f"DDP on {RANKS} ranks, {name} per second", median(ours), "/s", median(theirs), "torchrun",
                limit=0.98, relative=True, least=True,
            )  # fmt: skip
