"""The programs of the documents that this project starts from, in our words, on a pool of this machine.

Of each program only the provider, the accelerator and the sizes are changed, so that it runs on two CPUs in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


# --------------------------------------------------------------------- the guide: a decorator for one function


@sky.compute
@sky.integrations.torch
def guide(epochs: int, batch_size: int, lr: float) -> dict[str, Any]:
    """A classifier with DistributedDataParallel, a sampler, and metrics summed over all nodes."""
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    info = sky.instance_info()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: nn.Module = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    if dist.is_initialized():
        model = DDP(model)

    torch.manual_seed(0)
    x = torch.randn(1000, 100)
    y = torch.randint(0, 10, (1000,))
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        epoch_loss, correct, total = 0.0, 0, 0
        for batch_x, batch_y in loader:
            batch_x, batch_y = batch_x.to(device), batch_y.to(device)
            optimizer.zero_grad()
            output = model(batch_x)
            loss = criterion(output, batch_y)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
            correct += (output.argmax(1) == batch_y).sum().item()
            total += len(batch_y)

    stats = torch.tensor([epoch_loss, correct, total], dtype=torch.float64, device=device)
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return {
        "rank": dist.get_rank(),
        "loss": stats[0].item() / (len(loader) * info.total_nodes),
        "accuracy": 100.0 * stats[1].item() / stats[2].item(),
        "seen": int(stats[2].item()),
    }


def is_one_training(results: list[dict[str, Any]], nodes: int) -> None:
    """All nodes learnt, together, and agree on the figures."""
    assert [each["rank"] for each in results] == list(range(nodes))
    assert len({(each["loss"], each["accuracy"]) for each in results}) == 1
    assert results[0]["seen"] == 1000
    assert results[0]["accuracy"] > 30  # 10 in 100 by chance


@needs_torch
def test_the_guide_as_a_decorated_function() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        is_one_training(guide(epochs=8, batch_size=32, lr=1e-2) @ pool, 2)


# ------------------------------------------------------------------- the concepts: broadcast, shard, context, output


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    with sky.ComputePool(provider=sky.Local(), nodes=4) as made:
        yield made


def test_data_partitioning(four: Any) -> None:
    @sky.compute
    def train(x_full: Any, y_full: Any) -> tuple[list[int], list[int]]:
        x, y = sky.shard(x_full, y_full, shuffle=True, seed=42)
        return x, y

    x = list(range(10))
    parts = train(x, [n * n for n in x]) @ four
    assert all(each_y == [n * n for n in each_x] for each_x, each_y in parts)
    assert sorted(n for each_x, _ in parts for n in each_x) == x
    assert [len(each_x) for each_x, _ in parts] == [3, 3, 2, 2]


def test_runtime_context(four: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @sky.compute
    def distributed_task(data: list[int]) -> dict[str, Any]:
        info = sky.instance_info()
        print(f"Node {info.node} of {info.total_nodes}")
        coordinated = bool(info.is_head)
        return {
            "sum": sum(data),
            "coordinated": coordinated,
            "head": (info.head_addr, isinstance(info.head_port, int)),
            "accelerators": info.accelerators,
            "peers": [peer.node for peer in info.peers],
            "variable": "COMPUTE_POOL" in os.environ,
        }

    results = distributed_task([1, 2, 3]) @ four
    assert [each.pop("coordinated") for each in results] == [True, False, False, False]
    assert (
        results
        == [
            {
                "sum": 6,
                "head": ("127.0.0.1", True),
                "accelerators": 0,
                "peers": [0, 1, 2, 3],
                "variable": True,
            }
        ]
        * 4
    )
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[{n}] Node {n} of 4" for n in range(4)
    ]


def test_output_control(four: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    def train() -> None:
        print(f"Epoch {1}: loss={0.5:.4f}")
        os.system("echo from a program")
        print("a warning", file=sys.stderr)

    head = sky.compute(sky.stdout(only="head")(train))
    first_two = sky.compute(sky.stdout(only=lambda info: info.node < 2)(train))
    errors = sky.compute(sky.stderr(only="head")(train))
    silent = sky.compute(sky.silent(train))
    lines = ["Epoch 1: loss=0.5000", "from a program"]

    for call, out, err in (
        (head, [0], 4),
        (first_two, [0, 1], 4),
        (errors, [0, 1, 2, 3], 1),
        (silent, [], 0),
    ):
        call() @ four
        shown = capsys.readouterr()
        assert sorted(shown.out.splitlines()) == sorted(
            f"[{n}] {line}" for n in out for line in lines
        )
        assert shown.err.count("a warning") == err


# ----------------------------------------------------------------------- the reference of the torch plugin


@sky.compute
@sky.stdout(only="head")
def reference() -> dict[str, Any]:
    """The full training function; `.cuda()` where there is CUDA."""
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DDP(nn.Linear(784, 10).to(device))

    x = torch.randn(1000, 784)
    y = torch.randint(0, 10, (1000,))
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            batch_x, batch_y = batch_x.to(device), batch_y.to(device)
            loss = loss_fn(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: loss={loss.item():.4f}")
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    return {"final_loss": loss.item(), "rank": rank, "weights": weights}


@needs_torch
def test_group_is_ready_and_reference_trains_on_cpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @sky.compute
    def ready() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    with sky.ComputePool(
        provider=sky.Local(), nodes=4, plugins=[sky.plugins.torch(backend="gloo")]
    ) as pool:
        assert ready() @ pool == [True] * 4
        results = reference() @ pool
    assert [each["rank"] for each in results] == [0, 1, 2, 3]
    assert len({each["weights"] for each in results}) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"[0] Epoch {n}" for n in range(3)
    ]
