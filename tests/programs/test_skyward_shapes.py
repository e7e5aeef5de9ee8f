"""Programs in the shapes of Skyward's guides, in our words: streams, slots, several specs, a model that travels both ways.

Of each only the provider and the sizes are what they are on two CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


# ---------------------------------------------------------------------- streaming: out, in, and both ways


@sky.function
def powers(base: int, n: int):  # as users write it, without annotations
    value = 1
    for _ in range(n):
        yield value
        value *= base


@sky.function
def running_total(data: Iterator[float]) -> list[float]:
    total, totals = 0.0, []
    for x in data:
        total += x
        totals.append(total)
    return totals


@sky.function
def smoothed(data: Iterator[float], window: int = 3):
    from collections import deque

    last: deque[float] = deque(maxlen=window)
    for x in data:
        last.append(x)
        yield sum(last) / len(last)


@pytest.fixture(scope="module")
def compute() -> Iterator[Any]:
    """With the image that the guides' models have."""
    torch = {"image": sky.Image(pip=["torch"], pip_indexes=[INDEX])} if find_spec("torch") else {}
    with sky.Compute(provider=sky.Local(), nodes=1, **torch) as made:
        yield made


def test_streaming(compute: Any) -> None:
    assert [value for value in powers(3, 5) >> compute] == [1, 3, 9, 27, 81]  # noqa: C416  # a loop over a stream
    assert running_total(iter([1.0, 2.0, 3.0])) >> compute == [1.0, 3.0, 6.0]
    assert list(smoothed(iter([1.0, 2.0, 3.0, 4.0]), window=2) >> compute) == [1.0, 1.5, 2.5, 3.5]


# ------------------------------------------------------- parallel execution, with slots, results as they come


@sky.function
def burn(task: int) -> dict[str, Any]:
    total = sum(i**0.5 for i in range(10_000))
    return {"task": task, "total": round(total), "worker": sky.instance_info().local_rank}


@sky.function
def where() -> sky.InstanceInfo:
    return sky.instance_info()


def test_parallel_execution_on_slots() -> None:
    with sky.Compute(
        provider=sky.Local(), procs_per_node=2, vcpus=1, memory_gb=0.1, nodes=1, console=False
    ) as compute:
        results = sky.gather(*(burn(i) for i in range(12)), stream=True)
        found = [r["task"] for r in (results >> compute)]
        assert found == list(range(12))
        a, b = (burn(1) & burn(2)) >> compute
        assert (a["task"], b["task"]) == (1, 2)
        info = where() >> compute
        assert {each.local_rank for each in where() @ compute} == {0, 1}
        assert isinstance(info, sky.InstanceInfo)
        assert (info.node, info.total_nodes, info.is_head) == (0, 1, True)


# ---------------------------------------------------------------------------- several providers, in order


# --------------------------------------------------------------------------- a model there and back again


@needs_torch
def test_model_survives_a_round_trip(compute: Any) -> None:
    import torch
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.features(x))

    @sky.function
    def fit(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, lr: float
    ) -> nn.Module:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(epochs):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model.cpu()

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x.sum(1) > 0).long()
    model = Classifier()
    trained = fit(model, x, y, epochs=60, lr=0.02) >> compute
    assert isinstance(trained, Classifier)
    assert not torch.equal(trained.head.weight, model.head.weight)
    assert (trained(x).argmax(1) == y).float().mean() > 0.9


INDEX = sky.PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch"])
