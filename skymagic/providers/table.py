"""The providers by name, loaded on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from skymagic.errors import RequestError
from skymagic.plan.requests import PoolRequest, no_provider
from skymagic.providers.provider import Provider

TABLE: dict[str, str] = {
    "local": "skymagic.providers.local:Local",
    "ssh": "skymagic.providers.ssh:SSH",
    "aws": "skymagic.providers.aws.provider:AWS",
}
"""Name → ``module:class``; the entry-point group ``skymagic.providers`` adds third parties' own."""
GROUP = "skymagic.providers"


def names() -> list[str]:
    """All providers that can be asked for."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def serving(request: PoolRequest) -> Provider:
    """A provider for a request: the one that it names; where it names none, this machine, or its hosts.

    Raises:
        RequestError: there is no such provider, with the nearest name.
    """
    name = request.provider if request.provider != "auto" else "ssh" if request.hosts else "local"
    if name in TABLE:
        module, _, attribute = TABLE[name].partition(":")
        make: Callable[[], Provider] = getattr(importlib.import_module(module), attribute)
        return make()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            make = entry.load()
            return make()
    raise RequestError(no_provider(name, ["auto", *names()]))
