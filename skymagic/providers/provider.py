"""The seam between pools and what gives them machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from skymagic.cluster import Node
from skymagic.plan.plans import Plan
from skymagic.plan.requests import PoolRequest

Say = Callable[[str], None]
"""Gets a line on what is being done, and how far it is."""


@dataclass(frozen=True)
class Survey:
    """A plan and what a provider found when it made it; owns what planning and acquiring have opened."""

    plan: Plan

    def outcome(self) -> Plan:
        """The plan as it was carried out, asked after acquiring: machines that were had only elsewhere have another price."""
        return self.plan

    def ready(self) -> None:
        """Called once all ranks are up."""

    def close(self) -> None:
        """Give everything back. Called after the agents have ended, also when acquiring failed; twice is safe."""


class Provider(Protocol):
    """Plan, then acquire. It keeps nothing between the calls: what it found and opened is in the survey."""

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """What would be made, with its price; inspects, and starts nothing. Raises RequestError with all mistakes."""

    def acquire(self, survey: Any, job_id: str, say: Say) -> Sequence[Node]:
        """Machines that can run an agent, the head first. Called once with what `plan` gave; the survey releases them."""


@runtime_checkable
class Attachable(Protocol):
    """What a provider has whose nodes outlive their notebook (`Node.access`)."""

    def attach(self, plan: Plan, accesses: Sequence[Any]) -> tuple[Survey, Sequence[Node]]:
        """The machines of a pool that another notebook has made from this plan, each with what its node had as `access`.

        Called once; nothing is started, and what the survey's `close` gives back is the caller's from now on.

        Raises:
            CloudError: machines are gone; all of them where `kind` is ``missing``, and then nothing of the pool is left.
        """


@dataclass(frozen=True)
class ListedPool:
    """A pool of the user's as its provider tells of it, whoever made it.

    Attributes:
        where: what it runs in, and on which nodes: "Slurm job 7 on n[1-2]". state: in words.
        ends: seconds since 1970 at which it ends by itself at the latest; None where nobody knows.
    """

    name: str
    job_id: str
    where: str
    state: str
    ends: float | None = None


@runtime_checkable
class Listable(Protocol):
    """What a provider has that knows the user's pools by itself, from every machine that may ask it."""

    def pools(self) -> Sequence[ListedPool]:
        """The user's pools. Raises ProvisionError where nobody answers."""

    def end(self, job_id: str) -> None:
        """End a pool that `pools` has named, or that was left; no other notebook is asked. Twice is safe.

        Raises:
            ProvisionError: it goes on; says why.
        """


@runtime_checkable
class Replaceable(Protocol):
    """What a provider has whose machines may be taken away while they run."""

    def replace(
        self, survey: Any, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Other machines in the place of these, by their numbers; waits until there are some, on a thread of its own.

        Called for machines that are gone, with nothing else asked for meanwhile. What it makes the survey releases.

        Args:
            stop: set where nobody wants them any more: then it returns soon, with none.

        Raises:
            ProvisionError: there will be none.
        """
