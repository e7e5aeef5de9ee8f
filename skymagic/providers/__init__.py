"""Where machines come from: a small protocol, and a table of names that are loaded on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.plan import Plan, PoolRequest
from skymagic.plan.suggest import did_you_mean

TABLE: dict[str, str] = {"local": "skymagic.providers.local:Local", "ssh": "skymagic.providers.ssh:SSH"}
"""Name → ``module:class``; the entry-point group ``skymagic.providers`` adds third parties' own."""
GROUP = "skymagic.providers"


Say = Callable[[str], None]
"""Told in a line what is being done, and how far it is."""


class Provider(Protocol):
    """Acquire, watch, release: one object for each pool."""

    def plan(self, request: PoolRequest, say: Say) -> Plan:
        """What would be made, with its price; looks, and starts nothing. Raises RequestError with all mistakes."""

    def acquire(self, plan: Plan, job_id: str, say: Say) -> Sequence[Node]:
        """Machines that can run an agent, the head first. Called once, after `plan`; releases all if it raises."""

    def release(self) -> None:
        """Give everything back. Called after the agents have ended, also when planning or acquiring failed; twice is safe."""


@dataclass(frozen=True)
class Choice:
    """A provider as Python code names it: ``sky.AWS(region="eu-central-1", spot=True)``.

    Attributes:
        name: as ``--provider`` takes it.
        fields: what it says of the pool, by the names of `PoolRequest`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def Local() -> Choice:
    """Ranks on this machine."""
    return Choice("local")


def SSH(*hosts: str | Iterable[str]) -> Choice:
    """Machines of your own: ``sky.SSH("gpu1", "user@gpu2")``, or a list of them."""
    flat = [host for each in hosts for host in ([each] if isinstance(each, str) else each)]
    return Choice("ssh", {"hosts": tuple(flat)})


def AWS(region: str | None = None, *, spot: bool = False, max_price: float | None = None) -> Choice:
    """Machines rented from EC2.

    Args:
        region: ``"eu-central-1"``; None for the one that your AWS configuration names.
        spot: take spot instances.
        max_price: dollars per hour for the whole pool.
    """
    fields = {"region": region, "spot": spot, "max_price": max_price}
    return Choice("aws", {name: value for name, value in fields.items() if value})


def Slurm() -> Choice:
    """Nodes of a running Slurm."""
    return Choice("slurm")


def names() -> list[str]:
    """All providers that can be asked for."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def serving(request: PoolRequest) -> Provider:
    """A provider for a request: the one that it names; where it names none, this machine, or its hosts.

    Raises:
        RequestError: there is no such provider.
    """
    if request.provider != "auto":
        return load(request.provider)
    return load("ssh" if request.hosts else "local")


def load(name: str) -> Provider:
    """The provider of this name.

    Raises:
        RequestError: there is none, with the nearest name.
    """
    if name in TABLE:
        module, _, attribute = TABLE[name].partition(":")
        make: Callable[[], Provider] = getattr(importlib.import_module(module), attribute)
        return make()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            make = entry.load()
            return make()
    nearest = did_you_mean(name, names()) or f"; there are {', '.join(names())}"
    raise RequestError(f"there is no provider {name!r}{nearest}")
