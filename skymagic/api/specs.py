"""Translate the keywords of `Compute` (hardware, packages, limits) to a pool request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from skymagic import plugins
from skymagic.errors import RequestError, collect_mistakes
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
"""Maps keywords of the magics and of other tools to those of `Compute`."""


def request_of(options: Mapping[str, object]) -> PoolRequest:
    """Return the pool request that these keywords of `Compute` describe.

    Omitted keywords leave their fields unset. Raises RequestError with all mistakes.
    """
    keywords = defaultdict[str, Any](lambda: None, options)
    for name in ("plugins", "pip", "secrets", "hosts"):
        value = keywords[name]
        keywords[name] = (value,) if isinstance(value, str | Plugin) else tuple(value or ())
    mistakes = _duplicate_settings(keywords)

    def read(name: str, reader: Callable[[Any], Any]) -> Any:
        """Apply `reader` to a keyword.

        Return None if it is unset, or invalid: all mistakes are raised at once.
        """
        with collect_mistakes(mistakes, f"{name}: "):
            return None if keywords[name] is None else reader(keywords[name])
        return None

    request_fields = {
        "nodes": read("nodes", count),
        "gpu": read("accelerator", _accelerator),
        "plugins": read("plugins", _plugins),
        "image": keywords["image"],
        "procs_per_node": read("procs_per_node", count) or read("ranks", count),
        "cpus": read("cpus", lambda value: at_least(f"{value}")) or read("vcpus", _minimum),
        "memory": read("memory", lambda value: at_least(f"{value}", "GB"))
        or read("memory_gb", _minimum),
        "pip": keywords["pip"],
        "env": tuple((keywords["env"] or {}).items()),
        "secrets": keywords["secrets"],
        "hosts": keywords["hosts"],
        "region": keywords["region"],
        "spot": keywords["spot"],
        "max_price": keywords["max_price"],
        "idle": read("idle", lambda value: duration(f"{value}")),
        "max_lifetime": read("max_lifetime", lambda value: duration(f"{value}")),
    }
    if mistakes:
        raise RequestError(mistakes)
    choice = (
        keywords["provider"]
        if isinstance(keywords["provider"], Choice)
        else Choice(keywords["provider"] or "auto")
    )
    request = PoolRequest(
        provider=choice.name,
        yes=True,
        **{**{key: value for key, value in request_fields.items() if value}, **choice.fields},
    )
    if keywords["ranks"] is None:
        return request
    if mistakes := request.ranks_mistakes("ranks"):
        raise RequestError(mistakes)
    return replace(request, nodes=1)


def _duplicate_settings(options: Mapping[str, object]) -> list[str]:
    """Return a mistake for each setting given under both of its names."""
    pairs = (("procs_per_node", "ranks"), ("cpus", "vcpus"), ("memory", "memory_gb"))
    return [
        f"{a} and {b} are the same ({options[a]} and {options[b]}); keep one of them"
        for a, b in pairs
        if options[a] is not None and options[b] is not None
    ]


def count(value: Any) -> int:
    """Return a positive integer. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{value!r} is not a number above 0")
    return value


def _minimum(value: Any) -> AtLeast:
    return AtLeast(at_least(f"{value}").amount, or_more=True)


def _accelerator(value: Any) -> Accelerator | GpuChoice:
    if isinstance(value, str | int):
        return read_gpus(str(value))
    accelerator = value() if callable(value) else value
    if not isinstance(accelerator, Accelerator):
        raise RequestError(
            f'{value!r} is not an accelerator: write "A100", "A100:8", "all" or '
            "sky.accelerators.A100()"
        )
    return accelerator


def _plugins(values: Any) -> tuple[Plugin | PluginSpec, ...]:
    specs: list[Plugin | PluginSpec] = []
    for value in values:
        if isinstance(value, str):
            specs += plugin_specs(value)
        elif isinstance(value, Plugin):
            specs.append(value.spec or value)
        elif isinstance(value, PluginSpec):
            specs.append(value)
        else:
            hint = ": write it with parentheses" if callable(value) else ""
            raise RequestError(f"{value!r} is not a plugin{hint}")
    plugins.resolve(specs)
    return tuple(specs)
