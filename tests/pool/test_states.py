"""A pool's life: every move is in the table or refused in words, and stop is legal everywhere, twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import PoolStateError
from skymagic.pool.states import MOVES, Event, State, allowed, move


def follow(*events: Event) -> State:
    state = State.NEW
    for event in events:
        state = move(state, event)
    return state


def test_a_pool_that_works() -> None:
    assert follow(Event.START) is State.STARTING
    assert follow(Event.START, Event.STARTED) is State.READY
    assert follow(Event.START, Event.STARTED, Event.RUN) is State.RUNNING
    assert follow(Event.START, Event.STARTED, Event.RUN, Event.DONE) is State.READY
    assert follow(Event.START, Event.STARTED, Event.STOP, Event.STOPPED) is State.STOPPED


@pytest.mark.parametrize("before", [State.READY, State.RUNNING, State.DEGRADED, State.LOST, State.RECOVERING])
def test_ranks_are_mended_from_everywhere(before: State) -> None:
    assert move(before, Event.RECOVER) is State.RECOVERING
    assert move(State.RECOVERING, Event.RECOVERED) is State.READY


@pytest.mark.parametrize("state", State)
def test_stop_is_legal_everywhere_twice(state: State) -> None:
    once = move(state, Event.STOP)
    assert once in (State.STOPPING, State.STOPPED)
    assert move(once, Event.STOP) is once
    assert move(once, Event.STOPPED) is State.STOPPED


@pytest.mark.parametrize("event", [Event.DONE, Event.RECOVERED, Event.DEGRADE, Event.LOSE, Event.STOPPED])
@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED])
def test_late_reports_do_not_bring_a_pool_back(state: State, event: Event) -> None:
    after = move(state, event)
    assert after is (State.STOPPED if event is Event.STOPPED else state)


def test_a_run_that_ends_while_ranks_are_mended_does_not_make_them_ready() -> None:
    assert move(State.RECOVERING, Event.DONE) is State.RECOVERING
    assert move(State.LOST, Event.DONE) is State.LOST
    assert move(State.DEGRADED, Event.DONE) is State.DEGRADED


def test_what_is_left_of_a_pool_runs_cells() -> None:
    assert move(State.DEGRADED, Event.RUN) is State.RUNNING


@pytest.mark.parametrize(
    ("state", "event", "words"),
    [
        (State.NEW, Event.RUN, ["cannot run a cell", "'lab' is new", "start it"]),
        (State.STARTING, Event.RUN, ["is starting", "wait until that is over", "%sky_down"]),
        (State.RUNNING, Event.RUN, ["is running", "wait until that is over", "%sky_restart"]),
        (State.RECOVERING, Event.RUN, ["is recovering", "wait until that is over"]),
        (State.LOST, Event.RUN, ["is lost", "%sky_restart", "%sky_down"]),
        (State.STOPPING, Event.RUN, ["is stopping", "make a new one (%sky_pool)"]),
        (State.STOPPED, Event.RUN, ["is stopped", "make a new one (%sky_pool)"]),
        (State.STOPPED, Event.RECOVER, ["is stopped", "make a new one (%sky_pool)"]),
        (State.STOPPING, Event.STARTED, ["is stopping"]),
    ],
)
def test_a_refusal_says_what_is_allowed(state: State, event: Event, words: list[str]) -> None:
    with pytest.raises(PoolStateError) as refused:
        move(state, event, "lab")
    for word in words:
        assert word in str(refused.value)


def test_a_refusal_offers_only_what_the_table_grants() -> None:
    for state in State:
        for event in allowed(state):
            assert (state, event) in MOVES
        assert Event.STOP in allowed(state)


def test_every_state_has_a_sentence_and_a_way_in() -> None:
    assert all(state.sentence for state in State)
    assert set(MOVES.values()) == set(State) - {State.NEW}


@given(st.lists(st.sampled_from(Event)))
def test_any_sequence_is_refused_or_followed_and_can_always_be_stopped(events: list[Event]) -> None:
    state = State.NEW
    for event in events:
        try:
            after = move(state, event)
        except PoolStateError:
            continue
        assert state is not State.STOPPED or after is State.STOPPED, "what is stopped stays so"
        state = after
    assert move(move(state, Event.STOP), Event.STOPPED) is State.STOPPED
