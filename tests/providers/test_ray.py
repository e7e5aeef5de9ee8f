"""What is asked of Ray, and what it says, as values and text; no cluster is needed."""

from __future__ import annotations

import re
import socket

import pytest

import skymagic as sky
from skymagic.errors import ProvisionError, RequestError
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.providers import ray
from skymagic.providers.local import Local
from skymagic.wire.threads import start_all
from tests.lab.golden import Golden
from tests.lab.raising import raises

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


def test_an_address_elsewhere() -> None:
    with pytest.raises(RequestError, match="--address is for Ray: write --provider ray"):
        Local().plan(parse_pool("--provider local --address auto"), print)


def test_options_of_others() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RequestError) as refused:
        ray.Ray().plan(parse_pool("--provider ray --spot --hosts gpu1 --partition long"), print)
    assert [one.partition(" ")[0] for one in refused.value.mistakes] == [
        "--hosts",
        "--spot",
        "--partition",
    ]


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


def test_non_ray_address_is_refused_at_once(golden: Golden) -> None:
    """Such as that of the dashboard, which speaks HTTP/1.1 and whose port 8265 is well known."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dashboard() -> None:
            with server.accept()[0] as there:
                there.recv(1 << 10)
                there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        (answered,) = start_all([dashboard])
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with golden.raises(ProvisionError, hide=[re.escape(address)]):
            next(ray.RayLink(address).ask({"do": "nodes"}))
        answered.result()


def test_driver_exit_without_answer_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray ends the connected process when the head is gone, which does not mean that nothing is left."""

    def send(link: ray.RayLink, request: object, sockets: object) -> None:
        pass  # the sockets are closed

    monkeypatch.setattr(ray.RayLink, "send", send)
    with raises(ProvisionError, "ray-lost", r"head:6379"):
        ray._end(ray.RayLink("head:6379"), "lab-1a2b3c4d")


def test_nodes_are_called_by_their_hosts_unless_two_are_on_one() -> None:
    def names(*hosts: str) -> list[str]:
        return ray._names(
            [ray.PlacedNode(host, f"{number}23456789", "") for number, host in enumerate(hosts)]
        )

    assert names("a", "b") == ["a", "b"]
    assert names("a", "b", "a") == ["a-023456", "b", "a-223456"]


def test_in_python() -> None:
    request = sky.Compute(provider=sky.Ray("ray://head:10001"), nodes=2)._request
    assert (request.provider, request.address) == ("ray", "ray://head:10001")
