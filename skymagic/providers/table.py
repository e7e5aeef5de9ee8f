"""The providers by name, loaded on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.planning import too_few_gpus
from skymagic.plan.requests import PoolRequest, no_provider
from skymagic.providers.provider import Listable, Provider

TABLE: dict[str, str] = {
    "local": "skymagic.providers.local:Local",
    "ssh": "skymagic.providers.ssh:SSH",
    "slurm": "skymagic.providers.slurm:Slurm",
    "kubernetes": "skymagic.providers.kubernetes:Kubernetes",
    "ray": "skymagic.providers.ray:Ray",
    "aws": "skymagic.providers.aws.provider:AWS",
}
"""Name → ``module:class``; the entry-point group ``skymagic.providers`` adds third parties' own."""
RENTING: dict[str, str] = {"aws": "skymagic.providers.aws.clients:set_up"}
"""Providers that ``auto`` may turn to, in this order → whether they are set up here."""
LISTING = ("slurm", "kubernetes", "ray")
"""Providers that know the user's pools by themselves (`provider.Listable`), other than those that rent."""
GROUP = "skymagic.providers"


def names() -> list[str]:
    """All providers that can be asked for."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def placed(request: PoolRequest) -> PoolRequest:
    """The request with the provider that serves it, where it names none and asks for what this machine has not: GPUs, or anything rented.

    This machine comes first, then those of `RENTING` that are set up here; without one the request is as it was, and its plan
    says what to add. A preview needs none that is set up.
    """
    if request.provider != "auto" or request.hosts:
        return request
    rented = request.region is not None or request.spot
    if not rented and (request.accelerator is None or not too_few_gpus(request, _local_gpus(request))):
        return request
    ready = (name for name, attribute in RENTING.items() if _load(attribute)(request.cloud))
    return replace(request, provider=next(ready, next(iter(RENTING)) if request.dry_run else "auto"))


def _local_gpus(request: PoolRequest) -> tuple[GpuDevice, ...]:
    from skymagic.providers.local import inventory

    return inventory(request).gpus


def _load(attribute: str) -> Any:
    module, _, name = attribute.partition(":")
    return getattr(importlib.import_module(module), name)


def serving(request: PoolRequest) -> Provider:
    """A provider for a request: the one that it names; where it names none, this machine, or its hosts.

    Raises:
        RequestError: there is no such provider, with the nearest name.
    """
    name = request.provider if request.provider != "auto" else "ssh" if request.hosts else "local"
    if name in TABLE:
        make: Callable[[], Provider] = _load(TABLE[name])
        return make()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            make = entry.load()
            return make()
    raise RequestError(no_provider(name, ["auto", *names()]))


def listing(name: str) -> Listable:
    """The provider of this name, one of `LISTING`."""
    provider = serving(PoolRequest(provider=name))
    assert isinstance(provider, Listable)
    return provider
