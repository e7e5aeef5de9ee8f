"""Attaching: a notebook takes the place of one that was killed, and goes on with the runs that it had begun."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymagic.cluster import Agents, Node
from skymagic.errors import ProvisionError
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool import messages
from skymagic.pool.keys import PoolKey
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import Resources
from skymagic.pool.runs import Runs
from skymagic.pool.states import Event
from skymagic.pool.status import Status
from skymagic.run.spec import RunSpec
from skymagic.wire.session.frames import REPLACED

RECALL_TIMEOUT = 20.0
"""Seconds in which ranks tell of their last runs."""


@dataclass(frozen=True)
class Unfinished:
    """A run that another notebook began, and whose end its user has not seen.

    Attributes:
        run: the pool's number of it.
        over: whether all of its ranks have ended it.
    """

    run: int
    spec: RunSpec
    over: bool


@dataclass(eq=False, repr=False)
class Attaching:
    """Takes a pool up as another notebook has left it."""

    _status: Status
    _resources: Resources
    _recovery: Recovery
    _runs: Runs
    _node_lost: Callable[[int, str], None]
    """Called with a node that is gone, and why."""

    def attach(
        self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], key: PoolKey
    ) -> list[Unfinished]:
        """Take it up; the runs that its user has to hear of, the oldest first. After a failure all is as before.

        Nodes other than the head may be gone: their ranks are lost.

        Raises:
            ProvisionError: the head is gone, a node does not answer, or another notebook attaches too.
        """
        met = [
            replace(node, address=address, hostname=hostname)
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        self._status.move(Event.START)
        try:
            dead = self._resources.attach(met, connect, key.port)
            agents = self._resources.agents
            kept = agents.ask(range(self._status.world_size), "recall", RECALL_TIMEOUT)
            if refusals := [reason for index, reason in agents.gone.items() if index == 0 or REPLACED in reason]:
                raise ProvisionError(refusals[0])
        except BaseException as problem:
            self._resources.leave()
            self._status.move(Event.STOPPED)
            if isinstance(problem, ProvisionError) and self._head_lost():
                raise ProvisionError(
                    f"{problem}; {messages.headless(self._status.job_id, [one.name for one in met[1:]], not self._status.plan.region)}"
                ) from problem
            raise
        self._status.move(Event.STARTED)
        gone = {rank for index in agents.gone for rank in agents.ranks_of(index)}
        for index, reason in sorted(agents.gone.items()):
            self._node_lost(index, reason)
        found = [
            one for one in unfinished(kept) if not (one.over and self._status.shown.delivered(one.run, one.spec.ranks))
        ]
        self._runs.numbers = itertools.count(1 + max(map(_number, kept.values()), default=0))
        self._recovery.generation = max((one["generation"] for one in kept.values()), default=0)
        followed = {rank for one in found for rank in one.spec.ranks}  # their deaths are the runs' to tell
        if lost := sorted({*dead} - followed - gone):
            self._status.note(
                f"{rank_words(lost)} had died; {agreeing(len(lost), 'it is', 'they are')} started anew without variables"
            )
            self._recovery.begin(lost)
        return found

    def _head_lost(self) -> bool:
        gone = self._resources.agents.gone if self._resources.started else {}
        return 0 in gone and not any(REPLACED in reason for reason in gone.values())


def unfinished(kept: Mapping[int, Mapping[str, Any]]) -> list[Unfinished]:
    """The last runs of these ranks, the oldest first; pure.

    Args:
        kept: rank → what it has kept: ``order``, ``outcome``.
    """
    orders = {_number(one): one["order"] for one in kept.values() if one["order"]}
    found = []
    for run, order in sorted(orders.items()):
        if any(_number(kept[rank]) > run for rank in order["ranks"] if rank in kept):
            continue  # one of its ranks has begun another: its user had seen its end
        outcomes = [one["outcome"] for one in kept.values() if _number(one) == run]
        found.append(Unfinished(run, _spec_of(order), all(outcome is not None for outcome in outcomes)))
    return found


def _number(kept: Mapping[str, Any]) -> int:
    return int(kept["order"]["run"]) if kept["order"] else 0


def _spec_of(order: Mapping[str, Any]) -> RunSpec:
    """What a rank remembers of a run; the text of the cell is not among it."""
    return RunSpec(
        source="", source_without_magics="", ranks=tuple(order["ranks"]), visible_ranks=tuple(order["visible_ranks"]),
        value_ranks=tuple(order["value_ranks"]), gather=tuple(order["gather"]), gather_ranks=tuple(order["gather_ranks"]),
        execution_count=order["execution_count"], job=order["job"], output=order["output"], head=order["head"],
    )  # fmt: skip
