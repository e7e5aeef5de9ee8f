"""What ranks that share a GPU, or fill it, need: devices that exist, gathering in host memory, no second set of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from skymagic.plugins._torch.carryover import with_existing_devices
from tests.lab.notebook import Notebook, opened

torch = pytest.importorskip("torch")

MODEL = """%%sky_broadcast
import weakref, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(10, 1))
make_reducer, first, alive = dist.Reducer, weakref.ref(model.reducer), []
def noted(*arguments):
    alive.append(first() is not None)
    return make_reducer(*arguments)
dist.Reducer = noted"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    pool = "%sky_pool memory --ranks 4 --plugin torch"
    with opened(tmp_path_factory.mktemp("memory"), pool) as opened_notebook:
        yield opened_notebook


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_shards_are_gathered_in_host_memory(notebook: Notebook, kind: str) -> None:
    """As for ranks that share a GPU, whose gloo groups cannot run functional collectives on it."""
    notebook.run(f"""%%sky_broadcast
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from skymagic.data.values import shards
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if {kind!r} == "hsdp" else None
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
whole = [each.detach().clone() for each in net.parameters()]
fully_shard(net, mesh=mesh)
net(torch.ones(2, 5)).sum().backward()
asked = []
shards._is_gpu_over_gloo = lambda mesh: asked.append(mesh) or True""")
    notebook.run("%%sky_broadcast -o gathered --head\nnet")
    notebook.run("%%sky_broadcast -o expected --head\nwhole")
    assert notebook.value("[tuple(each.shape) for each in gathered.parameters()]") == [
        (7, 5), (7,), (3, 7), (3,),
    ]  # fmt: skip
    equal = "all(bool((a == b).all()) for a, b in zip(gathered.parameters(), expected))"
    assert notebook.value(equal) is True
    assert notebook.value("all(each.grad is not None for each in gathered.parameters())") is True
    notebook.run("%%sky_broadcast -o count --head\nlen(asked)")
    assert notebook.value("count[0] if isinstance(count, list) else count") == 8  # with gradients


def test_old_buckets_are_freed_before_new_ones(notebook: Notebook) -> None:
    """Buckets are as large as the model: both at once do not fit where it fills half of a GPU."""
    notebook.run(MODEL)
    notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1: raise ValueError('planted')\ndist.barrier()"
    )
    notebook.run("%%sky_broadcast -o alive_then\ndist.Reducer = make_reducer\nalive")
    assert notebook.value("alive_then") == [[False]] * 4
    notebook.run(
        "%%sky_broadcast -o gradients\nmodel(torch.full((1, 10), dist.get_rank() + 1.0)).sum().backward()\n"
        "model.module.weight.grad[0, 0].item()"
    )
    assert notebook.value("gradients") == [2.5] * 4


def on_gpu(*numbers: int) -> Any:
    """A module whose parameters say that they are on these GPUs."""
    devices = [SimpleNamespace(device=torch.device("cuda", number)) for number in numbers]
    return SimpleNamespace(parameters=lambda: devices)


def test_ddp_uses_its_modules_device_on_a_shared_gpu() -> None:
    module = on_gpu(0, 0)
    arguments = ((module,), {"device_ids": [1], "output_device": 1, "bucket_cap_mb": 1})
    expected = ((module,), {"device_ids": [0], "output_device": 0, "bucket_cap_mb": 1})
    assert with_existing_devices(*arguments, 1) == expected
    assert with_existing_devices((module, [1], 1, 0), {}, 1) == ((module, [0], 0, 0), {})
    device = torch.device("cuda", 3)
    assert with_existing_devices((), {"module": module, "device_ids": [device]}, 2) == (
        (),
        {"module": module, "device_ids": [0]},
    )


@pytest.mark.parametrize(
    ("module", "device_ids"), [(on_gpu(1), [1]), (on_gpu(0, 1), None), (on_gpu(0), [2, 3])]
)
def test_other_devices_of_ddp_stay(module: Any, device_ids: Any) -> None:
    options = {"device_ids": device_ids}
    assert with_existing_devices((module,), options, 2) == ((module,), options)
