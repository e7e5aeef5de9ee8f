"""A pool that is read: what another notebook has, seen over connections of one's own, by which nothing can be changed there.

The nodes' agents serve readers beside the notebook that has the pool (`kernels.agent.readers`): logs, stacks, names, and what runs
show, which comes as the agents have kept it (a flood as its beginning and its end) and then as it is shown.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymagic.cluster import Agents, Node
from skymagic.display.screen import Screen
from skymagic.errors import PoolError, ProvisionError
from skymagic.plan.requests import Defaults
from skymagic.plan.units import rank_words
from skymagic.pool import records, specs
from skymagic.pool.attaching import RECALL_TIMEOUT, Unfinished, unfinished
from skymagic.pool.keys import PoolKey
from skymagic.pool.messages import rows
from skymagic.pool.records import PoolRecord
from skymagic.pool.states import State
from skymagic.pool.status import Status
from skymagic.run.run import show_content
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.processes import describe
from skymagic.wire.threads import run_all

TIMEOUT = 30.0
"""Seconds in which agents must tell how their ranks are."""
POLL = 0.2
"""Seconds between two looks at lines that are open for a while."""


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended, as its reader knows it.

    Attributes:
        status: ``done``, ``failed``, ``stopped`` or ``lost``: the pool has ended, or cannot be reached.
        errors: rank → what it raised, or how it died.
    """

    run: int
    cell: int
    status: str
    errors: dict[int, str]


class Reader:
    """Owns the connections.

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
        status = Status(key.name, key.plan, Defaults(), key.job_id)
        try:
            self.agents.read(specs.of_ranks(status, met, key.port), TIMEOUT)
        except BaseException as problem:
            self.close()
            if isinstance(problem, ProvisionError):
                raise PoolError(f"pool {key.name!r} cannot be read: {problem}") from problem
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.topology.world_size

    def status(self) -> list[tuple[object, ...]]:
        """A row for each rank, as of `Pool.status`."""
        busy = any(not one.over for one in self.runs()) and not self.gone
        return rows(self.plan.topology, self.agents, State.RUNNING if busy else State.READY)

    def runs(self) -> list[Unfinished]:
        """The last runs of its ranks, over or not, the oldest first."""
        kept = self.agents.ask(range(self.world_size), "recall", RECALL_TIMEOUT)
        return unfinished({rank: one for rank, one in kept.items() if one is not None})

    def refusal(self) -> str:
        """Why nothing runs from here."""
        return (
            f"pool {self.name!r} is only read here: {records.holder(self.record)} has it; "
            f"%sky_attach {self.name} --take-over takes it away from there"
        )

    def follow(self, one: Unfinished, screen: Screen) -> RunEnd:
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

    def _end(self, one: Unfinished) -> RunEnd:
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
        return RunEnd(one.run, one.spec.execution_count, "lost" if self.gone else failed, errors)

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
        return f"<Pool {self.name!r}: {self.plan.size} on {', '.join(self.plan.hosts)}, read here; {records.holder(self.record)} has it>"


def end_words(end: RunEnd, ranks: Sequence[int]) -> str:
    """How a run has ended, in a line and one for each error."""
    words = {
        "done": "has ended well",
        "failed": "has failed",
        "stopped": "was stopped",
        "lost": "is out of sight: the pool has ended",
    }
    lines = [f"[cell {end.cell}, run {end.run}, on {rank_words(ranks)} {words[end.status]}]"]
    return "\n".join([*lines, *(f"[rank {rank}: {text}]" for rank, text in sorted(end.errors.items()))])


def _ignore(_: object) -> None:
    """What the notebook hears that has the pool."""
