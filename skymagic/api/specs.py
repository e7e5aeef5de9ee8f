"""What a pool is asked for in Python code: its hardware, packages and limits, from the keywords of `Compute`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from skymagic import plugins
from skymagic.errors import RequestError, noted_in
from skymagic.plan.accelerators import Accelerator, GpuChoice, read_gpus
from skymagic.plan.requests import PluginSpec, PoolRequest, plugin_specs
from skymagic.plan.units import AtLeast, at_least, duration
from skymagic.plugins import Plugin
from skymagic.providers import Choice

ELSEWHERE = {
    "gpu": "accelerator",
    "gpus": "accelerator",
    "accelerators": "accelerator",
    "num_nodes": "nodes",
    "packages": "pip",
    "requirements": "pip",
    "lifetime": "max_lifetime",
    "ttl": "idle",
}
"""Keywords as the magics and other tools have them."""


def request_of(given: Mapping[str, Any]) -> PoolRequest:
    """The pool that these keywords of `Compute` ask for; those that are left out say nothing. Raises RequestError with all mistakes."""
    asked = defaultdict[str, Any](lambda: None, given)
    for name in ("plugins", "pip", "secrets", "hosts"):
        value = asked[name]
        asked[name] = (value,) if isinstance(value, str | Plugin) else tuple(value or ())
    mistakes = _twice(asked)

    def read(name: str, reader: Callable[[Any], Any]) -> Any:
        """What a reader makes of a keyword; None for None and for a mistake: all of them are raised at once."""
        with noted_in(mistakes, f"{name}: "):
            return None if asked[name] is None else reader(asked[name])
        return None

    said = {
        "nodes": read("nodes", count),
        "gpu": read("accelerator", _accelerator),
        "plugins": read("plugins", _plugins),
        "image": asked["image"],
        "procs_per_node": read("procs_per_node", count) or read("ranks", count),
        "cpus": read("cpus", lambda value: at_least(f"{value}")) or read("vcpus", _minimum),
        "memory": read("memory", lambda value: at_least(f"{value}", "GB"))
        or read("memory_gb", _minimum),
        "pip": asked["pip"],
        "env": tuple((asked["env"] or {}).items()),
        "secrets": asked["secrets"],
        "hosts": asked["hosts"],
        "region": asked["region"],
        "spot": asked["spot"],
        "max_price": asked["max_price"],
        "idle": read("idle", lambda value: duration(f"{value}")),
        "max_lifetime": read("max_lifetime", lambda value: duration(f"{value}")),
    }
    if mistakes:
        raise RequestError(mistakes)
    choice = (
        asked["provider"]
        if isinstance(asked["provider"], Choice)
        else Choice(asked["provider"] or "auto")
    )
    request = PoolRequest(
        provider=choice.name,
        yes=True,
        **{**{key: value for key, value in said.items() if value}, **choice.fields},
    )
    if asked["ranks"] is None:
        return request
    if mistakes := request.ranks_mistakes("ranks"):
        raise RequestError(mistakes)
    return replace(request, nodes=1)


def _twice(asked: Mapping[str, Any]) -> list[str]:
    """What is said in two ways."""
    pairs = (("procs_per_node", "ranks"), ("cpus", "vcpus"), ("memory", "memory_gb"))
    return [
        f"{a} and {b} are the same ({asked[a]} and {asked[b]}); keep one of them"
        for a, b in pairs
        if asked[a] is not None and asked[b] is not None
    ]


def count(value: Any) -> int:
    """A number above 0. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{value!r} is not a number above 0")
    return value


def _minimum(value: Any) -> AtLeast:
    return AtLeast(at_least(f"{value}").amount, or_more=True)


def _accelerator(value: Any) -> Accelerator | GpuChoice:
    if isinstance(value, str | int):
        return read_gpus(str(value))
    made = value() if callable(value) else value
    if not isinstance(made, Accelerator):
        raise RequestError(
            f'{value!r} is not an accelerator: write "A100", "A100:8", "all" or sky.accelerators.A100()'
        )
    return made


def _plugins(values: Any) -> tuple[Plugin | PluginSpec, ...]:
    found: list[Plugin | PluginSpec] = []
    for value in values:
        if isinstance(value, str):
            found += plugin_specs(value)
        elif isinstance(value, Plugin):
            found.append(value.spec or value)
        elif isinstance(value, PluginSpec):
            found.append(value)
        else:
            hint = ": write it with parentheses" if callable(value) else ""
            raise RequestError(f"{value!r} is not a plugin{hint}")
    plugins.resolve(found)
    return tuple(found)
