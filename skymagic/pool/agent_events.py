"""What the agents report between and during runs: deaths of ranks, lost nodes, notes, and limits that are over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skymagic.cluster import Agents, Node
from skymagic.display.screen import print_note
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool import messages
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.messages import without
from skymagic.pool.recovery import Recovery
from skymagic.pool.replacement import Replacement
from skymagic.pool.resources import Resources
from skymagic.pool.states import Event, State
from skymagic.pool.status import Status, now
from skymagic.wire import agent as wire
from skymagic.wire.processes import describe


@dataclass(eq=False, repr=False)
class AgentEvents:
    """Passes each event on to the runs, to recovery, or to the user; its methods are called on the links' threads."""

    _status: Status
    _resources: Resources
    _dispatch: Dispatch
    _recovery: Recovery
    _replacement: Replacement
    _close: Callable[[], None]
    """Ends the pool."""

    def __post_init__(self) -> None:
        self._dispatch.on_late_death = self._died_between_runs

    def connect(self, nodes: Sequence[Node]) -> Agents:
        """Agents of these machines, whose events come here."""
        note = self._dispatch.note
        shown = self._dispatch.shown
        return Agents(
            nodes, self._rank_died, self.node_lost, note, self._limit_reached, self._problem, shown, self._told
        )

    def _problem(self, text: str) -> None:
        if not self._dispatch.note(text):
            self._status.note(text)

    def _told(self, message: wire.InterruptionNotice | wire.HookEnded | wire.WidgetUpdate) -> None:
        """A widget has changed; or a machine will be taken away, or a hook that was called for that has ended: shown at once."""
        if isinstance(message, wire.WidgetUpdate):
            self._resources.widgets.take(message.rank, message.comms)
            return
        text = messages.hook_ended(message) if isinstance(message, wire.HookEnded) else self._interruption(message)
        if not self._dispatch.note(text):
            print_note(f"[{text}]")

    def _interruption(self, message: wire.InterruptionNotice) -> str:
        name = self._resources.agents.nodes[message.node].name
        text = messages.interruption(message, name, time.time())
        if message.at is not None and self._replacement.wanted:
            text += "; then another machine is rented in its place (--replace)"
        return text

    def _rank_died(self, exited: wire.RankExited) -> None:
        if not self._dispatch.rank_died(exited):
            self._died_between_runs(exited)

    def _died_between_runs(self, exited: wire.RankExited) -> None:
        if self._status.state in (State.READY, State.RUNNING) and not exited.expected:
            host = self._resources.agents.ranks[exited.rank].hostname
            self._status.note(
                f"rank {exited.rank} on {host} had died ({describe(exited)}); it was started anew and lost its variables"
            )
            self._recovery.begin([exited.rank])

    def node_lost(self, index: int, reason: str) -> None:
        status = self._status
        if status.state in (State.STOPPING, State.STOPPED, State.STARTING, State.LOST):
            return
        if limit := status.lifetime.reason(now()):  # it was over while the agents were out of reach
            self._limit_reached(limit)
            return
        # without the head, where the controller runs, all ranks are out of reach
        ranks = self._resources.agents.ranks_of(index) if index else list(range(status.world_size))
        status.move(Event.DEGRADE if index else Event.LOSE)
        if index:
            self._resources.lose_node(index, ranks)
        replaced = self._replacement.begin(index)
        if index or replaced:
            what = f"{rank_words(ranks)} and {agreeing(len(ranks), 'its', 'their')} variables are lost"
            then = without(ranks, status.world_size, replaced=replaced)
            status.note(f"{reason}: {what}; {then}")
        self._dispatch.ranks_lost(ranks, reason)  # the next run says it where none is under way

    def _limit_reached(self, reason: str) -> None:
        """The agents end everything: runs that wait are told at once, and what is held here is released."""
        status = self._status
        if status.state in (State.STARTING, State.STOPPING, State.STOPPED):
            return
        ended = f"pool {status.name!r} ended {reason}"
        self._dispatch.end(ended)
        status.move(Event.STOP)
        self._dispatch.ranks_lost(range(status.world_size), ended, expected=True)
        # on a thread of its own, for closing waits for this one
        threading.Thread(target=self._close_ended, args=(ended,), name="skymagic-close", daemon=True).start()

    def _close_ended(self, ended: str) -> None:
        try:
            self._close()
        except Exception as problem:
            self._dispatch.end(f"{ended} ({problem})")
