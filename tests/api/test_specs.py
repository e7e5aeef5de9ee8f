"""What a pool may be asked for in Python code by keywords; and names that are not here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import RequestError
from skymagic.plan.requests import PoolRequest
from skymagic.pool import making

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


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "slots": (lambda: sky.Worker, "there is no sky.Worker: sky.Compute takes its keywords, procs_per_node"),
    "cores twice": (lambda: sky.Compute(cpus=2, vcpus=2), "cpus and vcpus are the same"),
    "specs": (lambda: sky.Spec, "there is no sky.Spec: sky.Compute takes its keywords"),
    "a provider of elsewhere": (lambda: sky.Compute(provider="runpod").start(), "no provider is called 'runpod'; available: auto, .* SkyPilot"),
    "a plugin of elsewhere": (lambda: sky.Compute(plugins=["cuml"]), "there is no plugin cuml"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_words(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        call()


MISSPELT: dict[str, tuple[Callable[[], Any], str]] = {
    "an option of rented machines": (lambda: sky.Compute(provision_timeout=60), "other zones and types are tried automatically"),
    "volumes": (lambda: sky.Compute(volumes=[]), "%sky_put"),
    "allocation": (lambda: sky.Compute(allocation="spot"), "spot=True"),
    "a word": (lambda: sky.Compute(vcpu=2), "did you mean 'vcpus'"),
    "selection": (lambda: sky.Compute(selection="cheapest"), "where it raises another one"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSPELT)
def test_keywords_of_elsewhere_say_what_to_write(name: str) -> None:
    call, words = MISSPELT[name]
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    "name",
    [
        "RunPod",
        "VastAI",
        "Hyperstack",
        "Verda",
        "Container",
        "Volume",
        "storage",
        "GCP",
        "dict",
        "App",
    ],
)
def test_what_is_not_here_gives_a_sentence(name: str) -> None:
    with pytest.raises(RequestError, match=f"there is no .*sky.{name}"):
        getattr(sky, name)
    with pytest.raises(RequestError):
        exec(f"from skymagic import {name}", {})
    assert name not in dir(sky)


@pytest.mark.parametrize("name", ["cuml", "mig"])
def test_plugins_that_are_not_here_give_a_sentence(name: str) -> None:
    with pytest.raises(RequestError, match=f"there is no plugin {name}"):
        getattr(sky.plugins, name)


def test_a_name_that_nobody_has_is_an_attribute_error() -> None:
    for module, name in ((sky, "nonsense"), (sky.plugins, "nonsense"), (sky, "_storage")):
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


def test_system_packages_are_not_installed_on_machines_of_ones_own() -> None:
    told: list[str] = []
    making.plan_of(PoolRequest(provider="local", image=sky.Image(apt=("git", "curl"))), told.append)
    assert told == ["apt (git, curl) works on rented machines only: it is not installed here"]
