"""The life of a pool: its states, a sentence for each, and a table of moves; what is not in the table is refused."""

from __future__ import annotations

from enum import Enum

from skymagic.errors import PoolStateError


class State(Enum):
    """Where a pool is in its life; the value is the word that users see."""

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
    RECOVERING = "recovering", "ranks are being started again, or their process group is being built again"
    DEGRADED = "degraded", "some ranks are gone and did not come back"
    LOST = "lost", "the agent of its first machine is gone or out of reach, and with it all ranks"
    STOPPING = "stopping", "ranks are being ended and machines released"
    STOPPED = "stopped", "nothing of it is left running"


class Event(Enum):
    """What may happen to a pool; the value is how a refusal names it to the user."""

    DECLARE = "declare it (--lazy)"
    START = "start it"
    STARTED = "take up its ranks"
    RUN = "run a cell"
    DONE = "end a cell"
    RECOVER = "restart its ranks (%sky_restart)"
    RECOVERED = "take back its ranks"
    DEGRADE = "go on without some ranks"
    LOSE = "lose the connection"
    STOP = "stop it (%sky_down)"
    STOPPED = "be gone"


_ALIVE = (State.STARTING, State.READY, State.RUNNING, State.RECOVERING, State.DEGRADED, State.LOST)
_ENDING = (State.STOPPING, State.STOPPED)
_STARTING = (State.STARTING, State.RECOVERING)

# What users may ask for.
_USER_MOVES: dict[tuple[State, Event], State] = {
    (State.NEW, Event.DECLARE): State.DECLARED,
    (State.NEW, Event.START): State.STARTING,
    (State.READY, Event.RUN): State.RUNNING,
    (State.DEGRADED, Event.RUN): State.RUNNING,
    **{(state, Event.RECOVER): State.RECOVERING for state in _ALIVE if state is not State.STARTING},
    **{(state, Event.STOP): State.STOPPED for state in (State.NEW, State.DECLARED)},
    **{(state, Event.STOP): State.STOPPING for state in (*_ALIVE, State.STOPPING)},
    (State.STOPPED, Event.STOP): State.STOPPED,
}
# What is reported from below; it may come late, so a report that no longer matters changes nothing.
_REPORTED_MOVES: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.STARTED): State.READY,
    (State.RUNNING, Event.DONE): State.READY,
    **{(state, Event.DONE): state for state in (*_ALIVE, *_ENDING) if state is not State.RUNNING},
    (State.RECOVERING, Event.RECOVERED): State.READY,
    **{(state, Event.RECOVERED): state for state in (*_ALIVE, *_ENDING) if state not in _STARTING},
    **{(state, Event.DEGRADE): State.DEGRADED for state in _ALIVE if state is not State.LOST},
    **{(state, Event.DEGRADE): state for state in (State.LOST, *_ENDING)},
    **{(state, Event.LOSE): State.LOST for state in _ALIVE},
    **{(state, Event.LOSE): state for state in _ENDING},
    **{(state, Event.STOPPED): State.STOPPED for state in (State.NEW, *_ALIVE, *_ENDING)},
}
MOVES: dict[tuple[State, Event], State] = {**_USER_MOVES, **_REPORTED_MOVES}


def allowed(state: State) -> tuple[Event, ...]:
    """What a user may ask for in `state`."""
    return tuple(event for event in Event if (state, event) in _USER_MOVES)


def move(state: State, event: Event, name: str = "") -> State:
    """The state after `event`; stop is legal everywhere, twice.

    Args:
        state: where the pool is.
        event: what is asked for, or reported.
        name: the pool's name, for the message.

    Raises:
        PoolStateError: the move is not in the table; the message says what is allowed from here.
    """
    if (state, event) in MOVES:
        return MOVES[state, event]
    pool = f"pool {name!r}" if name else "the pool"
    choices = [choice.value for choice in allowed(state)]
    if state in _ENDING:
        choices = ["make a new one (%sky_pool)"]
    elif state in (*_STARTING, State.RUNNING):
        choices.insert(0, "wait until that is over")
    raise PoolStateError(
        f"cannot {event.value}: {pool} is {state.value} ({state.sentence}); from here you can {' or '.join(choices)}"
    )
