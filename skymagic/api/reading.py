"""What runs on a pool of another notebook, followed from here: by ``%sky_attach`` beside a notebook that is alive, and ``skymagic attach``.

A reader changes nothing. The nodes' agents serve readers beside the notebook that has the pool (`kernels.agent.readers`): logs, and what runs
show, which comes as the agents have kept it (a flood as its beginning and its end) and then as it is shown.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from skymagic.api import notebooks
from skymagic.cluster import Agents, Node
from skymagic.display.screen import NotebookScreen, Screen, print_note
from skymagic.errors import PoolError, ProvisionError
from skymagic.plan.requests import Defaults
from skymagic.plan.units import rank_words
from skymagic.pool import keys, making, records, resources
from skymagic.pool.keys import DisplayRecord, PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.pool.runs import RECALL_TIMEOUT, UnfinishedRun, unfinished_runs
from skymagic.pool.status import SharedStatus
from skymagic.run.run import show_content
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.processes import describe
from skymagic.wire.record import identity
from skymagic.wire.threads import run_all

TIMEOUT = 30.0
"""Seconds in which agents must tell how their ranks are."""
POLL = 0.2
"""Seconds between two looks at lines that are open for a while."""


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
            replace(
                node,
                address=address,
                hostname=hostname,
                start_agent=functools.partial(self._open, node),
            )
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
        failed = (
            "stopped" if errors and errors.keys() <= interrupted else "failed" if errors else "done"
        )
        return RunOutcome(
            one.run, one.spec.execution_count, "lost" if self.gone else failed, errors
        )

    def _shown(self, rank: int, content: Mapping[str, Any]) -> None:
        self._events.put((rank, content))

    def _died(self, exited: wire.RankExited) -> None:
        self._events.put((exited.rank, {"kind": "end"}))

    def _lost(self, index: int, reason: str) -> None:
        self.gone = self.gone or reason

    def _open(self, node: Node, _: Callable[[str], None]) -> Transport:
        """A connection to the agent's socket for readers."""
        self._transports.append(
            node.run(processes.ATTACH, processes.READERS_ONLY, node.access.daemon)
        )
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
    return "\n".join(
        [*lines, *(f"[rank {rank}: {text}]" for rank, text in sorted(end.errors.items()))]
    )


def _ignore(_: object) -> None:
    """What the notebook hears that has the pool."""


def held_elsewhere(name: str) -> bool:
    """Whether a notebook that is alive has a pool of this name, or job id, and it is not this one. Raises as `records.named` does."""
    record = records.named(name)
    return not (records.left(record) or record.process == identity())


def shown_elsewhere(name: str) -> bool:
    """Show in a notebook what runs on a pool of this name, or job id, that another one has; False where nobody has it. The stop button
    leaves it as it is. Raises PoolError: there is no such pool, or it cannot be read."""
    notebooks.settled(records.named(name))
    if not held_elsewhere(name):
        return False
    holder = records.holder(records.named(name))
    print_note(
        f"{holder} has pool {name!r}; %sky_attach {name} --take-over takes it away from there"
    )
    with contextlib.suppress(KeyboardInterrupt):
        attached(name, as_json=False)
    return True


def opened_reader(name: str) -> PoolReader:
    """Reader of a pool that another notebook has; the caller closes it."""
    record = records.named(name)
    key = keys.attachable(record.job_id)
    _, nodes = making.attaching_provider(key).attach(key.plan, key.accesses)
    return PoolReader(record, key, nodes)


class JsonScreen(Screen):
    """A line of JSON for each thing that a run shows: fields ``event``, ``rank``, and ``text`` or ``data``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, event: str, **fields: Any) -> None:
        """Write one line."""
        print(json.dumps({"event": event, **fields}, default=str), file=self._file, flush=True)

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard output or error."""
        self.say(name, rank=rank, text=text)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message; its text alone."""
        self.say("display", rank=rank, text=(content.get("data") or {}).get("text/plain", ""))

    def note(self, text: str) -> None:
        """A line of skymagic's own."""
        self.say("note", text=text.rstrip("\n"))


def attached(name: str, as_json: bool) -> str:
    """Follow what runs on a pool; how it has ended: a status of `RunOutcome`, or "nothing". Raises PoolError."""
    screen = JsonScreen(sys.stdout)
    with contextlib.closing(opened_reader(name)) as reader:
        shown = DisplayRecord(reader.job_id)
        waiting = [
            one
            for one in reader.runs()
            if not (one.over and shown.delivered(one.run, one.spec.ranks))
        ]
        if as_json:
            screen.say(
                "attached",
                pool=reader.name,
                job_id=reader.job_id,
                runs=[one.run for one in waiting],
            )
        elif not waiting:
            print_note(f"[nothing runs on pool {reader.name!r}]")
        status = "nothing"
        for one in waiting:
            if as_json:
                screen.say(
                    "run",
                    run=one.run,
                    cell=one.spec.execution_count,
                    ranks=list(one.spec.ranks),
                    over=one.over,
                )
                end = reader.follow(one, screen)
                screen.say("end", **vars(end))
            else:
                print_note(_begun(one))
                end = _followed(reader, one)
            status = end.status if status in ("nothing", "done") else status
        return status


def _followed(reader: PoolReader, one: UnfinishedRun) -> RunOutcome:
    screen = NotebookScreen(one.spec.visible_ranks)
    try:
        end = reader.follow(one, screen)
    finally:
        screen.finish()
    print_note(outcome_words(end, one.spec.ranks))
    return end


def _begun(one: UnfinishedRun) -> str:
    verb = "had ended" if one.over else "is still running"
    return (
        f"[cell {one.spec.execution_count}, run {one.run}, on {rank_words(one.spec.ranks)} {verb}]"
    )
