"""Life cycle of a pool: its states, the table of transitions, and the status shared by its parts.

A transition that is not in the table is refused; the refusal lists what is allowed.
"""

from __future__ import annotations

import getpass
import logging
import secrets
import socket
import time
from enum import Enum

from skymagic import plugins
from skymagic.errors import PoolError, PoolStateError
from skymagic.plan.limits import Lifetime
from skymagic.plan.plans import Plan
from skymagic.plan.requests import Defaults
from skymagic.plugins import table

logger = logging.getLogger(__name__)


class State(Enum):
    """State of a pool; the value is the word that users see."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> State:
        member = object.__new__(cls)
        member._value_ = word
        member.sentence = sentence
        return member

    NEW = "new", "nothing has been started yet"
    DECLARED = "declared", "its machines come with its next cell"
    STARTING = "starting", "machines and ranks are coming up"
    READY = "ready", "every rank waits for a cell"
    RUNNING = "running", "a cell runs on the ranks"
    RECOVERING = (
        "recovering",
        "ranks are being started again, or their process group is being built again",
    )
    DEGRADED = "degraded", "some ranks are gone and did not come back"
    LOST = (
        "lost",
        "the agents of all its machines are gone or out of reach, and with them all ranks",
    )
    STOPPING = "stopping", "ranks are being ended and machines released"
    STOPPED = "stopped", "nothing of it is left running"


class PoolEvent(Enum):
    """Event in a pool's life; the value names it in a refusal."""

    DECLARE = "declare it (--lazy)"
    START = "start it"
    STARTED = "take up its ranks"
    RUN = "run a cell"
    DONE = "end a cell"
    RECOVER = "restart its ranks (%sky_restart)"
    RECOVERED = "take back its ranks"
    DEGRADE = "continue without some ranks"
    LOSE = "lose the connection"
    STOP = "stop it (%sky_down)"
    STOPPED = "be gone"


# LOST counts as alive: the agents end by their own limits, and until then machines cost money.
_ALIVE = (State.STARTING, State.READY, State.RUNNING, State.RECOVERING, State.DEGRADED, State.LOST)
_ENDING = (State.STOPPING, State.STOPPED)
_STARTING = (State.STARTING, State.RECOVERING)

# Transitions that users may request.
_USER_MOVES: dict[tuple[State, PoolEvent], State] = {
    (State.NEW, PoolEvent.DECLARE): State.DECLARED,
    (State.NEW, PoolEvent.START): State.STARTING,
    (State.READY, PoolEvent.RUN): State.RUNNING,
    (State.DEGRADED, PoolEvent.RUN): State.RUNNING,
    # %sky_restart is legal during a run, which it stops, and during another recovery, which it
    # follows; ranks that are still starting are not there to be restarted
    **{
        (state, PoolEvent.RECOVER): State.RECOVERING
        for state in _ALIVE
        if state is not State.STARTING
    },
    **{(state, PoolEvent.STOP): State.STOPPED for state in (State.NEW, State.DECLARED)},
    **{(state, PoolEvent.STOP): State.STOPPING for state in (*_ALIVE, State.STOPPING)},
    (State.STOPPED, PoolEvent.STOP): State.STOPPED,
}
# Transitions reported by agents and runs. Reports may arrive late, so one that no longer matters
# changes nothing.
_REPORTED_MOVES: dict[tuple[State, PoolEvent], State] = {
    (State.STARTING, PoolEvent.STARTED): State.READY,
    (State.RUNNING, PoolEvent.DONE): State.READY,
    # a run that ends after its pool was stopped or lost, or while ranks recover
    **{
        (state, PoolEvent.DONE): state
        for state in (*_ALIVE, *_ENDING)
        if state is not State.RUNNING
    },
    (State.RECOVERING, PoolEvent.RECOVERED): State.READY,
    # The end of a recovery that something else has overtaken: a loss or a stop keeps its state.
    **{
        (state, PoolEvent.RECOVERED): state
        for state in (*_ALIVE, *_ENDING)
        if state not in _STARTING
    },
    **{(state, PoolEvent.DEGRADE): State.DEGRADED for state in _ALIVE if state is not State.LOST},
    # worse states remain: without its head, a pool cannot continue with the other ranks
    **{(state, PoolEvent.DEGRADE): state for state in (State.LOST, *_ENDING)},
    **{(state, PoolEvent.LOSE): State.LOST for state in _ALIVE},
    **{(state, PoolEvent.LOSE): state for state in _ENDING},
    **{(state, PoolEvent.STOPPED): State.STOPPED for state in (State.NEW, *_ALIVE, *_ENDING)},
}
MOVES: dict[tuple[State, PoolEvent], State] = {**_USER_MOVES, **_REPORTED_MOVES}


def allowed_events(state: State) -> tuple[PoolEvent, ...]:
    """Return what a user may request in `state`."""
    return tuple(event for event in PoolEvent if (state, event) in _USER_MOVES)


def state_after(state: State, event: PoolEvent, name: str = "") -> State:
    """Return the state after `event`. STOP is legal in every state, also twice.

    Raises:
        PoolStateError: the transition is not in the table; the message lists what is allowed.
    """
    if (state, event) in MOVES:
        return MOVES[state, event]
    pool = f"pool {name!r}" if name else "the pool"
    # what agents and runs report is not a choice of the user's
    choices = [choice.value for choice in allowed_events(state)]
    if state in _ENDING:
        choices = ["make a new one (%sky_pool)"]
    elif state in (*_STARTING, State.RUNNING):
        choices.insert(0, "wait until that is over")
    raise PoolStateError(
        f"cannot {event.value}: {pool} is {state.value} ({state.sentence}); from here you can "
        f"{' or '.join(choices)}",
        code="pool-move",
    )


def now() -> float:
    """Return seconds on a monotonic clock that keeps running while the machine sleeps.

    `time.monotonic` stops during sleep on Linux.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SharedStatus:
    """State that all parts of a pool share; `Pool` itself is a subclass that adds the parts."""

    def __init__(self, name: str, plan: Plan, defaults: Defaults, job_id: str = "") -> None:
        self.name = name
        self.plan = plan  # replaced when the pool is resized
        self.defaults = defaults
        """Limits of its runs.

        The magics set them before each cell, so that %config takes effect at once.
        """
        self.job_id = job_id or f"{name}-{secrets.token_hex(4)}"
        self.client = f"{getpass.getuser()}@{socket.gethostname()}"  # who started it, and where
        self.plugins = plugins.resolve(plan.request.plugins)
        for plugin in self.plugins:
            # raises for a plugin that cannot be sent, before anything starts
            table.packed_plugin(plugin)
        self.state = State.NEW
        self.ended: str | None = None
        """Reason why the pool has ended by itself.

        Such a pool stays registered until it is stopped or recreated.
        """
        self.remedy = "recreate it with %sky_pool"
        """Remedy after the pool has ended by itself, or another notebook has taken it."""
        self.taken_over = False
        """True if another notebook has the pool now.

        The pool keeps running, and nothing of it belongs to this notebook.
        """
        self.closed: str | None = None
        """Error message for runs that were in progress when the pool was ended; None until then."""
        self.lifetime = Lifetime(plan.request.idle, plan.request.max_lifetime, now())
        """Time limits, which the agents track too; needed here while the agents are unreachable."""
        self.last_lines: dict[int, str] = {}
        """End of each rank's log.

        Empty before the end of the pool, and for nodes that could not report it.
        """
        self.unreached: tuple[str, ...] = ()  # machines that did not get the order to end
        self._notes: list[str] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.topology.world_size

    @property
    def inseparable(self) -> list[str]:
        """Plugins that need all ranks restarted if one has died or if the world size changes."""
        return [plugin.name for plugin in self.plugins if plugin.rejoin is None]

    def move(self, event: PoolEvent) -> None:
        """Move the pool to the state after an event.

        Raises PoolStateError if the event is not allowed.
        """
        before, self.state = self.state, state_after(self.state, event, self.name)
        if self.state is not before:
            logger.info(
                "pool is %s: pool=%s job=%s before=%s event=%s",
                self.state.value,
                self.name,
                self.job_id,
                before.value,
                event.name,
            )

    def check(self, event: PoolEvent) -> None:
        """Raise PoolStateError if this event is not allowed now."""
        # the same table as `move`, so that a check and the later move cannot disagree
        state_after(self.state, event, self.name)

    def check_ended(self) -> None:
        """Raise an error with the reason and the remedy if the pool has ended.

        Raises:
            PoolStateError: the pool has ended by itself.
            PoolError: this notebook has ended the pool.
        """
        # A pool that has ended by itself is closed too: the reason of its end comes first.
        if self.ended is not None:
            raise PoolStateError(
                f"{self.ended}: {self.remedy}", code="pool-ended", names=[self.name]
            )
        if self.closed is not None:
            raise PoolError(self.closed, code="pool-closed", names=[self.name])

    def missing(self) -> PoolStateError:
        """Build the error for a resource that a pool in this state does not have."""
        return PoolStateError(
            f"pool {self.name!r} is {self.state.value}: {self.state.sentence}",
            code="pool-not-ready",
            names=[self.name],
        )

    def note(self, text: str) -> None:
        """Show this to the user before the next run; repeated texts are shown once."""
        if text not in self._notes:
            self._notes.append(text)

    def take_notes(self) -> list[str]:
        """Return the notes that were not shown yet, and clear them."""
        # a new list, because agents' threads may add a note at this moment
        notes, self._notes = self._notes, []
        return notes
