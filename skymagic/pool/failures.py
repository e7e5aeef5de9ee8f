"""Lost ranks and machines: events from the agents between and during runs, and replacements.

With ``--replace``::

    node lost ──▶ provider.replace: waits for capacity
              ──▶ recovery.replace_nodes: agents, a new process group ──▶ the next cell
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.cluster import Agents, Node
from skymagic.cluster.agents import AgentObserver, RequestResult
from skymagic.display.screen import print_note
from skymagic.plan.units import rank_words, verb_form
from skymagic.pool import messages, records
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.messages import suggest_without_ranks
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import PoolEvent, SharedStatus, State, now
from skymagic.wire import agent as wire
from skymagic.wire.processes import describe
from skymagic.wire.record import identity
from skymagic.wire.session.frames import REPLACED

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""Seconds that closing the pool waits for a launch in progress.

Machines that it still makes are identified by their tags.
"""
POLL_SECONDS = 0.2
"""Seconds between checks of a waiting cell for whether it was stopped."""


@dataclass(eq=False, repr=False)
class Replacement:
    """Thread that rents machines to replace lost ones."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _recovery: Recovery
    _replace: (
        Callable[[Sequence[int], Callable[[str], None], threading.Event], Mapping[int, Node]] | None
    )
    """Rents replacements for these nodes; None if replacement is off."""
    _done: Callable[[], None]
    """Called when the pool has its new machines."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    lost: set[int] = field(default_factory=set)
    """Nodes that have no replacement yet."""
    _announced: str = ""
    """The provider's latest line on what it waits for."""
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def is_enabled(self) -> bool:
        """True if lost machines are replaced."""
        return self._replace is not None

    def begin(self, index: int) -> bool:
        """Start to replace a lost node, and return at once. Return False if replacement is off."""
        if not self.is_enabled or self._stop.is_set():
            return False
        with self._lock:
            self.lost.add(index)
            logger.info("node is replaced: pool=%s node=%s", self._status.name, index)
            if self._thread is None:
                self._announced = ""
                self._thread = threading.Thread(
                    target=self._run, name="skymagic-replacement", daemon=True
                )
                self._thread.start()
        return True

    def wait(
        self, ranks: Sequence[int], check: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        """Wait while machines of these ranks are being replaced.

        Args:
            check: called repeatedly; an exception from it ends the wait.
            tell: gets a line if there is a replacement to wait for, then the provider's progress.
        """
        thread = self._thread
        if thread is None or not {*ranks} & {*self._ranks()}:
            return
        tell(f"waits for a replacement of {self._names()}")
        shown = ""
        while thread.is_alive():
            check()
            if (progress := self._announced) != shown:
                tell(shown := progress)
            thread.join(POLL_SECONDS)

    def close(self) -> None:
        """Stop renting machines; safe to call twice."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _ranks(self) -> list[int]:
        """List the ranks that wait for a machine."""
        with self._lock:
            lost = sorted(self.lost)
        return [rank for index in lost for rank in self._resources.agents.ranks_of(index)]

    def _names(self) -> str:
        with self._lock:
            return ", ".join(f"node {index}" for index in sorted(self.lost))

    # -- on the replacement thread ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                lost = sorted(self.lost)
                if not lost or self._stop.is_set():
                    self._thread = None
                    return
            try:
                self._exchange(lost)
            except Exception as problem:
                logger.warning(
                    "nodes not replaced: pool=%s nodes=%s error=%s",
                    self._status.name,
                    lost,
                    type(problem).__name__,
                )
                self._status.note(
                    f"{self._names()} could not be replaced: {problem}; %sky_down ends the pool"
                )
                with self._lock:
                    self.lost.clear()

    def _exchange(self, lost: list[int]) -> None:
        assert self._replace is not None
        machines = self._replace(lost, self._announce, self._stop)
        if not machines or self._stop.is_set():
            return
        logger.info(
            "nodes have replacements: pool=%s nodes=%s", self._status.name, sorted(machines)
        )
        self._recovery.replace_nodes(machines)
        self._done()
        with self._lock:
            self.lost.difference_update(machines)
        agents = self._resources.agents
        ranks = [rank for index in sorted(machines) for rank in agents.ranks_of(index)]
        names = ", ".join(
            f"node {index} is {machines[index].name} now" for index in sorted(machines)
        )
        have = verb_form(len(ranks), "has", "have")
        self._status.note(f"{names}; {rank_words(ranks)} {have} restarted without variables")

    def _announce(self, text: str) -> None:
        self._announced = str(text)
        if self._status.state not in (State.STOPPING, State.STOPPED):
            self._dispatch.note(str(text))


@dataclass(eq=False, repr=False)
class AgentEvents(AgentObserver):
    """Passes each event to the runs, to recovery or to the user. Called on the links' threads."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _recovery: Recovery
    _replacement: Replacement
    _close: Callable[[], None]
    """Ends the pool."""
    _leave: Callable[[], None]
    """Closes all connections to the pool and leaves it running for its new owner."""
    _taking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._dispatch.on_late_death = self._died_between_runs

    def connect(self, nodes: Sequence[Node]) -> Agents:
        """Connect to the agents of these machines and receive their events."""
        return Agents(nodes, self)

    def on_link(self, text: str) -> None:
        self._dispatch.note(text)

    def on_result(self, message: RequestResult) -> None:
        self._dispatch.received(message)

    def on_problem(self, text: str) -> None:
        if not self._dispatch.note(text):
            self._status.note(text)

    def on_notice(self, message: wire.InterruptionNotice | wire.HookEnded) -> None:
        """Show at once that a machine will be reclaimed or that an interruption hook has ended."""
        text = (
            messages.hook_ended(message)
            if isinstance(message, wire.HookEnded)
            else self._interruption(message)
        )
        if not self._dispatch.note(text):
            print_note(f"[{text}]")

    def _interruption(self, message: wire.InterruptionNotice) -> str:
        name = self._resources.agents.nodes[message.node].name
        text = messages.interruption(message, name, time.time())
        if message.at is not None and self._replacement.is_enabled:
            text += "; then a replacement is requested"
        return text

    def on_death(self, exited: wire.RankExited) -> None:
        logger.info(
            "death reaches the pool: pool=%s rank=%s expected=%s",
            self._status.name,
            exited.rank,
            exited.expected,
        )
        if not self._dispatch.rank_died(exited):
            self._died_between_runs(exited)

    def _died_between_runs(self, exited: wire.RankExited) -> None:
        if self._status.state in (State.READY, State.RUNNING) and not exited.expected:
            host = self._resources.agents.ranks[exited.rank].hostname
            self._status.note(
                f"rank {exited.rank} on {host} had died ({describe(exited)}); it was restarted and "
                "lost its variables"
            )
            self._recovery.begin([exited.rank])

    def on_loss(self, index: int, reason: str) -> None:
        status = self._status
        if status.state in (State.STOPPING, State.STOPPED, State.STARTING, State.LOST):
            return
        if REPLACED in reason:
            self._on_taken_over()
            return
        if limit := status.lifetime.reason(now()):  # it expired while the agents were unreachable
            self.on_end(f"ended {limit}")
            return
        logger.warning(
            "pool loses a node: pool=%s node=%s reason=%s",
            status.name,
            index,
            reason.partition("\n")[0],
        )
        agents = self._resources.agents
        ranks = agents.ranks_of(index)
        is_last = len(agents.gone) == len(agents.nodes)
        status.move(PoolEvent.LOSE if is_last else PoolEvent.DEGRADE)
        self._resources.lose_node(index)
        replaced = self._replacement.begin(index)
        if not is_last or replaced:
            their = verb_form(len(ranks), "its", "their")
            what = f"{rank_words(ranks)} and {their} variables are lost"
            then = suggest_without_ranks(ranks, status.world_size, replaced=replaced)
            status.note(f"{reason}: {what}; {then}")
        self._dispatch.ranks_lost(ranks, reason)  # without a run in flight, the next run reports it

    def _on_taken_over(self) -> None:
        """Give the pool up after another notebook has attached to it (``--take-over``).

        Nothing has died, but nothing of the pool belongs to this notebook any more. Each node's
        link reports it; the first report counts.
        """
        status = self._status
        with self._taking:
            if status.taken_over:
                return
            status.taken_over = True
        record = records.of_job(status.job_id)
        # if a notebook on another machine took it, the record here still names this notebook
        named = record is not None and record.process != identity()
        holder = records.holder(record) if record is not None and named else "another notebook"
        text = f"pool {status.name!r} was taken over by {holder}, and runs on there"
        status.remedy = f"%sky_attach {status.name} --take-over takes it back"
        logger.info("pool=%s job=%s was taken over", status.name, status.job_id)
        self._dispatch.close(f"{text}: {status.remedy}")
        self._dispatch.end(text)
        # on a separate thread, because closing waits for this one
        threading.Thread(target=self._leave_taken_pool, name="skymagic-leave", daemon=True).start()

    def _leave_taken_pool(self) -> None:
        try:
            self._leave()
        except Exception:
            logger.warning(
                "pool=%s: not all connections were closed", self._status.name, exc_info=True
            )

    def on_end(self, reason: str) -> None:
        """Notify waiting runs that the agents end the pool, and release what is held here.

        Args:
            reason: as in `wire.PoolEnded`. Each node reports its reason; the first one counts.
        """
        status = self._status
        with self._taking:
            if status.ended is not None or status.state in (
                State.STARTING,
                State.STOPPING,
                State.STOPPED,
            ):
                return
            ended = f"pool {status.name!r} {reason}"
            self._dispatch.close(f"{ended}: {status.remedy}")
            self._dispatch.end(ended)
            status.move(PoolEvent.STOP)
        logger.info("pool=%s job=%s %s", status.name, status.job_id, reason)
        # on a separate thread, because closing waits for this one
        threading.Thread(
            target=self._close_ended, args=(ended,), name="skymagic-close", daemon=True
        ).start()

    def _close_ended(self, ended: str) -> None:
        try:
            self._close()
        except Exception as problem:
            self._dispatch.end(f"{ended} ({problem})")
