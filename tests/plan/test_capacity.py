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

TWO_CORES = Inventory("laptop", cpus=2, memory_gb=24.0, descriptors=65_536)


def test_many_ranks_on_few_cores_are_asked_about() -> None:
    made = plan(PoolRequest(nodes=1000), TWO_CORES)
    assert made.question == (
        "1000 ranks on 2 CPU cores are 500 for each, and need 20.0 GB of memory before they do anything"
    )
    assert f"  asks       {made.question}: add -y if you mean that\n" in made.text()
    assert plan(PoolRequest(nodes=1000, yes=True), TWO_CORES).question == ""
    assert (question(64, 2), question(4, 1)) == ("", "")
    assert question(65, 2)


def test_too_few_open_files_are_refused_also_with_yes() -> None:
    with pytest.raises(RequestError) as refused:
        plan(PoolRequest(nodes=1000, yes=True), replace(TWO_CORES, descriptors=1024))
    assert refused.value.mistakes == (
        "1000 ranks on this machine need 7130 open files in one process, and 1024 are allowed (ulimit -Hn): there is room for 127",
    )
    assert limits.refusal(100_000, None, "here") == []
    assert local.descriptors() == min(
        resource.getrlimit(resource.RLIMIT_NOFILE)[1], limits.MOST_DESCRIPTORS
    )


def test_hosts_with_too_few_descriptors_are_refused_by_name() -> None:
    hosts = [Inventory(name, cpus=2, memory_gb=24.0, descriptors=256) for name in ("gpu1", "gpu2")]
    assert plan_over(PoolRequest(procs_per_node=9), hosts, "ssh").topology.world_size == 18
    with pytest.raises(RequestError) as refused:
        plan_over(PoolRequest(procs_per_node=64), hosts, "ssh")
    assert refused.value.mistakes == (
        "128 ranks in a pool whose head is gpu1 need 1026 open files in one process, and 256 are allowed (ulimit -Hn): "
        "there is room for 18",
    )
