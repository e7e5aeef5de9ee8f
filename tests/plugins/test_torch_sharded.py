"""Sharded and wrapped models after a failure: they train on, with the weights that an undisturbed run has."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, opened, seen

pytest.importorskip("torch")

POOL = """import skymagic as sky
from skymagic.plugins import Plugin
modules = "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"
sky.Compute(nodes=4, name="main", plugins=["torch", Plugin(name="sharded", preload=modules)]).start();"""
"""What these models import, which takes longer than the tests, is imported once for the four ranks."""
SETUP = """%%sky_broadcast
import os, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
rank = dist.get_rank()
mark = object()
def quiet(place):
    pass
trouble = quiet
class Probe(torch.nn.Module):
    def forward(self, x):
        trouble('forward')
        x.register_hook(lambda grad: trouble('backward'))
        return x
def made(kind):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), Probe(), torch.nn.Linear(16, 8))
    if kind == 'ddp':
        return DDP(net)
    if kind == 'fsdp1':
        return FSDP(net, device_id=torch.device('cpu'))
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'shard')) if kind == 'hsdp' else init_device_mesh('cpu', (4,))
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)
def step(number):
    torch.manual_seed(100 * number + rank)
    model.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    trouble('behind')
    with torch.no_grad():  # as an optimizer does, of which torch's own import its compiler
        for p in model.parameters():
            p -= 0.01 * p.grad
def weights(model):
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [round(float(v.detach().double().sum()), 6) for v in values]
"""
MAKE = "%%sky_broadcast\ntrouble = quiet\nmodel = made('{0}')\nstep(0)"
FAILS = """%%sky_broadcast
def trouble(place):
    if place == '{place}':
        if rank == 2:
            raise ValueError('planted')
        {others}
step(1)"""
OTHERS = {
    "compute": "while True: sum(range(1000)); time.sleep(0.001)",
    "wait": "dist.all_reduce(torch.ones(1 << 16))",
}
GO_ON = "trouble = quiet\nfor number in (1, 2, 3):\n    step(number)\nweights(model)"
IDENTITY = "[id(mark), id(dist.group.WORLD)]"
PLACES = ["forward", "backward", "behind"]


@pytest.fixture(scope="module")
def module_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("sharded"), POOL) as one:
        yield one


@pytest.fixture
def notebook(module_notebook: Notebook) -> Notebook:
    module_notebook.run(SETUP)
    return module_notebook


def failed(notebook: Notebook, kind: str, place: str, others: str) -> str:
    """What is shown of a step that fails on rank 2; the others keep their variables, and their group if they can."""
    notebook.run(MAKE.format(kind))
    before = seen(notebook, IDENTITY)
    error = notebook.fail(FAILS.format(place=place, others=OTHERS[others]))
    assert "planted" in error.text
    shown = notebook.run("%%sky_broadcast\nnothing = None").text
    after = seen(notebook, IDENTITY)
    assert [mark for mark, _ in after] == [mark for mark, _ in before]
    # only ranks that wait in a collective cost the group
    assert ([group for _, group in after] == [group for _, group in before]) == (
        others == "compute"
    )
    return error.text + shown


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp", "fsdp1"])
def test_a_model_trains_on_after_a_failure(notebook: Notebook, kind: str) -> None:
    notebook.run(MAKE.format(kind))
    undisturbed = seen(notebook, GO_ON)
    # FSDP of the first kind has no way to begin a step anew
    for place in ["behind"] if kind == "fsdp1" else PLACES:
        for others in OTHERS:
            assert "model:" not in failed(notebook, kind, place, others)
            assert seen(notebook, GO_ON) == undisturbed, (place, others)


def test_unusable_model_is_named(golden: Golden, notebook: Notebook) -> None:
    for others in OTHERS:
        shown = failed(notebook, "fsdp1", "forward", others)
        golden.line(shown, "model: ")
    notebook.run("%%sky_broadcast\ndel model")


GROUPS = """%%sky_broadcast
pair, other = dist.new_group([0, 1]), dist.new_group([2, 3])
mine = pair if rank < 2 else other
mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'shard'))
tensor = distribute_tensor(torch.arange(8.0), mesh['shard'], [Shard(0)])
wrapped = DDP(torch.nn.Linear(4, 4), process_group=mine)
def total(value, group=mine):
    dist.all_reduce(value, group=group)
    return value.item()
"""
USED = """wrapped(torch.ones(1, 4)).sum().backward()
(total(torch.ones(1)), tensor.full_tensor().sum().item(), dist.get_world_size(dist.new_group([0, 1, 2, 3])))"""


def test_groups_of_the_users_own_are_made_again(notebook: Notebook) -> None:
    notebook.run(GROUPS)
    for waits in ("dist.barrier()", "dist.barrier(group=mine)"):
        error = notebook.fail(
            f"%%sky_broadcast\nif rank == 2:\n    raise ValueError('planted')\n{waits}"
        )
        shown = notebook.run("%%sky_broadcast\nnothing = None").text
        assert not re.search("(make|wrap) it again", error.text + shown)
        assert seen(notebook, USED) == [(2.0, 28.0, 4)] * 4


def test_groups_on_which_ranks_are_out_of_step_are_made_again(notebook: Notebook) -> None:
    notebook.run(GROUPS)
    begun = "work = dist.all_reduce(torch.ones(1), group=mine, async_op=True)"
    notebook.fail(
        f"%%sky_broadcast\nif rank == 2:\n    raise ValueError('planted')\n{begun}\nwhile True: sum(range(1000)); time.sleep(0.001)"
    )
    assert seen(notebook, USED) == [(2.0, 28.0, 4)] * 4


def test_parameters_that_differ_are_named_where_the_group_stays(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.run(MAKE.format("ddp"))
    before = seen(notebook, IDENTITY)
    error = notebook.fail(
        "%%sky_broadcast\nwith torch.no_grad():\n    next(model.parameters()).add_(rank == 0)\n"
        f"if rank == 2:\n    raise ValueError('planted')\n{OTHERS['compute']}"
    )
    shown = error.text + notebook.run("%%sky_broadcast\nnothing = None").text
    golden.line(shown, "model: ")
    assert seen(notebook, IDENTITY) == before


def test_shards_lost_with_a_rank_are_named(golden: Golden, notebook: Notebook) -> None:
    notebook.run(MAKE.format("hsdp"))
    notebook.run(GROUPS)
    error = notebook.fail("%%sky_broadcast\nif rank == 2:\n    os._exit(3)\ndist.barrier()")
    shown = error.text + notebook.run("%%sky_broadcast\nnothing = None").text
    for name in ("model", "mesh"):
        golden.line(shown, f"[{name}: ", "on rank 2")
    for name in ("tensor", "other", "wrapped"):
        golden.line(shown, f"[{name}: ")
    assert "pair: " not in shown
    found = seen(notebook, "total(torch.ones(1)) if globals().get('rank', 9) < 2 else None")
    assert found == [2.0, 2.0, None, None]
