"""More ranks than a machine has room for are refused before anything starts; very many on few cores are asked about."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest

from skymagic.errors import RequestError
from skymagic.plan import limits
from skymagic.plan.limits import question
from skymagic.plan.planning import plan, plan_over
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PoolRequest
from skymagic.providers import local
from tests.lab.golden import Golden

TWO_CORES = Inventory("laptop", cpus=2, memory_gb=24.0, descriptors=65_536)


def test_many_ranks_on_few_cores_are_asked_about(golden: Golden) -> None:
    made = plan(PoolRequest(nodes=1000), TWO_CORES)
    golden(made.question)
    golden(made.text())
    assert plan(PoolRequest(nodes=1000, yes=True), TWO_CORES).question == ""
    assert (question(64, 2), question(4, 1)) == ("", "")
    assert question(65, 2)


def test_too_few_open_files_are_refused_also_with_yes(golden: Golden) -> None:
    with pytest.raises(RequestError) as refused:
        plan(PoolRequest(nodes=1000, yes=True), replace(TWO_CORES, descriptors=1024))
    golden(refused.value.mistakes)
    assert limits.refusal(100_000, None, "here") == []
    assert local.descriptors() == min(
        resource.getrlimit(resource.RLIMIT_NOFILE)[1], limits.MOST_DESCRIPTORS
    )


def test_hosts_with_too_few_descriptors_are_refused_by_name(golden: Golden) -> None:
    hosts = [Inventory(name, cpus=2, memory_gb=24.0, descriptors=256) for name in ("gpu1", "gpu2")]
    assert plan_over(PoolRequest(procs_per_node=9), hosts, "ssh").topology.world_size == 18
    with pytest.raises(RequestError) as refused:
        plan_over(PoolRequest(procs_per_node=64), hosts, "ssh")
    golden(refused.value.mistakes)
