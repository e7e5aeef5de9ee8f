"""What a request for a pool becomes: pure, from what runs and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from skymagic.errors import PoolError, RequestError
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory
from skymagic.plan.renting import Rental, plan_rented
from skymagic.plan.requests import PoolRequest
from skymagic.pool.records import PoolRecord
from skymagic.pool.start import (
    Attach,
    Declare,
    Make,
    OwnPool,
    RecordedPool,
    Refuse,
    Resize,
    Reuse,
    StartPlan,
    after_refusal,
    start_plan,
    step_text,
)


def asked(**fields: Any) -> PoolRequest:
    """A request for which these fields were written, as a magic's line gives it."""
    return PoolRequest(**fields, stated=frozenset(fields))


def own(name: str, *, declared: bool = False, **fields: Any) -> OwnPool:
    """A pool of this machine that runs."""
    request = asked(**{"nodes": 2, **fields})
    return OwnPool(name, f"{name}-1", plan(request, MACHINE), declared)


def rented(name: str, nodes: int = 2, *, left: bool = True, known: bool = True) -> RecordedPool:
    """A pool that another notebook has rented."""
    record = PoolRecord(name, f"{name}-{nodes}", "aws", ("machines",), "/home/ann")
    rental = Rental("aws", "m5.large", "us-east-1a, on demand", "us-east-1", nodes, 8.0)
    plan = plan_rented(replace(RENT, nodes=nodes), rental) if known else None
    return RecordedPool(record, left, plan, "" if known else "its key is not here")


MACHINE = Inventory("laptop", 8, 32.0)
RENT = asked(provider="aws", nodes=2)
LAZY = replace(RENT, lazy=True)


def test_a_pool_that_runs_and_fits_is_used() -> None:
    first, second = own("first"), own("second")
    assert start_plan(asked(nodes=2), [first, second]) == Reuse(second), "the one used last"
    assert start_plan(asked(name="first", nodes=2), [first, second]) == Reuse(first)
    assert start_plan(asked(), [first]) == Reuse(first), "a line without options takes any"
    assert start_plan(asked(name="third"), [first]) == Make("third", asked(name="third"))


def test_no_provider_is_looked_for_where_a_pool_runs() -> None:
    def looked(request: PoolRequest) -> PoolRequest:
        raise AssertionError

    def read() -> Iterator[RecordedPool]:
        raise AssertionError
        yield

    assert start_plan(asked(), [own("main")], read(), allocate=looked) == Reuse(own("main"))
    assert start_plan(asked(provider="local"), [], read()) == Make("main", asked(provider="local"))


def test_another_number_of_nodes_is_a_resize_where_that_is_asked_for() -> None:
    main = own("main")
    wanted = replace(main.plan.request, nodes=4, resizes="main-1")
    assert start_plan(asked(nodes=4), [main], resize=True) == Resize(main, wanted)
    assert isinstance(start_plan(asked(nodes=4), [main]), Refuse)
    ranks = start_plan(
        asked(nodes=1, procs_per_node=4), [own("main", nodes=1, procs_per_node=2)], resize=True
    )
    assert isinstance(ranks, Resize)
    assert ranks.request.procs_per_node == 4


def test_another_pool_of_the_name_is_in_the_way() -> None:
    step = start_plan(asked(nodes=4, env=(("A", "b"),)), [own("main")], resize=True)
    assert isinstance(step, Refuse)
    both = "it has 2 ranks, not 4, and it was made without this value of A"
    assert str(step.error()).startswith(f"pool 'main' is already running and {both}; end it first")
    assert isinstance(step.error(), RequestError)
    assert "end it first (%sky_down main)" in step.mistakes[-1]
    assert isinstance(start_plan(RENT, [own("main")], [rented("lab")]), Refuse), (
        "whatever was left elsewhere"
    )


def test_a_lazy_request_is_declared_and_made_by_what_needs_it() -> None:
    lazy = asked(nodes=2, lazy=True)
    assert start_plan(lazy, []) == Declare("main", lazy)
    assert start_plan(lazy, [], start=True) == Make("main", lazy)
    declared = own("train", declared=True, lazy=True)
    made = start_plan(asked(nodes=2), [declared])
    assert made == Make("train", replace(declared.plan.request, name="train")), (
        "not another pool beside it"
    )
    assert start_plan(asked(nodes=3), [declared]) == Make("main", asked(nodes=3))


def test_a_rented_pool_that_was_left_and_fits_is_attached() -> None:
    lab = rented("lab")
    named = replace(RENT, name="lab")
    assert start_plan(named, [], [lab]) == Attach(lab.record, named)
    assert start_plan(RENT, [], [lab]) == Attach(lab.record, RENT), (
        "a line without a name takes any that fits"
    )
    assert start_plan(replace(RENT, name="other"), [], [lab]) == Make(
        "other", replace(RENT, name="other")
    )
    assert start_plan(LAZY, [], [lab]) == Attach(lab.record, LAZY), (
        "it runs, and costs nothing more"
    )


def test_where_nothing_is_said_of_the_provider_the_one_that_serves_it_counts() -> None:
    lab = rented("lab")
    anywhere = asked(nodes=2)
    assert start_plan(anywhere, [], [lab]) == Make("main", anywhere)
    placed = replace(anywhere, provider="aws")
    assert start_plan(anywhere, [], [lab], allocate=lambda _: placed) == Attach(lab.record, placed)


@pytest.mark.parametrize(
    ("recorded", "kind", "words"),
    [
        (rented("lab", 4), RequestError, r"pool 'lab', left by another notebook, is already running and it has 4 nodes, not 2"),
        (rented("lab", left=False), PoolError, "%sky_attach lab --take-over"),
        (rented("lab", known=False), PoolError, "its key is not here; %sky_down lab ends what is left of it"),
    ],
    ids=["another one", "of a notebook that lives", "never ready"],
)  # fmt: skip
def test_a_rented_pool_of_the_name_is_in_the_way(
    recorded: RecordedPool, kind: type[Exception], words: str
) -> None:
    step = start_plan(replace(RENT, name="lab"), [], [recorded])
    assert isinstance(step, Refuse)
    with pytest.raises(kind, match=words):
        raise step.error()
    assert start_plan(RENT, [], [recorded]) == Make("main", RENT), (
        "without its name it is passed over"
    )


def test_what_follows_where_the_cloud_knows_better() -> None:
    record = rented("lab").record
    assert after_refusal(Attach(record, RENT), "missing", False) == Make("main", RENT)
    assert after_refusal(Attach(record, LAZY), "missing", False) == Declare("main", LAZY)
    bare = PoolRequest(name="lab")
    for step, kind in (
        (Attach(record, bare), "missing"),
        (Attach(record, RENT), "stopped"),
        (Attach(record, RENT), ""),
    ):
        assert after_refusal(step, kind, False) is None  # fmt: skip


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Reuse(own("main")), "pool 'main' is already running and fits: it is used"),
        (Resize(own("main"), asked(nodes=4)), "pool 'main' gets 4 ranks instead of 2"),
        (Attach(rented("lab").record, RENT), "attaches to a pool that was left: lab (lab-2) on machines"),
        (Declare("lab", LAZY), "pool 'lab' is declared: its next cell starts it"),
        (Refuse(RENT, ("pool 'lab' runs already",)), "not made: pool 'lab' runs already"),
        (Make("lab", RENT), "Plan of a pool"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)  # fmt: skip
def test_each_prints(step: StartPlan, words: str) -> None:
    plan = own("main", nodes=4).plan
    text = step_text(step, plan)
    assert text.startswith(words)
    assert text.endswith(plan.text())
