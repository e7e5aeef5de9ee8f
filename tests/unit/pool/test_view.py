"""What is shown of a pool is made from its plan, the states of its ranks, and what its hosts are doing."""

from __future__ import annotations

import pytest

from skymagic.display.panel import UNNAMED, NodeView, StartStep, environment_step
from skymagic.plan.image import Image
from skymagic.plan.plans import Plan, Topology
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import messages
from skymagic.pool.status import PoolEvent, SharedStatus
from tests.lab.golden import Golden


def status(
    *events: PoolEvent, hosts: tuple[str, ...] = ("h1", "h2"), **plan: object
) -> SharedStatus:
    """A pool of two nodes with two ranks each, to which this has happened."""
    options: dict[str, object] = {"remote": True, **plan}
    made = Plan("ssh", PoolRequest(), Topology(2, 2), Image(), hosts, 2, 4.0, **options)  # type: ignore[arg-type]
    pool = SharedStatus("lab", made, Defaults())
    for event in events:
        pool.move(event)
    return pool


def rows(*states: str, host: str = "") -> list[tuple[object, ...]]:
    return [
        (rank, rank // 2, host or f"h{rank // 2 + 1}", 100, state)
        for rank, state in enumerate(states)
    ]


def test_hosts_being_set_up_are_shown_without_ranks() -> None:
    step = environment_step("h2", "installing packages", 0.5)
    shown = messages.starting_view(status(PoolEvent.START), [], 0.0, {"h2": step})
    assert (shown.state, shown.ended) == ("starting …", False)
    assert shown.nodes == (
        NodeView("h1", (), "starting"),
        NodeView("h2", (), "environment", "installing packages", 0.5),
    )


def test_rented_machines_are_requested_and_have_names_then() -> None:
    pool = status(PoolEvent.START, hosts=("2 × g5.xlarge",), region="us-east-1")
    asked, given = (
        StartStep("asking …", "requested"),
        StartStep("i-1, i-2 run …", "booting", ("i-1", "i-2")),
    )
    steps = {UNNAMED: asked}
    assert messages.node_views(pool, [], steps) == (
        NodeView("2 × g5.xlarge", (), "requested", "asking …"),
    )
    steps |= dict.fromkeys(given.nodes, given) | {
        "i-2": StartStep("waiting …", "connecting", ("i-2",))
    }
    assert [(node.name, node.phase) for node in messages.node_views(pool, [], steps)] == [
        ("i-1", "booting"),
        ("i-2", "connecting"),
    ]


def test_ranks_start() -> None:
    shown = messages.starting_view(
        status(PoolEvent.START), rows("starting", "starting", "starting", "starting"), 0.0, {}
    )
    assert [(node.phase, node.step, node.share) for node in shown.nodes] == [
        ("starting", "0 of 2 ranks", 0.0)
    ] * 2
    pool = status(PoolEvent.START)
    shown = messages.starting_view(
        pool,
        rows("ready", "ready", "starting", "ready"),
        0.0,
        {"h2": environment_step("h2", "installing packages")},
    )
    assert [(node.step, node.ranks) for node in shown.nodes] == [
        ("", ((0, "ready"), (1, "ready"))),
        ("1 of 2 ranks", ((2, "starting"), (3, "ready"))),
    ]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PoolEvent.STARTED, "ready in 2.5 s"),
        (PoolEvent.STOP, "not started"),
        (PoolEvent.LOSE, "not started"),
    ],
)
def test_a_start_that_is_over_is_one_line(event: PoolEvent, words: str) -> None:
    shown = messages.starting_view(
        status(PoolEvent.START, event), rows("ready", "ready", "ready", "ready"), 2.5, {}
    )
    assert (shown.state, shown.nodes, shown.ended) == (words, (), True)


def test_nodes_of_this_machine_are_one() -> None:
    pool = status(PoolEvent.START, PoolEvent.STARTED, hosts=("laptop",), remote=False)
    (node,) = messages.pool_view(pool, rows(*["ready"] * 4, host="laptop")).nodes
    assert (node.name, len(node.ranks)) == ("laptop", 4)


def test_costs_and_many_hosts_are_summarized(golden: Golden) -> None:
    pool = status(hosts=tuple(f"gpu{number}" for number in range(8)), price=12.5)
    golden(messages.about(pool))
    golden(messages.pool_view(pool, [], seconds=1800.0).about[-1])
