"""The JAX plugin: one mesh over all ranks, formed before any backend is used, and formed anew with new ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import RankDied
from skymagic.plugins import Cluster
from tests.lab.golden import Golden

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None, reason="jax is not installed: pip install jax"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(nodes=2, plugins=[sky.plugins.jax()]) as made:
        yield made


def test_packages_follow_the_accelerator() -> None:
    gpu = Cluster(accelerator=sky.accelerators.A100())
    assert sky.plugins.jax().transform(sky.Image(pip=["flax"]), gpu).pip == ("flax", "jax[cuda12]")
    assert sky.plugins.jax().transform(sky.Image(), Cluster()).pip == ("jax",)
    assert sky.plugins.jax(version="0.4.35").transform(sky.Image(), Cluster()).pip == (
        "jax==0.4.35",
    )


@sky.function
def psum() -> list[float]:
    """Over the mesh by shard_map, by pmap, and by a sharded jit."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("d",))
    mine = np.full((jax.local_device_count(), 4), sky.instance_info().rank + 1.0, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), mine)
    mapped = jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    )(x)
    pmapped = jax.pmap(lambda a: jax.lax.psum(a, "i"), axis_name="i")(mine[:, 0])
    total = jax.jit(lambda a: (a * a).sum(), out_shardings=NamedSharding(mesh, P()))(x)
    return [
        float(np.asarray(each.addressable_data(0)).ravel()[0]) for each in (mapped, pmapped, total)
    ]


def test_psum_over_all_processes_in_three_ways(pool: Any) -> None:
    assert psum() @ pool == [[3.0, 3.0, 20.0]] * 2


def test_program_that_initializes_jax_itself_can_be_repeated(
    golden: Golden, pool: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Kubeflow's programs do, with arguments from the environment, and shut down at the end."""

    @sky.function
    def program() -> tuple[int, float]:
        import jax
        from jax.experimental import multihost_utils

        jax.distributed.initialize(
            coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
        )
        mine = jax.numpy.ones(2) * (jax.process_index() + 1)
        total = multihost_utils.process_allgather(mine).sum().item()
        jax.distributed.shutdown()
        return jax.process_count(), total

    for _ in range(2):
        assert program() @ pool == [(2, 6.0)] * 2
    said = re.sub(r"^\[\d\] ", "", capfd.readouterr().err, flags=re.MULTILINE)
    golden.line(said, "(2 processes)", hide=[r"\S*:\d+: "])
    golden.line(said, "shutdown", "nothing", hide=[r"\S*:\d+: "])


def test_the_mesh_and_its_variables(pool: Any) -> None:
    @sky.function
    def where() -> tuple[Any, ...]:
        import jax

        address, port = os.environ["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)
        names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_COUNT")
        told = [int(os.environ[name]) for name in names]
        return (
            jax.device_count(),
            jax.local_device_count(),
            jax.process_index(),
            told,
            address,
            int(port) > 0,
        )

    assert where() @ pool == [(2, 1, rank, [2, rank, 1], "127.0.0.1", True) for rank in range(2)]


def test_one_rank_computes_on_its_own_devices(pool: Any) -> None:
    @sky.function
    def alone() -> float:
        import jax.numpy as jnp

        return float((jnp.arange(4) * 2).sum())

    assert alone() >> pool == 12.0


@sky.function
def fail(how: str) -> None:
    import numpy as np
    from jax.experimental import multihost_utils

    if sky.instance_info().rank == 1:
        if how == "raise":
            raise ValueError("planted")
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.process_allgather(np.array([1]))


@pytest.mark.parametrize(("how", "error"), [("raise", ValueError), ("die", RankDied)])
def test_a_failure_while_others_wait_in_a_collective(
    golden: Golden, pool: Any, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        fail(how) @ pool
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    golden.line(said, "ranks ", "restart")
    assert psum() @ pool == [[3.0, 3.0, 20.0]] * 2


def test_a_world_of_one() -> None:
    with sky.Compute(nodes=1, plugins=["jax"]) as pool:
        assert psum() @ pool == [[1.0, 1.0, 4.0]]
