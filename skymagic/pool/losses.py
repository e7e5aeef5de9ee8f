"""Ranks and machines that are lost: what the agents report between and during runs, and other machines rented in the place of lost ones.

With ``--replace``::

    node lost ──▶ provider.replace: waits for capacity ──▶ recovery.exchange: agents, a new process group ──▶ the next cell
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.cluster import Agents, Node
from skymagic.display.screen import print_note
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool import messages, records
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.messages import without
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources
from skymagic.pool.status import PoolEvent, SharedStatus, State, now
from skymagic.wire import agent as wire
from skymagic.wire.processes import describe
from skymagic.wire.record import identity
from skymagic.wire.session.frames import REPLACED

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long the end of the pool waits for a launch that is under way; what it makes is found by its tags."""
POLL_SECONDS = 0.2
"""Between two looks of a cell that waits at whether it was stopped."""


@dataclass(eq=False, repr=False)
class Replacement:
    """Thread that rents other machines in the place of lost ones."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _recovery: Recovery
    _replace: (
        Callable[[Sequence[int], Callable[[str], None], threading.Event], Mapping[int, Node]] | None
    )
    """Rents other machines in the place of these; None where that is not wanted."""
    _done: Callable[[], None]
    """Called when the pool has other machines."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    lost: set[int] = field(default_factory=set)
    """Nodes that have no other machine yet."""
    _said: str = ""
    """What the provider waits for."""
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def wanted(self) -> bool:
        """Whether machines that are lost are replaced."""
        return self._replace is not None

    def begin(self, index: int) -> bool:
        """Replace a node that is gone; returns at once. False where that is not wanted."""
        if not self.wanted or self._stop.is_set():
            return False
        with self._lock:
            self.lost.add(index)
            if self._thread is None:
                self._said = ""
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
            check: called again and again; what it raises ends the wait.
            tell: gets a line if there is something to wait for, and what the provider says of it.
        """
        thread = self._thread
        if thread is None or not {*ranks} & {*self._ranks()}:
            return
        tell(f"waits for a replacement of {self._names()}")
        told = ""
        while thread.is_alive():
            check()
            if (said := self._said) != told:
                tell(told := said)
            thread.join(POLL_SECONDS)

    def close(self) -> None:
        """Rent nothing any more; twice is safe."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _ranks(self) -> list[int]:
        """Ranks that wait for a machine; all of them where it is the head, which has the controller."""
        with self._lock:
            lost = sorted(self.lost)
        if 0 in lost:
            return list(range(self._status.world_size))
        return [rank for index in lost for rank in self._resources.agents.ranks_of(index)]

    def _names(self) -> str:
        with self._lock:
            return ", ".join(f"node {index}" for index in sorted(self.lost))

    # -- on its own thread -------------------------------------------------------------------------------------------

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
                self._status.note(
                    f"{self._names()} could not be replaced: {problem}; %sky_down ends the pool"
                )
                with self._lock:
                    self.lost.clear()

    def _exchange(self, lost: list[int]) -> None:
        assert self._replace is not None
        ranks, machines = self._ranks(), self._replace(lost, self._tell, self._stop)
        if not machines or self._stop.is_set():
            return
        self._recovery.exchange(machines)
        self._done()
        with self._lock:
            self.lost.difference_update(machines)
        names = ", ".join(
            f"node {index} is {machines[index].name} now" for index in sorted(machines)
        )
        have = agreeing(len(ranks), "has", "have")
        self._status.note(f"{names}; {rank_words(ranks)} {have} restarted without variables")

    def _tell(self, text: str) -> None:
        self._said = str(text)
        if self._status.state not in (State.STOPPING, State.STOPPED):
            self._dispatch.note(str(text))


@dataclass(eq=False, repr=False)
class AgentEvents:
    """Passes each event on to the runs, to recovery, or to the user; its methods are called on the links' threads."""

    _status: SharedStatus
    _resources: PoolResources
    _dispatch: Dispatch
    _recovery: Recovery
    _replacement: Replacement
    _close: Callable[[], None]
    """Ends the pool."""
    _leave: Callable[[], None]
    """Closes all connections to the pool, and leaves it to whoever has it."""
    _taking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._dispatch.on_late_death = self._died_between_runs

    def connect(self, nodes: Sequence[Node]) -> Agents:
        """Agents of these machines, whose events come here."""
        note = self._dispatch.note
        shown = self._dispatch.shown
        return Agents(
            nodes,
            self._rank_died,
            self.node_lost,
            note,
            self._ended_elsewhere,
            self._problem,
            shown,
            self._told,
        )

    def _problem(self, text: str) -> None:
        if not self._dispatch.note(text):
            self._status.note(text)

    def _told(self, message: wire.InterruptionNotice | wire.HookEnded) -> None:
        """A machine will be taken away, or a hook that was called for that has ended: shown at once."""
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
        if message.at is not None and self._replacement.wanted:
            text += "; then a replacement is requested"
        return text

    def _rank_died(self, exited: wire.RankExited) -> None:
        if not self._dispatch.rank_died(exited):
            self._died_between_runs(exited)

    def _died_between_runs(self, exited: wire.RankExited) -> None:
        if self._status.state in (State.READY, State.RUNNING) and not exited.expected:
            host = self._resources.agents.ranks[exited.rank].hostname
            self._status.note(
                f"rank {exited.rank} on {host} had died ({describe(exited)}); it was restarted and lost its variables"
            )
            self._recovery.begin([exited.rank])

    def node_lost(self, index: int, reason: str) -> None:
        status = self._status
        if status.state in (State.STOPPING, State.STOPPED, State.STARTING, State.LOST):
            return
        if REPLACED in reason:
            self._taken_over()
            return
        if limit := status.lifetime.reason(now()):  # it was over while the agents were out of reach
            self._ended_elsewhere(f"ended {limit}")
            return
        # without the head, where the controller runs, all ranks are out of reach
        ranks = self._resources.agents.ranks_of(index) if index else list(range(status.world_size))
        status.move(PoolEvent.DEGRADE if index else PoolEvent.LOSE)
        if index:
            self._resources.lose_node(index)
        replaced = self._replacement.begin(index)
        if index or replaced:
            what = (
                f"{rank_words(ranks)} and {agreeing(len(ranks), 'its', 'their')} variables are lost"
            )
            then = without(ranks, status.world_size, replaced=replaced)
            status.note(f"{reason}: {what}; {then}")
        self._dispatch.ranks_lost(ranks, reason)  # the next run says it where none is under way

    def _taken_over(self) -> None:
        """Another notebook has attached (``--take-over``): nothing has died, and nothing of the pool is this notebook's any more.

        Each node's link tells of it: the first one counts.
        """
        status = self._status
        with self._taking:
            if status.taken_over:
                return
            status.taken_over = True
        record = next((one for one in records.every() if one.job_id == status.job_id), None)
        # where another machine's notebook has taken it, the record here still names this one
        known = record is not None and record.process != identity()
        who = records.holder(record) if record is not None and known else "another notebook"
        text = f"pool {status.name!r} was taken over by {who}, and runs on there"
        status.remedy = f"%sky_attach {status.name} --take-over takes it back"
        logger.info("pool=%s job=%s was taken over", status.name, status.job_id)
        self._dispatch.close(f"{text}: {status.remedy}")
        self._dispatch.end(text)
        # on a thread of its own, for closing waits for this one
        threading.Thread(target=self._leave_taken, name="skymagic-leave", daemon=True).start()

    def _leave_taken(self) -> None:
        try:
            self._leave()
        except Exception:
            logger.warning(
                "pool=%s: not all connections were closed", self._status.name, exc_info=True
            )

    def _ended_elsewhere(self, reason: str) -> None:
        """The agents end everything: runs that wait are told at once, and what is held here is released.

        Args:
            reason: as of `wire.PoolEnded`. Each node tells its own; the first one counts.
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
        # on a thread of its own, for closing waits for this one
        threading.Thread(
            target=self._close_ended, args=(ended,), name="skymagic-close", daemon=True
        ).start()

    def _close_ended(self, ended: str) -> None:
        try:
            self._close()
        except Exception as problem:
            self._dispatch.end(f"{ended} ({problem})")
