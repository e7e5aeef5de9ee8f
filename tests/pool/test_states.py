"""A pool's life: every move is in the table or refused in words, and stop is legal everywhere, twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import PoolStateError
from skymagic.pool.status import MOVES, PoolEvent, State, allowed_events, state_after


def follow(*events: PoolEvent) -> State:
    state = State.NEW
    for event in events:
        state = state_after(state, event)
    return state


def test_a_pool_that_works() -> None:
    assert follow(PoolEvent.START) is State.STARTING
    assert follow(PoolEvent.START, PoolEvent.STARTED) is State.READY
    assert follow(PoolEvent.START, PoolEvent.STARTED, PoolEvent.RUN) is State.RUNNING
    assert follow(PoolEvent.START, PoolEvent.STARTED, PoolEvent.RUN, PoolEvent.DONE) is State.READY
    assert follow(PoolEvent.START, PoolEvent.STARTED, PoolEvent.STOP, PoolEvent.STOPPED) is State.STOPPED


@pytest.mark.parametrize("before", [State.READY, State.RUNNING, State.DEGRADED, State.LOST, State.RECOVERING])
def test_ranks_are_mended_from_everywhere(before: State) -> None:
    assert state_after(before, PoolEvent.RECOVER) is State.RECOVERING
    assert state_after(State.RECOVERING, PoolEvent.RECOVERED) is State.READY


@pytest.mark.parametrize("state", State)
def test_stop_is_legal_everywhere_twice(state: State) -> None:
    once = state_after(state, PoolEvent.STOP)
    assert once in (State.STOPPING, State.STOPPED)
    assert state_after(once, PoolEvent.STOP) is once
    assert state_after(once, PoolEvent.STOPPED) is State.STOPPED


@pytest.mark.parametrize(
    "event", [PoolEvent.DONE, PoolEvent.RECOVERED, PoolEvent.DEGRADE, PoolEvent.LOSE, PoolEvent.STOPPED]
)
@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED])
def test_late_reports_do_not_bring_a_pool_back(state: State, event: PoolEvent) -> None:
    after = state_after(state, event)
    assert after is (State.STOPPED if event is PoolEvent.STOPPED else state)


def test_a_run_that_ends_while_ranks_are_mended_does_not_make_them_ready() -> None:
    assert state_after(State.RECOVERING, PoolEvent.DONE) is State.RECOVERING
    assert state_after(State.LOST, PoolEvent.DONE) is State.LOST
    assert state_after(State.DEGRADED, PoolEvent.DONE) is State.DEGRADED


def test_what_is_left_of_a_pool_runs_cells() -> None:
    assert state_after(State.DEGRADED, PoolEvent.RUN) is State.RUNNING


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
def test_a_refusal_says_what_is_allowed(state: State, event: PoolEvent, words: list[str]) -> None:
    with pytest.raises(PoolStateError) as refused:
        state_after(state, event, "lab")
    for word in words:
        assert word in str(refused.value)


def test_a_refusal_offers_only_what_the_table_grants() -> None:
    for state in State:
        for event in allowed_events(state):
            assert (state, event) in MOVES
        assert PoolEvent.STOP in allowed_events(state)


def test_every_state_has_a_sentence_and_a_way_in() -> None:
    assert all(state.sentence for state in State)
    assert set(MOVES.values()) == set(State) - {State.NEW}


@given(st.lists(st.sampled_from(PoolEvent)))
def test_any_sequence_is_refused_or_followed_and_can_always_be_stopped(events: list[PoolEvent]) -> None:
    state = State.NEW
    for event in events:
        try:
            after = state_after(state, event)
        except PoolStateError:
            continue
        assert state is not State.STOPPED or after is State.STOPPED, "what is stopped stays so"
        state = after
    assert state_after(state_after(state, PoolEvent.STOP), PoolEvent.STOPPED) is State.STOPPED
