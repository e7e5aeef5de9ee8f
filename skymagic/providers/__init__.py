"""Where machines come from: a small protocol, and a table of names that are loaded on use."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

from skymagic.agents import Member
from skymagic.errors import RequestError
from skymagic.plan import Plan, PoolRequest

TABLE: dict[str, str] = {"local": "skymagic.providers.local:Local"}
"""Name → ``module:class``; the entry-point group ``skymagic.providers`` adds third parties' own."""
GROUP = "skymagic.providers"


class Provider(Protocol):
    """Acquire, watch, release."""

    def plan(self, request: PoolRequest) -> Plan:
        """What would be made, with its price; starts nothing. Raises RequestError with all mistakes."""

    def acquire(self, plan: Plan, pool: str) -> Sequence[Member]:
        """Machines that can run an agent, the head first. Called once per pool; releases all if it raises."""

    def release(self) -> None:
        """Give everything back. Called after the agents have ended, also when acquiring failed; twice is safe."""


def names() -> list[str]:
    """All providers that can be asked for."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def load(name: str) -> Provider:
    """The provider of this name; ``auto`` is this machine, the one provider that needs no configuration.

    Raises:
        RequestError: there is none, with the nearest name.
    """
    name = "local" if name == "auto" else name
    if name in TABLE:
        module, _, attribute = TABLE[name].partition(":")
        provider: Provider = getattr(importlib.import_module(module), attribute)()
        return provider
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            provider = entry.load()()
            return provider
    near = difflib.get_close_matches(name, names(), 1)
    hint = f": did you mean {near[0]}?" if near else f"; there are {', '.join(names())}"
    raise RequestError(f"there is no provider {name!r}{hint}")
