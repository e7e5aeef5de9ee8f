"""What lies on several ranks comes to the notebook whole: DTensor, FSDP 1 and 2; or an error says what to bring instead."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import ResultError

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

if find_spec("torch"):
    import torch
    from torch import nn

    class Net(nn.Module):
        """Two layers that share nothing, and a hook of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
            self.note = "mine"

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(nodes=2, plugins=["torch"]) as made:
        yield made


def stepped(net: Any) -> Any:
    """A model after one step of Adam, on data that all ranks have."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return net, optimizer


def expected() -> Any:
    torch.manual_seed(0)
    return stepped(Net())


@sky.function
def sharded(kind: str) -> Any:
    """(model, optimizer) after one step, sharded over all ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    net = Net()
    if kind == "fully_shard":
        fully_shard(net.first)
        return stepped(fully_shard(net))
    net.first = FullyShardedDataParallel(
        net.first, device_id=torch.device("cpu"), use_orig_params=kind == "original"
    )
    return stepped(
        FullyShardedDataParallel(
            net, device_id=torch.device("cpu"), use_orig_params=kind == "original"
        )
    )


def alike(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name]) for name in one
    )


def test_fully_sharded_module_is_pulled_as_its_own_class(pool: Any) -> None:
    """With whole parameters and gradients, without FSDP's hooks, and the optimizer holds its parameters."""
    plain, plain_optimizer = expected()
    for net, optimizer in sharded("fully_shard") @ pool:
        assert type(net) is Net
        assert net.note == "mine"
        assert type(net.first.weight) is nn.Parameter
        assert alike(net.state_dict(), plain.state_dict())
        assert torch.allclose(net.first.weight.grad, plain.first.weight.grad)
        assert not net._forward_hooks
        assert not net._forward_pre_hooks
        assert optimizer.param_groups[0]["params"][0] is net.first.weight
        ours, theirs = optimizer.state[net.first.weight], plain_optimizer.state[plain.first.weight]
        assert torch.allclose(ours["exp_avg"], theirs["exp_avg"])
        before = net.first.weight.detach().clone()
        net(torch.ones(1, 5)).sum().backward()  # it trains on here
        optimizer.step()
        assert not torch.equal(before, net.first.weight)


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_fsdp_module_is_pulled_as_the_module_it_wraps(pool: Any, kind: str) -> None:
    plain, _ = expected()

    @sky.function
    def model() -> Any:
        return sharded.local(kind)[0]

    for net in model() @ pool:
        assert type(net) is Net
        assert alike(net.state_dict(), plain.state_dict())
        net(torch.ones(1, 5)).sum().backward()


def test_training_continues_after_pulling_the_model(pool: Any) -> None:
    @sky.function
    def keep(kind: str) -> None:
        import __main__

        __main__.kept = sharded.local(kind)

    @sky.function
    def bring() -> Any:
        import __main__

        return __main__.kept[0]

    @sky.function
    def step() -> float:
        import __main__

        net, optimizer = __main__.kept
        optimizer.zero_grad()
        loss = net(torch.ones(2, 5)).sum()
        loss.backward()
        optimizer.step()
        return float(loss)

    for kind in ("fully_shard", "flat"):
        keep(kind) @ pool
        first = (bring() @ pool)[0].state_dict()
        one, other = step() @ pool
        assert one == other
        assert not alike(first, (bring() @ pool)[0].state_dict())


def test_tensors_wherever_they_are(pool: Any) -> None:
    @sky.function
    def tensors() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(15.0).reshape(5, 3)
        row = distribute_tensor(whole, mesh, [Shard(0)])
        return {
            "row": row,
            "column": [distribute_tensor(whole, mesh, [Shard(1)])],
            "copy": distribute_tensor(whole, mesh, [Replicate()]),
            "sum": row.sum(),
            "plain": sky.instance_info().rank,
            "partial": isinstance(row.sum().placements[0], Partial),
            "same": row,
        }

    whole = torch.arange(15.0).reshape(5, 3)
    for rank, found in enumerate(tensors() @ pool):
        assert type(found["row"]) is torch.Tensor
        assert torch.equal(found["row"], whole)
        assert found["row"] is found["same"]
        assert torch.equal(found["column"][0], whole)
        assert torch.equal(found["copy"], whole)
        assert found["sum"] == whole.sum()
        assert (found["plain"], found["partial"]) == (rank, True)


@sky.function
def row() -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        torch.ones(1, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False
    )


def refused(pool: Any, call: Any, words: str, one: bool = False) -> None:
    with pytest.raises(ResultError, match=words) as caught:
        call >> pool if one else call @ pool
    assert "cannot pickle" not in str(caught.value)


def test_single_shard_is_refused_with_a_remedy(pool: Any) -> None:
    @sky.function
    def alone() -> Any:
        return row.local() if sky.instance_info().rank == 0 else 5

    @sky.function
    def apart() -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        rows = 1 + sky.instance_info().rank
        mesh = DeviceMesh("cpu", [0, 1])
        return DTensor.from_local(torch.ones(rows, 2 + rows), mesh, [Shard(0)], run_check=False)

    refused(pool, alone(), "rank 0 and rank 1 are not of one value: make it on all ranks alike")
    refused(pool, apart(), "are not of one value")
    assert [tensor.tolist() for tensor in row() @ pool] == [[[1, 1], [1, 1]]] * 2


@sky.function
def of_the_ranks(what: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return {
        "mesh": lambda: init_device_mesh("cpu", (2,)),
        "group": lambda: dist.group.WORLD,
        "optimizer": lambda: sharded.local("flat")[1],
        "original": lambda: sharded.local("original")[1],
    }[what]()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mesh", "a DeviceMesh lives on its ranks alone.*mesh.mesh"),
        ("group", "a process group lives on its ranks alone"),
        ("optimizer", "get_optimizer_state_dict"),
        ("original", "get_optimizer_state_dict"),
    ],
)
def test_rank_only_objects_are_refused_with_a_reason(pool: Any, what: str, words: str) -> None:
    refused(pool, of_the_ranks(what), words)


def test_run_on_some_ranks_names_holders_of_other_shards(pool: Any) -> None:
    refused(pool, row(), "does not take part in this run", one=True)
