"""The plan of a pool on rented machines: what it says, and what it asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skymagic.errors import RequestError
from skymagic.plan.accelerators import Accelerator, canonical
from skymagic.plan.planning import fits
from skymagic.plan.renting import Rental, plan_rented, with_bounds
from skymagic.plan.requests import PoolRequest
from tests.lab.golden import Golden

RENTAL = Rental(
    "aws",
    machine="p4d.24xlarge (8 × A100)",
    location="us-east-1b, on demand",
    region="us-east-1",
    cpus=96,
    memory_gb=1152.0,
    gpus=8,
    price=87.84,
    priced="price list of 2026-11-22",
    most=87.84,
    notes=("no capacity: p4d.24xlarge in us-east-1 d",),
)
REQUEST = PoolRequest("train", provider="aws", nodes=4, gpu=Accelerator("A100", 8))

PLAN = """\
Plan of pool 'train'
  where      aws: 4 × p4d.24xlarge (8 × A100) in us-east-1b, on demand
  ranks      32 (4 × 8: nodes × ranks on each)
  GPUs       8 × A100 on each node
  asks       4 × p4d.24xlarge (8 × A100) in us-east-1b, on demand: $87.84 per hour (price list of 2026-11-22), for 1d at most: add -y if you mean that
  machine    96 CPUs and 1152 GB
  note       no capacity: p4d.24xlarge in us-east-1 d
  ends       after 30m without a cell or after 1d
  price      $87.84 per hour (price list of 2026-11-22)"""


def test_plan_shows_machines_place_and_price() -> None:
    plan = plan_rented(REQUEST, RENTAL)
    assert plan.text() == PLAN
    assert [[one.index for one in node] for node in plan.devices] == [[*range(8)]] * 4
    assert (plan.remote, plan.region, plan.size) == (True, "us-east-1", "4 nodes × 8 ranks")


def test_no_question_after_yes(golden: Golden) -> None:
    plan = plan_rented(replace(REQUEST, yes=True), RENTAL)
    assert plan.question == ""
    assert "$87.84 per hour" in plan.text(), "it is said all the same"
    golden(plan.starting)


def test_price_elsewhere_is_confirmed_too(golden: Golden) -> None:
    asked = plan_rented(REQUEST, replace(RENTAL, most=131.5)).question
    golden(asked)


def test_an_unknown_price_is_no_price() -> None:
    plan = plan_rented(REQUEST, replace(RENTAL, price=None, priced="", most=None))
    assert plan.price is None
    assert "price unknown, for 1d at most" in plan.question
    assert plan.text().endswith("price      price unknown")


def test_rented_machines_have_an_end_unless_the_user_wants_none(golden: Golden) -> None:
    assert (with_bounds(REQUEST).idle, with_bounds(REQUEST).max_lifetime) == (1800.0, 86400.0)
    own = replace(REQUEST, idle=60.0, max_lifetime=3600.0)
    assert (with_bounds(own).idle, with_bounds(own).max_lifetime) == (60.0, 3600.0)
    none = replace(
        REQUEST,
        idle=None,
        max_lifetime=None,
        stated=frozenset({"nodes", "gpu", "idle", "max_lifetime"}),
    )
    assert (with_bounds(none).idle, with_bounds(none).max_lifetime) == (None, None)
    plan = plan_rented(none, RENTAL)
    golden(plan.question)
    golden(plan.notes)
    golden(plan.notes)


def test_assumed_limit_does_not_count_as_stated() -> None:
    made = plan_rented(REQUEST, RENTAL)
    assert made.request.stated_fields() == REQUEST.stated_fields()
    assert fits(REQUEST, made) == []


def test_paid_but_unused_gpus_are_mentioned(golden: Golden) -> None:
    plan = plan_rented(replace(REQUEST, gpu=Accelerator("A100")), RENTAL)
    golden(plan.notes)
    assert [[one.index for one in node] for node in plan.devices] == [[0]] * 4


def test_all_mistakes_at_once(golden: Golden) -> None:
    wrong = replace(REQUEST, hosts=("gpu1",), procs_per_node=3, pip=("torch==2.3", "torch==2.4"))
    with pytest.raises(RequestError) as refused:
        plan_rented(wrong, RENTAL)
    golden(refused.value.mistakes)


def test_running_pool_serves_requests_for_its_region(golden: Golden) -> None:
    made = plan_rented(REQUEST, RENTAL)
    assert fits(replace(REQUEST, region="eu-west-1,us-east-1"), made) == []
    golden(fits(replace(REQUEST, region="eu-west-1"), made))
    golden(fits(replace(REQUEST, max_price=50.0), made))
    # a configured limit is for what is yet to be made
    assert fits(replace(REQUEST, max_price=50.0, stated=frozenset({"nodes"})), made) == []


@pytest.mark.parametrize(
    "name", ["trn1", "trn1.32xlarge", "TRN2", "inf2", "inf2.xlarge", "trainium1"]
)
def test_accelerators_of_aws_itself_are_named_as_not_supported(golden: Golden, name: str) -> None:
    with golden.raises(RequestError):
        canonical(name)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("p4d", "A100:8"), ("p4d.24xlarge", "A100:8"), ("g5", "A10G:1"), ("p6-b200", "B200:8")],
)
def test_a_type_of_machine_leads_to_its_gpu(golden: Golden, name: str, gpu: str) -> None:
    with golden.raises(RequestError):
        canonical(name)
