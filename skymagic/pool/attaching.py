"""Pools of other notebooks: taken up in the place of a notebook that was killed, or read beside the one that has it.

A reader changes nothing. The nodes' agents serve readers beside the notebook that has the pool (`kernels.agent.readers`): logs, stacks,
names, and what runs show, which comes as the agents have kept it (a flood as its beginning and its end) and then as it is shown."""

from __future__ import annotations

import functools
import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymagic import providers
from skymagic.cluster import Agents, Node
from skymagic.display.screen import Screen
from skymagic.errors import PoolError, ProvisionError
from skymagic.plan.requests import Defaults
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool import keys, messages, records, resources
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources
from skymagic.pool.runs import PoolRuns
from skymagic.pool.status import PoolEvent, SharedStatus
from skymagic.providers.provider import Attachable
from skymagic.run.report import RunSpec
from skymagic.run.run import show_content
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.processes import describe
from skymagic.wire.record import identity
from skymagic.wire.session.frames import REPLACED
from skymagic.wire.threads import run_all

RECALL_TIMEOUT = 20.0
"""Seconds in which ranks tell of their last runs."""
TIMEOUT = 30.0
"""Seconds in which agents must tell how their ranks are."""
POLL = 0.2
"""Seconds between two looks at lines that are open for a while."""


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that another notebook began, and whose end its user has not seen.

    Attributes:
        run: the pool's number of it.
        over: whether all of its ranks have ended it.
    """

    run: int
    spec: RunSpec
    over: bool

    @property
    def words(self) -> str:
        """Which run it is, and whether it still runs: "[cell 11 on ranks 0, 1 is still running]"."""
        cell = f"cell {self.spec.execution_count} on {rank_words(self.spec.ranks)}"
        return f"[{cell} {'had ended' if self.over else 'is still running'}]"


@dataclass(eq=False, repr=False)
class Attaching:
    """Takes a pool up as another notebook has left it."""

    _status: SharedStatus
    _resources: PoolResources
    _recovery: Recovery
    _runs: PoolRuns
    _node_lost: Callable[[int, str], None]
    """Called with a node that is gone, and why."""

    def attach(
        self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], key: PoolKey
    ) -> list[UnfinishedRun]:
        """Take it up; the runs that its user has to hear of, the oldest first. After a failure all is as before.

        Nodes other than the head may be gone: their ranks are lost.

        Raises:
            ProvisionError: the head is gone, a node does not answer, or another notebook attaches too.
        """
        met = [
            replace(node, address=address, hostname=hostname)
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        self._status.move(PoolEvent.START)
        try:
            dead = self._resources.attach(met, connect, key.port)
            agents = self._resources.agents
            kept = agents.ask(range(self._status.world_size), "recall", RECALL_TIMEOUT)
            if refusals := [reason for index, reason in agents.gone.items() if index == 0 or REPLACED in reason]:
                raise ProvisionError(refusals[0])
        except BaseException as problem:
            self._resources.leave()
            self._status.move(PoolEvent.STOPPED)
            if isinstance(problem, ProvisionError) and self._head_lost():
                raise ProvisionError(
                    f"{problem}; {messages.headless(self._status.job_id, [one.name for one in met[1:]], not self._status.plan.region)}"
                ) from problem
            raise
        self._status.move(PoolEvent.STARTED)
        gone = {rank for index in agents.gone for rank in agents.ranks_of(index)}
        for index, reason in sorted(agents.gone.items()):
            self._node_lost(index, reason)
        found = [
            one
            for one in unfinished_runs(kept)
            if not (one.over and self._status.shown.delivered(one.run, one.spec.ranks))
        ]
        self._runs.numbers = itertools.count(1 + max(map(_number, kept.values()), default=0))
        self._recovery.generation = max((one["generation"] for one in kept.values()), default=0)
        followed = {rank for one in found for rank in one.spec.ranks}  # their deaths are the runs' to tell
        if lost := sorted({*dead} - followed - gone):
            self._status.note(
                f"{rank_words(lost)} had died; {agreeing(len(lost), 'it is', 'they are')} restarted without variables"
            )
            self._recovery.begin(lost)
        return found

    def _head_lost(self) -> bool:
        gone = self._resources.agents.gone if self._resources.started else {}
        return 0 in gone and not any(REPLACED in reason for reason in gone.values())


def unfinished_runs(kept: Mapping[int, Mapping[str, Any]]) -> list[UnfinishedRun]:
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
        found.append(UnfinishedRun(run, _spec_of(order), all(outcome is not None for outcome in outcomes)))
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


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended, as its reader knows it.

    Attributes:
        status: ``done``, ``failed``, ``stopped`` or ``lost``: the pool has ended, or cannot be reached.
        errors: rank → what it raised, or how it died.
    """

    run: int
    cell: int
    status: str
    errors: dict[int, str]


class PoolReader:
    """A pool that another notebook has, read over connections of its own.

    Args:
        record: which pool, and who has it.
        key: what leads to its nodes.
        nodes: its machines; what owns them is not closed, for that ends rented ones.
    """

    def __init__(self, record: PoolRecord, key: PoolKey, nodes: Sequence[Node]) -> None:
        self.name, self.job_id, self.plan, self.record = key.name, key.job_id, key.plan, record
        self.gone: str | None = None
        """Why nothing can be read any more."""
        self._transports: list[Transport] = []
        self._events: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        met = [
            replace(node, address=address, hostname=hostname, start_agent=functools.partial(self._open, node))
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        self.agents = Agents(met, self._died, self._lost, _ignore, _ignore, _ignore, self._shown)
        status = SharedStatus(key.name, key.plan, Defaults(), key.job_id)
        try:
            self.agents.read(resources.rank_specs(status, met, key.port), TIMEOUT)
        except BaseException as problem:
            self.close()
            if isinstance(problem, ProvisionError):
                raise PoolError(f"pool {key.name!r} cannot be read: {problem}") from problem
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.topology.world_size

    def runs(self) -> list[UnfinishedRun]:
        """The last runs of its ranks, over or not, the oldest first."""
        kept = self.agents.ask(range(self.world_size), "recall", RECALL_TIMEOUT)
        return unfinished_runs({rank: one for rank, one in kept.items() if one is not None})

    def follow(self, one: UnfinishedRun, screen: Screen) -> RunOutcome:
        """Show what a run has shown from its beginning on, as far as it is kept, and what it shows until it ends.

        KeyboardInterrupt leaves the run as it is.
        """
        self._events = queue.SimpleQueue()
        self.agents.follow(dict.fromkeys(one.spec.ranks, 0))
        left = {*one.spec.ranks}
        while left and not self.gone:
            try:
                rank, content = self._events.get(timeout=POLL)
            except queue.Empty:
                screen.refresh()
                continue
            if rank in one.spec.ranks and content.get("run", one.run) == one.run:
                show_content(screen, rank, content)
                left -= {rank} if content["kind"] == "end" else set()
        return self._end(one)

    def _end(self, one: UnfinishedRun) -> RunOutcome:
        """How it has ended, as its ranks tell, which know that before their last output is here."""
        errors, interrupted, waiting = dict[int, str](), set[int](), {*one.spec.ranks}
        deadline = time.monotonic() + RECALL_TIMEOUT
        while waiting and not self.gone and time.monotonic() < deadline:
            for rank in list(waiting):
                if (exited := self.agents.ranks[rank].exited) is not None:
                    errors[rank] = f"died ({describe(exited)})"
                    waiting.discard(rank)
            for rank, kept in self.agents.ask(waiting, "recall", RECALL_TIMEOUT).items():
                known = kept or {"order": None, "ended": {}}
                found = known["ended"].get(str(one.run))
                if found is not None and found["status"] != "ok":
                    errors[rank] = found["error"]
                    interrupted |= {rank} if found["interrupted"] else set()
                if found is not None or (known["order"] or {"run": 0})["run"] > one.run:
                    waiting.discard(rank)  # one that is far ahead does not know any more
        failed = "stopped" if errors and errors.keys() <= interrupted else "failed" if errors else "done"
        return RunOutcome(one.run, one.spec.execution_count, "lost" if self.gone else failed, errors)

    def _shown(self, rank: int, content: Mapping[str, Any]) -> None:
        self._events.put((rank, content))

    def _died(self, exited: wire.RankExited) -> None:
        self._events.put((exited.rank, {"kind": "end"}))

    def _lost(self, index: int, reason: str) -> None:
        self.gone = self.gone or reason

    def _open(self, node: Node, _: Callable[[str], None]) -> Transport:
        """A connection to the agent's socket for readers."""
        self._transports.append(node.run(processes.READ, node.access.daemon))
        return self._transports[-1]

    def close(self) -> None:
        """Close the connections; the pool goes on. Twice is safe."""
        self.agents.leave()
        run_all([one.close for one in self._transports])  # on this machine each is a process

    def __repr__(self) -> str:
        return f"<Pool {self.name!r}: {self.plan.size} on {', '.join(self.plan.hosts)}, read; {records.holder(self.record)} has it>"


def outcome_words(end: RunOutcome, ranks: Sequence[int]) -> str:
    """How a run has ended, in a line and one for each error."""
    words = {
        "done": "has finished",
        "failed": "has failed",
        "stopped": "was stopped",
        "lost": "cannot be reached: the pool has ended",
    }
    lines = [f"[cell {end.cell}, run {end.run}, on {rank_words(ranks)} {words[end.status]}]"]
    return "\n".join([*lines, *(f"[rank {rank}: {text}]" for rank, text in sorted(end.errors.items()))])


def _ignore(_: object) -> None:
    """What the notebook hears that has the pool."""


def held_elsewhere(name: str) -> bool:
    """Whether a notebook that is alive has a pool of this name, or job id, and it is not this one. Raises as `records.named` does."""
    record = records.named(name)
    return not (records.left(record) or record.process == identity())


def opened_reader(name: str) -> PoolReader:
    """Reader of such a pool; the caller closes it."""
    record = records.named(name)
    key = keys.attachable(record.job_id)
    _, nodes = attaching_provider(key).attach(key.plan, key.accesses)
    return PoolReader(record, key, nodes)


def attaching_provider(key: keys.PoolKey) -> Any:
    """The provider of a pool that can be attached. Raises PoolError for others."""
    provider = providers.serving(key.plan.request)
    if not isinstance(provider, Attachable):
        raise PoolError(f"pools of --provider {key.plan.provider} cannot be attached")
    return provider
