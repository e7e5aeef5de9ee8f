"""Pools in a real Ray cluster: asked for, waited for, used, and given back whatever happens."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.notebook import Notebook, opened
from tests.lab.ray import Cluster, cluster

pytestmark = pytest.mark.needs("ray")
WORKING = "%%sky_broadcast --only all\nimport time\nprint('at work', flush=True)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(ray: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("notebook")) as made:
        yield made


@pytest.fixture
def notebook(ray: Cluster, kernel: Notebook) -> Iterator[Notebook]:
    """A notebook without a pool; after the test no actor, group or process is left."""
    yield kernel
    kernel.run("%sky_down --all")
    assert ray.left() == []


def pool(ray: Cluster, options: str = "--nodes 2", name: str = "lab") -> str:
    return f"%sky_pool {name} --provider ray --address {ray.address} --python {sys.executable} {options}"


def test_no_cluster_at_the_address(notebook: Notebook) -> None:
    failure = notebook.fail("%sky_pool lab --provider ray --address 127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1: Connection refused" in failure.text


def test_versions_that_differ_are_refused_before_anything_starts(ray: Cluster, notebook: Notebook) -> None:
    own = ray("version", "2.9.0")
    try:
        failure = notebook.fail(pool(ray))
    finally:
        ray("version", own)
    assert f"has Ray 2.9.0 and Python {sys.version.split()[0]}, this notebook Ray {own}" in failure.text
    assert "pip install ray==2.9.0" in failure.text


def test_a_placement_that_never_fits_says_why_and_stops(ray: Cluster, notebook: Notebook) -> None:
    waiting = notebook.start(pool(ray, "--nodes 3"))
    notebook.watch(waiting, lambda cell: "Ray has no place yet" in cell.text)
    assert "3 × (CPU 1), and 2 of the cluster's 3 nodes are such" in waiting.text
    assert "(Ray: PENDING" in waiting.text
    notebook.interrupt()
    notebook.finish(waiting)
    assert (ray("groups"), ray("actors")) == ([], [])


def test_a_pool_starts_one_process_of_rays_on_each_node(ray: Cluster, notebook: Notebook) -> None:
    notebook.run(pool(ray))
    (group,) = ray("groups")
    assert sorted(ray("actors")) == [f"{group}-0", f"{group}-1"]


def test_a_node_without_the_gpus_that_ray_has_promised(ray: Cluster, notebook: Notebook) -> None:
    failure = notebook.fail(pool(ray, "--nodes 1 --gpu A100:2"))
    assert "has no A100" in failure.text
    assert (ray("groups"), ray("actors")) == ([], [])


def test_two_notebooks_with_pools_of_the_same_name(ray: Cluster, notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(pool(ray, "--nodes 1"))
    with opened(tmp_path) as other:
        other.run(pool(ray, "--nodes 1"))
        assert len(ray("groups")) == 2
        other.run("%sky_down")
    notebook.run("%%sky_broadcast -o seen\n7")
    assert notebook.value("seen") == [7]
    assert len(ray("groups")) == 1


def test_a_kernel_that_is_killed_while_it_waits_leaves_nothing(ray: Cluster, tmp_path: Path) -> None:
    with opened(tmp_path) as other:
        waiting = other.start(pool(ray, "--nodes 3"))
        other.watch(waiting, lambda cell: "Ray has no place yet" in cell.text)
        os.kill(other.pid, signal.SIGKILL)
    assert ray.left() == []


def test_a_pool_that_was_left_is_found_and_ended_from_another_kernel(ray: Cluster, notebook: Notebook) -> None:
    notebook.run(pool(ray))
    notebook.restart()
    notebook.run("%load_ext skymagic")
    assert f"the Ray cluster at {ray.address}" in notebook.run("%sky_status --provider ray").text
    notebook.run("%sky_down lab")
    assert ray.left() == []


def test_a_node_that_leaves_under_a_running_cell(ray: Cluster, notebook: Notebook) -> None:
    notebook.run(pool(ray))
    notebook.run("%%sky_broadcast\nkept = 7")
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    ray("lose", 1)
    failure = notebook.finish(running).failure.text
    assert "Ray says: The actor died because its node has died" in failure
    notebook.run("%%sky_broadcast -t 0 -o left\nkept")
    assert notebook.value("left") == [7]
    notebook.run("%sky_down")
    ray("add")
