"""The torch plugin on ranks: the process group, DDP on it, and collectives that some ranks alone cannot do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import ProvisionError, RequestError
from tests.lab.golden import Golden

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


def test_versions_that_contradict_the_image(golden: Golden) -> None:
    with golden.raises(RequestError):
        sky.Compute(
            image=sky.Image(pip=["torch==2.3.0"]), plugins=[sky.plugins.torch(version="2.4.0")]
        ).start()


# ------------------------------------------------------------------------------------------------- the group


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()]) as made:
        yield made


@sky.function
def reduced() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def test_group_exists_before_the_first_cell(pool: Any) -> None:
    @sky.function
    def where() -> dict[str, Any]:
        import torch.distributed as dist

        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR".split()
        return {
            **{name: os.environ[name] for name in names},
            "port": int(os.environ["MASTER_PORT"]) > 0,
            "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        }

    for rank, found in enumerate(where() @ pool):
        assert found == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "port": True,
            "group": (rank, 2, "gloo"),
        }
    assert reduced() @ pool == [3.0] * 2


def test_single_rank_has_a_group_until_the_pool_ends(
    tmp_path: Path,
) -> None:
    @sky.function
    def watch(folder: str) -> None:
        import torch.distributed as dist

        destroy = dist.destroy_process_group

        def told(*args: Any) -> None:
            destroy(*args)
            Path(folder, os.environ["RANK"]).write_text(str(dist.is_initialized()))

        dist.destroy_process_group = told

    with sky.Compute(nodes=1, plugins=["torch"]) as pool:
        assert reduced() @ pool == [1.0]
        assert reduced() >> pool == 1.0
        watch(str(tmp_path)) @ pool
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "False"}


def test_a_backend_that_is_not_built_in(golden: Golden) -> None:
    with golden.raises(ProvisionError, hide=[r"(?<=PyTorch )\([^)]*\)"]):
        sky.Compute(nodes=1, plugins=[sky.plugins.torch(backend="mpi")]).start()


def test_wrapped_functions_take_their_arguments_by_keyword(pool: Any) -> None:
    """Lightning and others call them so; ours must not have parameters of their own that get in the way."""

    @sky.function
    def by_keyword() -> float:
        import gc

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        group = dist.new_group(
            ranks=[0, 1],
            timeout=None,
            backend=None,
            pg_options=None,
            use_local_synchronization=False,
        )
        model = DDP(
            module=torch.nn.Linear(2, 1), device_ids=None, output_device=None, process_group=group
        )
        model(input=torch.ones(1, 2)).sum().backward()
        values, gathered = torch.ones(2), [torch.zeros(2) for _ in range(2)]
        dist.all_reduce(tensor=values, op=dist.ReduceOp.SUM, group=group, async_op=False)
        dist.broadcast(tensor=values, src=0, group=group, async_op=False)
        dist.all_gather(tensor_list=gathered, tensor=values, group=group, async_op=False)
        dist.barrier(group=group, async_op=False, device_ids=None)
        dist.destroy_process_group(group=group)  # a model uses it: it stays, and is good for more
        dist.barrier(group=group)
        del model
        gc.collect()
        dist.destroy_process_group(group=group)
        return gathered[1].sum().item()

    assert by_keyword() @ pool == [4.0] * 2


DIFFERENCES = {
    "MASTER_PORT": "each launch has its own",
    "TORCHELASTIC_RUN_ID": "each launch has its own",
    "TORCHELASTIC_RESTART_COUNT": "how often the group was formed anew, on this pool after failures",
    "TORCHELASTIC_ERROR_FILE": "where a worker tells torchrun's agent its error; a rank's error goes to the notebook",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun's agent tells itself",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torchrun's 1 ends the process of a collective that fails; a rank lives on, and keeps its variables",
}
"""Variables of torchrun's that a rank does not have, or not with the same value."""
TELL = "import json, os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(dict(os.environ)))"


def workers_of_torchrun(folder: Path) -> list[dict[str, str]]:
    """What torchrun's own workers on two nodes have that this process has not, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = f"-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port} --no_python"
    started = [
        subprocess.Popen(
            [
                sys.executable,
                *command.split(),
                f"--node_rank={node}",
                sys.executable,
                "-c",
                TELL,
                folder,
            ],
            stderr=subprocess.DEVNULL,
        )
        for node in range(2)
    ]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    told = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    return [
        {name: value for name, value in env.items() if os.environ.get(name) != value}
        for env in told
    ]


def test_the_environment_is_that_of_torchruns_workers(pool: Any, tmp_path: Path) -> None:
    @sky.function
    def environment() -> dict[str, str]:
        return dict(os.environ)

    workers = workers_of_torchrun(tmp_path)
    for rank, worker in zip(environment() @ pool, workers, strict=True):
        differing = {name for name, value in worker.items() if rank.get(name) != value}
        assert differing - set(DIFFERENCES) == set(), differing
    assert set(DIFFERENCES) <= {name for worker in workers for name in worker}, (
        "a difference that is none any more"
    )


# ------------------------------------------------------------------------------------------ who takes part


@sky.function
def collective(name: str) -> None:
    import torch
    import torch.distributed as dist

    x, both = torch.ones(4), [torch.ones(1) for _ in range(2)]
    objects: list[Any] = [None] * 2
    {
        "all_reduce": lambda: dist.all_reduce(x),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather(both, torch.ones(1)),
        "all_gather_object": lambda: dist.all_gather_object(objects, 1),
        "broadcast_object_list": lambda: dist.broadcast_object_list(objects),
        "scatter": lambda: dist.scatter(torch.ones(1), both if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(1), both),
        "new_group": lambda: dist.new_group([0, 1]),
        "explicit": lambda: dist.all_reduce(x, group=dist.group.WORLD),
        "DDP": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
    }[name]()


NAMES = (
    "all_reduce async broadcast barrier all_gather all_gather_object broadcast_object_list scatter reduce_scatter "
    "new_group explicit DDP"
).split()


def test_collective_of_all_is_refused_on_some_ranks(pool: Any) -> None:
    for name in NAMES:
        with pytest.raises(RuntimeError, match="waits for ranks 0, 1, and only rank . takes part"):
            collective(name) >> pool
        collective(name) @ pool
    assert reduced() @ pool == [3.0] * 2


def test_the_forward_pass_of_a_wrapper_made_before(golden: Golden, pool: Any) -> None:
    @sky.function
    def make() -> None:
        import torch

        globals()["wrapper"] = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    @sky.function
    def use() -> None:
        import torch

        globals()["wrapper"](torch.ones(1, 2)).sum().backward()

    make() @ pool
    with golden.raises(RuntimeError):
        use() >> pool
    use() @ pool


def test_a_group_of_those_that_take_part(pool: Any) -> None:
    @sky.function
    def alone() -> float:
        import torch
        import torch.distributed as dist

        mine = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        value = torch.ones(1)
        dist.all_reduce(value, group=mine)
        return value.item()

    assert alone() >> pool == 1.0
    assert reduced() @ pool == [3.0] * 2


# -------------------------------------------------------------------------------------------- one function


@pytest.fixture(scope="module")
def bare() -> Iterator[Any]:
    with sky.Compute(nodes=2) as made:
        yield made


@sky.function
@sky.integrations.torch
def decorated(fail: int | None = None) -> tuple[float, int, int]:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == fail:
        raise ValueError("planted")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item(), dist.get_rank(), dist.get_world_size()


def test_decorated_function_gets_a_group_without_the_plugin(bare: Any) -> None:
    """It is made from the environment, of which a rank that was started again has all, and ends with the function."""

    @sky.function
    def there() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    for _ in range(2):
        assert decorated() @ bare == [(2.0, rank, 2) for rank in range(2)]
    assert decorated() >> bare == (1.0, 0, 1)
    assert there() @ bare == [False] * 2
    bare.restart([0])
    with pytest.raises(ValueError, match="planted"):
        decorated(fail=1) @ bare
    assert decorated() @ bare == [(2.0, rank, 2) for rank in range(2)], "the others were freed"


def test_the_pools_own_group_serves_a_decorated_function(pool: Any) -> None:
    assert decorated() @ pool == [(2.0, rank, 2) for rank in range(2)]
    assert reduced() @ pool == [3.0] * 2


def test_a_decorated_function_with_options_and_outside_a_pool(bare: Any) -> None:
    @sky.integrations.torch(backend="gloo")
    def backend() -> Any:
        import torch.distributed as dist

        return dist.get_backend() if dist.is_initialized() else None

    assert backend() is None
    assert sky.function(backend)() @ bare == ["gloo"] * 2


def test_only_functions_are_decorated(golden: Golden) -> None:
    with golden.raises(TypeError):
        sky.integrations.torch(3)
