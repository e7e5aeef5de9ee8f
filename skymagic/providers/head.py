"""The machines of a pool as they are reached from its head: for the kernel of a notebook that is executed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skymagic.cluster import Node
from skymagic.plan.plans import Plan
from skymagic.providers import detached
from skymagic.providers.local import run
from skymagic.providers.provider import Survey


@dataclass(frozen=True)
class Access:
    """What leads from the head to a node's daemon.

    Attributes:
        daemon: its name. secret: what it knows its notebooks by.
    """

    daemon: str
    secret: str = field(repr=False)


def attach(plan: Plan, accesses: Sequence[Access]) -> tuple[Survey, Sequence[Node]]:
    """The machines of a pool whose agents run already; the caller's is the head."""
    here = detached.Here(detached.Access(accesses[0].daemon, accesses[0].secret))
    head = here.node(accesses[0].daemon, run)
    return detached.Detached(plan, here), [replace(head, name=plan.hosts[0] if plan.remote else head.name)]
