"""What is refused before Ray is asked."""

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


def test_non_ray_address_is_refused_at_once(golden: Golden) -> None:
    """Such as the dashboard, which speaks HTTP/1.1, and whose port 8265 is the one that people know."""
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


def test_in_python() -> None:
    request = sky.Compute(provider=sky.Ray("ray://head:10001"), nodes=2)._request
    assert (request.provider, request.address) == ("ray", "ray://head:10001")
