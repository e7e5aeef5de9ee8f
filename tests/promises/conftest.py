"""The pools that promises are tested on: on this machine, and the same tests on SSH hosts, Slurm, Ray and Kubernetes.

Nothing here knows how skymagic works inside: cells go in, and what a front end receives comes out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import place_of
from tests.lab.notebook import Notebook
from tests.lab.sites import (
    PlaceMaker,
    Site,
    Sites,
    hosts_of_ssh,
    hosts_of_ssh_from_macos,
    nodes_of_ray,
    nodes_of_slurm,
    pods_of_kubernetes,
    this_machine,
)

PLACES = [
    pytest.param(this_machine, id="local"),
    pytest.param(hosts_of_ssh, marks=pytest.mark.needs("sshd"), id="ssh"),
    pytest.param(hosts_of_ssh_from_macos, marks=pytest.mark.needs("sshd"), id="macos"),
    pytest.param(nodes_of_slurm, marks=pytest.mark.needs("slurm", "root"), id="slurm"),
    pytest.param(
        pods_of_kubernetes, marks=pytest.mark.needs("namespaces", "root"), id="kubernetes"
    ),
    pytest.param(nodes_of_ray, marks=pytest.mark.needs("ray"), id="ray"),
]


OPEN: list[Sites] = []
"""The places of this worker, once a test has asked for them."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close a place after its last test: other tests look for what is left on this machine."""

    def where(one: pytest.Item) -> tuple[str, str]:
        return one.path.parent.name, place_of(one.nodeid)

    if nextitem is None or where(nextitem) != where(item):
        for places in OPEN:
            places.close()


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """The places of this worker: one is open at a time."""
    made = Sites(tmp_path_factory.mktemp("sites"))
    OPEN.append(made)
    yield made
    OPEN.remove(made)
    made.close()


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> PlaceMaker:
    """Where this file's tests run now."""
    maker: PlaceMaker = request.param
    return maker


@pytest.fixture
def site(sites: Sites, place: PlaceMaker) -> Site:
    """A notebook with a pool ``lab`` of two ranks on two nodes, torch ready; what a test breaks is started again for the next one."""
    return sites.at(place)


@pytest.fixture
def pool(site: Site) -> Notebook:
    """The notebook of `site`."""
    return site.notebook
