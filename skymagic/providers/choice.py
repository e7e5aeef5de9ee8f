"""A provider as Python code names it: ``sky.SSH("gpu1", "gpu2")``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.plan.keywords import suggesting


@dataclass(frozen=True)
class Choice:
    """A provider as Python code names it: ``sky.AWS(region="eu-central-1", spot=True)``.

    Attributes:
        name: as ``--provider`` takes it.
        fields: what it says of the pool, by the names of `PoolRequest`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@suggesting("sky.Local")
def Local() -> Choice:
    """Ranks on this machine."""
    return Choice("local")


@suggesting("sky.SSH", {"hosts": 'the names alone, as in sky.SSH("gpu1", "gpu2")'})
def SSH(*hosts: str | Iterable[str]) -> Choice:
    """Machines of your own: ``sky.SSH("gpu1", "user@gpu2")``, or a list of them."""
    flat = [host for each in hosts for host in ([each] if isinstance(each, str) else each)]
    return Choice("ssh", {"hosts": tuple(flat)})


@suggesting("sky.AWS")
def AWS(region: str | None = None, *, spot: bool = False, max_price: float | None = None) -> Choice:
    """Machines rented from EC2.

    Args:
        region: ``"eu-central-1"``; None for the one that your AWS configuration names.
        spot: take spot instances.
        max_price: dollars per hour for the whole pool.
    """
    fields = {"region": region, "spot": spot, "max_price": max_price}
    return Choice("aws", {name: value for name, value in fields.items() if value})


@suggesting("sky.Slurm")
def Slurm() -> Choice:
    """Nodes of a running Slurm."""
    return Choice("slurm")
