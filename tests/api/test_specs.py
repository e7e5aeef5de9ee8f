"""What a pool may be asked for in Python code by keywords; and names that are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skymagic as sky
from skymagic.errors import RequestError
from skymagic.plan.requests import PoolRequest
from skymagic.pool import launch
from tests.lab.golden import Golden
from tests.lab.raising import raises

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("keyword", "option"), [("vcpus", "--cpus"), ("memory_gb", "--memory")])
def test_a_machine_that_has_less_is_refused(keyword: str, option: str) -> None:
    asked = sky.Compute(**{keyword: 1})._request
    assert str(asked.cpus or asked.memory) == "1+"
    with pytest.raises(
        RequestError,
        match=f"{option} 1e\\+06\\+ needs more than this machine has|{option} 1000000\\+",
    ):
        sky.Compute(**{keyword: 1_000_000}).start()


def test_cores_that_are_given_twice_are_refused(golden: Golden) -> None:
    with golden.raises(RequestError):
        sky.Compute(cpus=2, vcpus=2)


def test_unknown_provider_lists_those_that_exist() -> None:
    with raises(RequestError, "no-provider", "'runpod'; .*auto, "):
        sky.Compute(provider="runpod").start()


@pytest.mark.parametrize(
    ("keyword", "told"),
    [("vcpu", "did you mean 'vcpus'"), ("num_nodes", "write nodes"), ("volumes", "it takes ")],
)
def test_unknown_keyword_gets_the_nearest(keyword: str, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        sky.Compute(**{keyword: 2})


def test_unknown_name_raises_attribute_error() -> None:
    for module, name in (
        (sky, "RunPod"),
        (sky.plugins, "cuml"),
        (sky.plugins, "nonsense"),
        (sky, "_storage"),
    ):
        with pytest.raises(AttributeError):
            getattr(module, name)
    assert not hasattr(sky, "__wrapped__")


def test_new_names_cost_nothing_until_they_are_used() -> None:
    code = (
        "import sys, skymagic; skymagic.InstanceInfo; print('skymagic.api.compute' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "False\n"


def test_system_packages_are_not_installed_on_own_machines(golden: Golden) -> None:
    told: list[str] = []
    launch.plan_of(PoolRequest(provider="local", image=sky.Image(apt=("git", "curl"))), told.append)
    golden(told)
