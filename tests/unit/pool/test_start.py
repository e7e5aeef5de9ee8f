"""What a request for a pool becomes: from what runs and what is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skymagic.errors import PoolError, RequestError
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory, Plan
from skymagic.plan.renting import Rental, plan_rented
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool.records import PoolRecord
from skymagic.pool.start import (
    Attach,
    Declare,
    Make,
    Refuse,
    Resize,
    Reuse,
    StartPlan,
    after_refusal,
    start_plan,
    step_text,
)
from skymagic.pool.status import PoolEvent, SharedStatus
from tests.lab.golden import Golden


def asked(**fields: Any) -> PoolRequest:
    """A request for which these fields were written, as a magic's line gives it."""
    return PoolRequest(**fields, stated=frozenset(fields))


def own(name: str, *, declared: bool = False, **fields: Any) -> SharedStatus:
    """A pool of this machine that runs."""
    request = asked(**{"nodes": 2, **fields})
    status = SharedStatus(name, plan(request, MACHINE), Defaults(), f"{name}-1")
    status.move(PoolEvent.DECLARE if declared else PoolEvent.START)
    return status


def rented(name: str, nodes: int = 2, *, left: bool = True, known: bool = True) -> PoolRecord:
    """A pool that another notebook has rented, its number of nodes in its job id."""
    hosts = ("machines",) if known else ("machines without a key",)
    record = PoolRecord(name, f"{name}-{nodes}", "aws", hosts, "/home/ann")
    return replace(record, process="") if left else record


def plan_of(record: PoolRecord) -> Plan:
    """The plan of such a pool."""
    if record.hosts != ("machines",):
        raise PoolError("its key is not here")
    nodes = int(record.job_id.rpartition("-")[2])
    rental = Rental("aws", "m5.large", "us-east-1a, on demand", "us-east-1", nodes, 8.0)
    return plan_rented(replace(RENT, nodes=nodes), rental)


def started(
    request: PoolRequest,
    own: Sequence[SharedStatus],
    recorded: Iterable[PoolRecord] = (),
    **options: Any,
) -> StartPlan:
    return start_plan(request, own, recorded, plan_of=plan_of, **options)


MACHINE = Inventory("laptop", 8, 32.0)
RENT = asked(provider="aws", nodes=2)
LAZY = replace(RENT, lazy=True)


def test_a_pool_that_runs_and_fits_is_used() -> None:
    first, second = own("first"), own("second")
    assert started(asked(nodes=2), [first, second]) == Reuse(second), "the one used last"
    assert started(asked(name="first", nodes=2), [first, second]) == Reuse(first)
    assert started(asked(), [first]) == Reuse(first), "a line without options takes any"
    assert started(asked(name="third"), [first]) == Make("third", asked(name="third"))


def test_no_provider_is_sought_if_a_pool_runs() -> None:
    def looked(request: PoolRequest) -> PoolRequest:
        raise AssertionError

    def read() -> Iterator[PoolRecord]:
        raise AssertionError
        yield

    main = own("main")
    assert started(asked(), [main], read(), allocate=looked) == Reuse(main)
    assert started(asked(provider="local"), [], read()) == Make("main", asked(provider="local"))


def test_other_node_count_resizes_if_requested() -> None:
    main = own("main")
    wanted = replace(main.plan.request, nodes=4, resizes="main-1")
    assert started(asked(nodes=4), [main], resize=True) == Resize(main, wanted)
    assert isinstance(started(asked(nodes=4), [main]), Refuse)
    ranks = started(
        asked(nodes=1, procs_per_node=4), [own("main", nodes=1, procs_per_node=2)], resize=True
    )
    assert isinstance(ranks, Resize)
    assert ranks.request.procs_per_node == 4


def test_another_pool_of_the_name_is_in_the_way(golden: Golden) -> None:
    step = started(asked(nodes=4, env=(("A", "b"),)), [own("main")], resize=True)
    assert isinstance(step, Refuse)
    assert isinstance(step.error(), RequestError)
    golden(step.error(), step.mistakes)
    assert isinstance(started(RENT, [own("main")], [rented("lab")]), Refuse), (
        "whatever was left elsewhere"
    )


def test_lazy_pool_starts_on_first_use() -> None:
    lazy = asked(nodes=2, lazy=True)
    assert started(lazy, []) == Declare("main", lazy)
    assert started(lazy, [], start=True) == Make("main", lazy)
    declared = own("train", declared=True, lazy=True)
    made = started(asked(nodes=2), [declared])
    assert made == Make("train", replace(declared.plan.request, name="train")), (
        "not another pool beside it"
    )
    assert started(asked(nodes=3), [declared]) == Make("main", asked(nodes=3))


def test_a_rented_pool_that_was_left_and_fits_is_attached() -> None:
    lab = rented("lab")
    named = replace(RENT, name="lab")
    assert started(named, [], [lab]) == Attach(lab, named)
    assert started(RENT, [], [lab]) == Attach(lab, RENT), (
        "a line without a name takes any that fits"
    )
    assert started(replace(RENT, name="other"), [], [lab]) == Make(
        "other", replace(RENT, name="other")
    )
    assert started(LAZY, [], [lab]) == Attach(lab, LAZY), "it runs, and costs nothing more"


def test_request_without_provider_matches_the_running_pool() -> None:
    lab = rented("lab")
    anywhere = asked(nodes=2)
    assert started(anywhere, [], [lab]) == Make("main", anywhere)
    placed = replace(anywhere, provider="aws")
    assert started(anywhere, [], [lab], allocate=lambda _: placed) == Attach(lab, placed)


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
    recorded: PoolRecord, kind: type[Exception], words: str
) -> None:
    step = started(replace(RENT, name="lab"), [], [recorded])
    assert isinstance(step, Refuse)
    with pytest.raises(kind, match=words):
        raise step.error()
    assert started(RENT, [], [recorded]) == Make("main", RENT), "without its name it is passed over"


def test_cloud_knowledge_overrides_the_record() -> None:
    record = rented("lab")
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
        (Attach(rented("lab"), RENT), "attaches to a pool that was left: lab (lab-2) on machines"),
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
