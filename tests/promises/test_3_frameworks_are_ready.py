"""Promise 3: one rank per GPU or as asked, and torch is initialised before the cell body runs."""

from __future__ import annotations

from tests.lab.notebook import Notebook, seen


def test_process_group_exists_before_the_first_cell(pool: Notebook) -> None:
    cell = "total = torch.tensor([rank + 1.0])\ndist.all_reduce(total)\n(dist.get_world_size(), dist.get_rank(), total.item())"
    assert seen(pool, cell) == [(2, 0, 3.0), (2, 1, 3.0)]


def test_ddp_trains_equally_on_all_ranks(pool: Notebook) -> None:
    cell = """from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model_3 = DDP(torch.nn.Linear(4, 1))
optimizer_3 = torch.optim.SGD(model_3.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(3):
    optimizer_3.zero_grad()
    model_3(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer_3.step()
round(sum(p.double().sum().item() for p in model_3.parameters()), 12)"""
    first, second = seen(pool, cell)
    assert first == second


def test_objects_are_gathered(pool: Notebook) -> None:
    cell = "found_3 = [None, None]\ndist.all_gather_object(found_3, {'rank': rank})\nfound_3"
    assert seen(pool, cell) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_shards_are_disjoint_and_complete(pool: Notebook) -> None:
    first, second = seen(pool, "sky.shard(list(range(11)), shuffle=True, seed=3)")
    assert sorted(first + second) == list(range(11))
    assert abs(len(first) - len(second)) <= 1


def test_shards_are_equally_long_on_request(pool: Notebook) -> None:
    assert seen(pool, "sky.shard(list(range(5)), drop_last=True)") == [[0, 2], [1, 3]]


def test_a_collective_without_all_ranks_is_refused(pool: Notebook) -> None:
    failure = pool.fail("%%sky_broadcast -t 1 --timeout 5s\ndist.all_reduce(torch.ones(1))")
    assert failure.ename == "RuntimeError"


def test_the_environment_of_torchrun_is_set(pool: Notebook) -> None:
    cell = "[os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NODE_RANK')]"
    assert seen(pool, cell) == [["0", "0", "2", "1", "0"], ["1", "0", "2", "1", "1"]]
    cell = "(bool(os.environ['MASTER_ADDR']), int(os.environ['MASTER_PORT']) > 0)"
    assert seen(pool, cell) == [(True, True)] * 2
