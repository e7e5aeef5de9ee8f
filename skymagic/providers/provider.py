"""Interface between pools and the providers that allocate their machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from skymagic.cluster import Node
from skymagic.plan.plans import Plan
from skymagic.plan.requests import PoolRequest

Say = Callable[[str], None]
"""Callback that receives a line about the current step and its progress."""


@dataclass(frozen=True)
class Survey:
    """A plan and what the provider learned while making it.

    Owns everything that planning and acquiring have opened.
    """

    plan: Plan

    def outcome(self) -> Plan:
        """Return the plan as it was carried out. Call it after `acquire`.

        Machines that were only available elsewhere have another price.
        """
        return self.plan

    def ready(self) -> None:
        """Called once all ranks are up."""

    def close(self) -> None:
        """Release everything.

        Called after the agents have ended, and also if acquiring failed. Calling it twice is safe.
        """


class Provider(Protocol):
    """Plans, then acquires machines.

    Keeps no state between the calls: everything it found or opened is in the survey.
    """

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """Return what would be created, with its price. Inspects, but starts nothing.

        Raises:
            RequestError: lists all mistakes in the request.
        """

    def acquire(self, survey: Any, job_id: str, say: Say) -> Sequence[Node]:
        """Return machines that can run an agent, the head first.

        Called once with the survey that `plan` returned. The survey releases the machines.
        """


@runtime_checkable
class Attachable(Protocol):
    """Implemented by providers whose nodes outlive their notebook (`Node.access`)."""

    def attach(self, plan: Plan, accesses: Sequence[Any]) -> tuple[Survey, Sequence[Node]]:
        """Return the machines of a pool that another notebook created from this plan.

        Called once. Starts nothing. The caller now owns everything that the survey's `close`
        releases.

        Args:
            plan: the plan of the pool.
            accesses: the `access` of each of its nodes.

        Raises:
            CloudError: some machines no longer exist. `kind` is ``missing`` if none of them do;
                then nothing of the pool remains.
        """


@dataclass(frozen=True)
class ListedPool:
    """A pool of this user as its provider reports it, whichever notebook created it.

    Attributes:
        where: location and nodes of the pool: "Slurm job 7 on n[1-2]".
        state: state of the pool, readable by users.
        ends: latest possible end of the pool in seconds since 1970, or None if unknown.
    """

    name: str
    job_id: str
    where: str
    state: str
    ends: float | None = None


@runtime_checkable
class Listable(Protocol):
    """Implemented by providers that can list the user's pools from any machine with access."""

    def pools(self) -> Sequence[ListedPool]:
        """Return the user's pools. Raises ProvisionError if the provider does not answer."""

    def end(self, job_id: str) -> None:
        """End a pool that `pools` listed or that was abandoned. Twice is safe.

        Does not ask the notebook that uses the pool.

        Raises:
            ProvisionError: the pool is still running; the message gives the reason.
        """


@runtime_checkable
class Replaceable(Protocol):
    """Implemented by providers whose machines may be taken away while they run."""

    def replace(
        self, survey: Any, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Replace lost machines and return the new ones by node index.

        Blocks until they are available.

        Called on its own thread after machines are lost, with no other call to the provider
        meanwhile. The survey releases the machines created here.

        Args:
            stop: set when the replacements are no longer needed; the call then returns soon, with
                none.

        Raises:
            ProvisionError: no replacement is possible.
        """
