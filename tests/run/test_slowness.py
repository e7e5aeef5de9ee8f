"""Why a run is slow, measured on ranks: a slow data set, a straggler, different collectives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.notebook import Shown
from tests.lab.pools import Pools

# ------------------------------------------------------------------------------------------ on ranks


def line(shown: Shown) -> str:
    """The cell's line."""
    return next((data["text/plain"] for data in shown.rich if " · " in data["text/plain"]), "")


def test_a_slow_data_set_on_one_rank_is_named(shared_pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    stop = tmp_path / "stop"
    cell = f"""\
%%sky_broadcast
import os, time, torch
from torch.utils.data import DataLoader, Dataset
rank = int(os.environ["RANK"])
class Images(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.09 if rank == 1 else 0)
        return torch.zeros(4)
for batch in DataLoader(Images(), batch_size=2):
    time.sleep(0.06)
    if os.path.exists({str(stop)!r}):
        break
"""
    with shared_pools.lent("--ranks 2 --plugin torch", view_after=0.2, watched=True) as notebook:
        shown = notebook.start(cell)
        notebook.watch(shown, lambda one: "loading data" in line(one))
        said = re.search(r"rank 1 spends (\d+)% of its steps loading data", line(shown))
        stop.touch()
        notebook.finish(shown)
    assert said is not None
    assert 40 < int(said[1]) < 100, "75 on a machine that is at rest"
    assert re.fullmatch(r"2 ranks · \d+\.\d s · rank 1 spent \d\d% .*\bloading data", line(shown))


def test_a_straggler_of_ddp_is_named_without_reports(shared_pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    stop = tmp_path / "stop"
    cell = f"""\
%%sky_broadcast
import os, time, torch
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
model = DistributedDataParallel(torch.nn.Linear(8, 1))
while True:
    time.sleep(0.2 if rank == 1 else 0)
    model(torch.ones(4, 8)).sum().backward()
    over = torch.tensor(int(rank == 1 and os.path.exists({str(stop)!r})))
    torch.distributed.all_reduce(over)
    if over:
        break
"""
    setting = "%config SkyMagic.stall_after = 2.0"  # five looks in it
    with shared_pools.lent(
        "--ranks 2 --plugin torch", setting, view_after=0.2, watched=True
    ) as notebook:
        shown = notebook.start(cell)
        notebook.watch(shown, lambda one: "last in every collective" in line(one))
        assert "rank 1 is last" in line(shown)
        stop.touch()
        notebook.finish(shown)
    assert re.fullmatch(r"2 ranks · \d+\.\d s · (?:shipped .* · )?rank 1 was last .*", line(shown))


def test_diverged_collectives_are_in_the_line_and_the_note(shared_pools: Pools) -> None:
    pytest.importorskip("torch")
    cell = (
        "%%sky_broadcast\nimport torch, torch.distributed as dist\nt = torch.ones(3)\n"
        "if dist.get_rank() == 0: dist.all_reduce(t)\nelse: dist.broadcast(t, 0)\ndist.barrier()"
    )
    setting = "%config SkyMagic.stall_after = 3.0"
    with shared_pools.lent(
        "--ranks 2 --plugin torch", setting, view_after=0.2, watched=True
    ) as notebook:
        shown = notebook.start(cell)
        notebook.watch(shown, lambda one: "rank 0 waits in" in line(one))
        assert "rank 0 waits in all_reduce, rank 1 in broadcast" in line(shown)
        notebook.watch(shown, lambda one: bool(one.standstill))
        summary = "no progress for 3 s: rank 0 waits in all_reduce, rank 1 in broadcast\n"
        assert shown.standstill.startswith(summary)
        notebook.interrupt()
        notebook.finish(shown)


def test_uneven_batches_are_in_the_line_and_the_note(
    shared_pools: Pools,
) -> None:
    pytest.importorskip("torch")
    cell = """\
%%sky_broadcast
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
net = torch.nn.Sequential(torch.nn.Linear(4, 4), {layer})
model = DistributedDataParallel(net)
for step in range(3 - dist.get_rank()):
    model(torch.ones(4, 4)).sum().backward()
"""
    setting = "%config SkyMagic.stall_after = 3.0"
    passes = {
        "torch.nn.BatchNorm1d(4)": "the forward pass of DDP",
        "torch.nn.Linear(4, 1)": "a backward pass",
    }
    with shared_pools.lent(
        "--ranks 2 --plugin torch", setting, view_after=0.2, watched=True
    ) as notebook:
        for layer, name in passes.items():
            shown = notebook.start(cell.format(layer=layer))
            notebook.watch(shown, lambda one: "has ended" in line(one))
            words = f"rank 0 waits in {name}, rank 1 has ended"
            assert words in line(shown)
            notebook.watch(shown, lambda one: bool(one.standstill))
            assert shown.standstill.startswith(f"no progress for 3 s: {words}\n")
            notebook.interrupt()
            notebook.finish(shown)


def test_rank_waiting_for_an_ended_rank_is_in_the_line(shared_pools: Pools) -> None:
    pytest.importorskip("torch")
    cell = (
        "%%sky_broadcast\nimport torch.distributed as dist\nif dist.get_rank() == 0: dist.barrier()"
    )
    with shared_pools.lent("--ranks 2 --plugin torch", view_after=0.2, watched=True) as notebook:
        shown = notebook.start(cell)
        notebook.watch(shown, lambda one: "has ended" in line(one))
        assert "rank 0 waits in barrier, rank 1 has ended" in line(shown)
        notebook.interrupt()
        notebook.finish(shown)
