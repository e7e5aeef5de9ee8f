"""What a pool is asked for in Python code: `Spec`, its hardware, packages and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from skymagic import plugins
from skymagic.errors import RequestError
from skymagic.plan.accelerators import Accelerator, GpuChoice, read_gpus
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec, PoolRequest, plugin_specs
from skymagic.plan.suggest import suggesting
from skymagic.plan.units import AtLeast, at_least, duration
from skymagic.plugins import Plugin
from skymagic.providers import Choice

ELSEWHERE = {
    "gpu": "accelerator", "gpus": "accelerator", "accelerators": "accelerator", "num_nodes": "nodes",
    "packages": "pip", "requirements": "pip", "lifetime": "max_lifetime", "ttl": "idle",
    "allocation": 'spot=True for "spot", and leave it out for "on-demand"', "max_hourly_cost": "max_price",
    "worker": "procs_per_node", "concurrency": "procs_per_node", "default_compute_timeout": "timeout",
    "options": "its fields here: selection, timeout, console", "retry_on_interruption": "%sky_pool --replace",
    **dict.fromkeys(
        ("provision_timeout", "max_provision_attempts", "provision_retry_delay"),
        "nothing: where EC2 has no machine, other zones and types are tried automatically",
    ),
    "volumes": "the paths into your code: there are no volumes, %sky_put brings files to the nodes",
}  # fmt: skip
"""Keywords as the magics and other tools have them."""


@suggesting("sky.Spec", ELSEWHERE, second_names=("vcpus", "memory_gb"))
@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a pool is to be made of; several of them are alternatives: ``sky.Compute(sky.Spec(…), sky.Spec(…))``.

    The keywords are those of ``sky.Compute(…)``, which describes them. Keywords of ``Compute`` are the defaults of each spec.

    Args:
        vcpus, memory_gb: at least so many cores, and GB of memory, on each node: ``vcpus=8`` is ``cpus="8+"``.

    Raises:
        RequestError: everything that is wrong with the arguments.
    """

    provider: str | Choice | None = None
    nodes: int | None = None
    ranks: int | None = None
    accelerator: str | int | Accelerator | Callable[[], Accelerator] | None = None
    plugins: Iterable[Plugin | PluginSpec | str] = ()
    image: Image | None = None
    procs_per_node: int | None = None
    cpus: float | str | None = None
    memory: float | str | None = None
    vcpus: float | None = None
    memory_gb: float | None = None
    pip: Iterable[str] = ()
    env: Mapping[str, str] | None = None
    secrets: Iterable[str] = ()
    hosts: Iterable[str] = ()
    region: str | None = None
    spot: bool = False
    max_price: float | None = None
    idle: float | str | None = None
    max_lifetime: float | str | None = None

    def __post_init__(self) -> None:
        for name in ("plugins", "pip", "secrets", "hosts"):  # an iterator is read once
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | Plugin) else tuple(value))
        self.request()

    def or_else(self, others: Mapping[str, Any]) -> Spec:
        """This spec, with `others` where it says nothing."""
        mine = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        return Spec(**{**others, **mine})

    def request(self) -> PoolRequest:
        """The pool that it asks for. Raises RequestError with all mistakes."""
        mistakes = self._twice()

        def read(name: str, reader: Callable[[Any], Any]) -> Any:
            """What a reader makes of a field; None for None and for a mistake: all of them are raised at once."""
            value = getattr(self, name)
            try:
                return None if value is None else reader(value)
            except RequestError as wrong:
                mistakes.extend(f"{name}: {mistake}" for mistake in wrong.mistakes)
                return None

        said = {
            "nodes": read("nodes", count),
            "gpu": read("accelerator", _accelerator),
            "plugins": read("plugins", _plugins),
            "image": self.image,
            "procs_per_node": read("procs_per_node", count) or read("ranks", count),
            "cpus": read("cpus", lambda value: at_least(f"{value}")) or read("vcpus", _minimum),
            "memory": read("memory", lambda value: at_least(f"{value}", "GB")) or read("memory_gb", _minimum),
            "pip": self.pip,
            "env": tuple((self.env or {}).items()),
            "secrets": self.secrets,
            "hosts": self.hosts,
            "region": self.region,
            "spot": self.spot,
            "max_price": self.max_price,
            "idle": read("idle", lambda value: duration(f"{value}")),
            "max_lifetime": read("max_lifetime", lambda value: duration(f"{value}")),
        }
        if mistakes:
            raise RequestError(mistakes)
        choice = self.provider if isinstance(self.provider, Choice) else Choice(self.provider or "auto")
        request = PoolRequest(
            provider=choice.name, yes=True, **{**{key: value for key, value in said.items() if value}, **choice.fields}
        )
        if self.ranks is None:
            return request
        if mistakes := request.ranks_mistakes("ranks"):
            raise RequestError(mistakes)
        return replace(request, nodes=1)

    def _twice(self) -> list[str]:
        """What is said in two ways."""
        pairs = (("procs_per_node", "ranks"), ("cpus", "vcpus"), ("memory", "memory_gb"))
        return [
            f"{a} and {b} are the same ({getattr(self, a)} and {getattr(self, b)}); keep one of them"
            for a, b in pairs
            if getattr(self, a) is not None and getattr(self, b) is not None
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
        raise RequestError(f'{value!r} is not an accelerator: write "A100", "A100:8", "all" or sky.accelerators.A100()')
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
