"""Pools on hosts, found without knowing of them: what is said of them, and which one is meant."""

from __future__ import annotations

from time import time
from typing import Any

import pytest

from skymagic.api.pool_listing import PoolListing
from skymagic.errors import PoolError, RequestError
from skymagic.plan.units import rough_duration
from skymagic.providers import PoolLocation, RemotePool, RemotePools
from skymagic.providers.host_pools import HostNode, pools_of
from skymagic.wire.record import AgentRecord
from tests.lab.golden import Golden

NOW = 100_000.0


def node(number: int = 0, job: str = "lab-0a1b2c3d", **times: Any) -> HostNode:
    record = AgentRecord(
        "0.1", "lab", job, node=number, nodes=2, client="ann@laptop", hostname=f"gpu{number + 1}", boot=f"b{number}", pid=7,
        started=NOW - 10_800, ranks={str(2 * number): 70, str(2 * number + 1): 71}, devices=(0, 1),
        idle_since=times.pop("idle_since", NOW - 60), busy_since=times.pop("busy_since", 0.0),
        away_since=times.pop("away_since", 0.0), **times,
    )  # fmt: skip
    return HostNode(f"gpu{number + 1}", NOW, record)


def pool(*nodes: HostNode) -> RemotePool:
    (found,) = pools_of(nodes)
    return found


def listing(*pools: RemotePool, hosts: str = "gpu1,gpu2", **unreached: str) -> PoolListing:
    location = PoolLocation(tuple(hosts.split(",")))
    return PoolListing(location, RemotePools(pools, unreached=unreached))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "idle for 1m"),
        ({"idle_since": 0.0, "busy_since": NOW - 7_803}, "a cell runs for 2h10m"),
        ({"idle_timeout": 1800.0}, "idle for 1m; ends in 29m"),
        ({"away_since": NOW - 30}, "idle for 1m; its notebook is away for 30s"),
        (
            {"away_since": NOW - 30, "detached_timeout": 90.0},
            "idle for 1m; its notebook is away for 30s; ends in 1m",
        ),
        (
            {
                "idle_since": 0.0,
                "busy_since": NOW - 60,
                "away_since": NOW - 30,
                "detached_timeout": 90.0,
            },
            "a cell runs for 1m; its notebook is away for 30s",
        ),
        ({"busy_since": NOW - 60, "max_lifetime": 14_400.0}, "a cell runs for 1m; ends in 1h"),
    ],
)
def test_state_of_a_node(values: dict[str, Any], said: str) -> None:
    assert node(**values).state == said


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0.2, "0s"), (59.6, "1m"), (3661, "1h1m"), (90_000, "1d1h")]
)
def test_durations_are_rough(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_status_in_words(golden: Golden) -> None:
    shown = listing(pool(node(0), node(1)), gpu3="Connection refused")
    shown.result.unread["gpu1"] = 1
    golden(shown.text())
    golden(listing(pool(node(0))).text())
    own = listing(pool(node(0), node(1))).text({"lab-0a1b2c3d"})
    golden(own)
    assert "%sky_down" not in own, "this notebook knows how"
    golden(listing().text())


def test_two_pools_of_a_name_are_ended_by_their_job_ids() -> None:
    text = listing(pool(node(0)), pool(node(0, "lab-0000ffff"))).text()
    for job in ("lab-0a1b2c3d", "lab-0000ffff"):
        assert f"to end it: %sky_down {job} --hosts gpu1,gpu2" in text


def test_a_pool_of_a_scheduler_has_its_state_and_its_end(golden: Golden) -> None:
    waiting = RemotePool("lab", "lab-1", "Slurm job 7", "waits: Priority", ends=time() + 599)
    location = PoolLocation(provider="slurm", login="me@cluster")
    golden(PoolListing(location, RemotePools((waiting,))).text(), hide=["9m5[89]s"])


def test_status_for_programs() -> None:
    found: Any = listing(pool(node(1, idle_timeout=100.0)), gpu1="no answer").plain()
    assert found["pools"][0].pop("started") == pytest.approx(time() - 10_800, abs=60)
    assert found == {
        "pools": [
            {
                "name": "lab", "job_id": "lab-0a1b2c3d", "where": "gpu2", "state": "", "client": "ann@laptop", "ends": None,
                "nodes_elsewhere": 1,
                "nodes": [
                    {
                        "host": "gpu2", "node": 1, "version": "0.1", "ranks": {"2": 70, "3": 71}, "devices": [0, 1],
                        "busy_since": None, "idle_since": NOW - 60, "away_since": None, "ends": NOW + 40, "clock": NOW,
                    }
                ],
            }
        ],
        "unreached": {"gpu1": "no answer"},
        "unreadable": {},
    }  # fmt: skip


def test_selection_of_a_pool_is_unambiguous(golden: Golden) -> None:
    one, other = pool(node(0)), pool(node(0, "lab-0000ffff"))
    assert RemotePools((one,)).select(None) == (one,)
    assert RemotePools((one, other)).select("lab-0000ffff") == (other,)
    assert RemotePools((one, other)).select(None, select_all=True) == (one, other)
    for name in (None, "lab"):
        with golden.raises(RequestError):
            RemotePools((one, other)).select(name)
    with golden.raises(RequestError):
        RemotePools((one,)).select("train")
    with golden.raises(RequestError):
        RemotePools(()).select(None, select_all=True)
    with golden.raises(PoolError):
        RemotePools((one,), unreached={"gpu1": "no route"}).select("train")
