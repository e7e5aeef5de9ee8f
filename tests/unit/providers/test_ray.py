"""What is asked of Ray, and what it says, as values and text."""

from __future__ import annotations

import pytest

from skymagic.errors import RequestError
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.providers import ray
from tests.lab.golden import Golden

NODES = [
    {"CPU": 8.0},
    {"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0},
    {"CPU": 4.0, "GPU": 1.0},
]
MISMATCH = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.4\n"
    "This process on node 10.0.0.1:6379 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
)


def bundle(line: str) -> dict[str, float]:
    return ray.bundle(parse_pool(f"--provider ray {line}"), NODES)


def test_bundle_has_exactly_the_requested_packages() -> None:
    assert bundle("") == {"CPU": 1}
    assert bundle("--procs-per-node 4") == {"CPU": 4}
    assert bundle("--cpus 16+ --memory 64") == {"CPU": 16, "memory": 64e9}
    assert bundle("--gpu A100:4") == {"CPU": 4, "GPU": 4, "accelerator_type:A100": 0.001}
    assert bundle("--gpu H100:2") == {
        "CPU": 2,
        "GPU": 2,
        "accelerator_type:H100": 0.001,
    }  # an autoscaler may have it
    assert bundle("--gpu 2")["GPU"] == 2
    assert bundle("--gpu all")["GPU"] == 8
    assert "GPU" not in bundle("--gpu none")


def test_single_gpus_are_not_the_users_to_choose(golden: Golden) -> None:
    with golden.raises(RequestError):
        bundle("--gpu 0,2")


@pytest.mark.parametrize("address", ["auto", "head:6379", "ray://10.0.0.1:10001", "[fe80::1]:6379"])
def test_addresses(address: str) -> None:
    assert parse_pool(f"--provider ray --address {address}").address == address


@pytest.mark.parametrize(
    "address", ["head", "http://head:8265", "ray://head", "a b:1", "head:6379;rm"]
)
def test_invalid_addresses_are_refused(golden: Golden, address: str) -> None:
    with golden.raises(RequestError):
        parse_pool(f"--provider ray --address '{address}'")


def test_versions_that_differ_are_named_with_the_remedy(golden: Golden) -> None:
    golden(ray.refusal("head:6379", MISMATCH))


def test_a_client_that_rays_server_has_lost(golden: Golden) -> None:
    said = ray.refusal(
        "ray://head:10001",
        "Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.",
    )
    golden(said)
    golden(said)


def test_no_cluster_here(golden: Golden) -> None:
    golden(ray.refusal("auto", "Could not find any running Ray instance. Please …"))


def test_nodes_are_called_by_their_hosts_unless_two_are_on_one() -> None:
    def names(*hosts: str) -> list[str]:
        return ray._names(
            [ray.PlacedNode(host, f"{number}23456789", "") for number, host in enumerate(hosts)]
        )

    assert names("a", "b") == ["a", "b"]
    assert names("a", "b", "a") == ["a-023456", "b", "a-223456"]
