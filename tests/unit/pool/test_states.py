"""A pool's life: every move is in the table or refused in words, and stop is legal everywhere, twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import PoolStateError
from skymagic.pool.status import MOVES, PoolEvent, State, allowed_events, state_after


@pytest.mark.parametrize(
    ("moves", "after"),
    [
        ("NEW START STARTED", State.READY),
        ("NEW START STARTED RUN", State.RUNNING),
        ("NEW START STARTED RUN DONE", State.READY),
        ("NEW START STARTED STOP STOPPED", State.STOPPED),
        *[
            (f"{before} RECOVER", State.RECOVERING)
            for before in ("READY", "RUNNING", "DEGRADED", "LOST", "RECOVERING")
        ],
        ("RECOVERING RECOVERED", State.READY),
        # a run that ends while ranks are replaced does not make them ready
        *[(f"{before} DONE", State[before]) for before in ("RECOVERING", "LOST", "DEGRADED")],
        ("DEGRADED RUN", State.RUNNING),
        # late reports do not bring a pool back
        *[
            (f"{before} {event}", State[before])
            for before in ("STOPPING", "STOPPED")
            for event in ("DONE", "RECOVERED", "DEGRADE", "LOSE")
        ],
    ],
)
def test_where_moves_lead(moves: str, after: State) -> None:
    first, *events = moves.split()
    state = State[first]
    for event in events:
        state = state_after(state, PoolEvent[event])
    assert state is after


@pytest.mark.parametrize("state", State)
def test_stop_is_legal_everywhere_twice(state: State) -> None:
    once = state_after(state, PoolEvent.STOP)
    assert once in (State.STOPPING, State.STOPPED)
    assert state_after(once, PoolEvent.STOP) is once
    assert state_after(once, PoolEvent.STOPPED) is State.STOPPED


@pytest.mark.parametrize(
    ("state", "event", "words"),
    [
        (State.NEW, PoolEvent.RUN, ["cannot run a cell", "'lab' is new", "start it"]),
        (State.STARTING, PoolEvent.RUN, ["is starting", "wait until that is over", "%sky_down"]),
        (State.RUNNING, PoolEvent.RUN, ["is running", "wait until that is over", "%sky_restart"]),
        (State.RECOVERING, PoolEvent.RUN, ["is recovering", "wait until that is over"]),
        (State.LOST, PoolEvent.RUN, ["is lost", "%sky_restart", "%sky_down"]),
        (State.STOPPING, PoolEvent.RUN, ["is stopping", "make a new one (%sky_pool)"]),
        (State.STOPPED, PoolEvent.RUN, ["is stopped", "make a new one (%sky_pool)"]),
        (State.STOPPED, PoolEvent.RECOVER, ["is stopped", "make a new one (%sky_pool)"]),
        (State.STOPPING, PoolEvent.STARTED, ["is stopping"]),
    ],
)
def test_refusal_lists_allowed_actions(state: State, event: PoolEvent, words: list[str]) -> None:
    with pytest.raises(PoolStateError) as refused:
        state_after(state, event, "lab")
    for word in words:
        assert word in str(refused.value)


def test_allowed_events_are_in_the_table() -> None:
    for state in State:
        for event in allowed_events(state):
            assert (state, event) in MOVES
        assert PoolEvent.STOP in allowed_events(state)


def test_every_state_has_a_sentence_and_a_way_in() -> None:
    assert all(state.sentence for state in State)
    assert set(MOVES.values()) == set(State) - {State.NEW}


@given(st.lists(st.sampled_from(PoolEvent)))
def test_any_event_sequence_is_valid_or_refused_and_can_stop(
    events: list[PoolEvent],
) -> None:
    state = State.NEW
    for event in events:
        try:
            after = state_after(state, event)
        except PoolStateError:
            continue
        assert state is not State.STOPPED or after is State.STOPPED, "what is stopped stays so"
        state = after
    assert state_after(state_after(state, PoolEvent.STOP), PoolEvent.STOPPED) is State.STOPPED
