"""Values that come one by one: of generator functions, and of calls side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import CaptureError, RunInterrupted, RunTimeout
from skymagic.jobs.workers import Results
from tests.lab.golden import Golden
from tests.lab.waiting import press_in, until


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(nodes=2) as made:
        yield made


@sky.function
def countdown(n: int) -> Iterator[int]:
    while n:
        yield n
        n -= 1


@sky.function
def stepwise(folder: str, steps: int = 3) -> Iterator[int]:
    """Leaves a file for each step that it begins, and one at its end."""
    try:
        for step in range(steps):
            Path(folder, f"step{step}").touch()
            yield step
    finally:
        Path(folder, "over").touch()


@sky.function
def wait_for(folder: str, name: str, value: int) -> int:
    import time

    while not Path(folder, name).exists():
        time.sleep(0.01)  # another process makes the file: no event
    return value


@sky.function
def fail() -> int:
    raise ValueError("planted")


# ------------------------------------------------------------------------------------- generator functions


def test_values_arrive_in_order_for_any_number_of_calls(pool: Any) -> None:
    values = countdown(5000) >> pool
    assert next(values) == 5000
    assert list(values) == list(range(4999, 0, -1))
    assert list(values) == []
    assert list(countdown(0) >> pool) == []


def test_arguments_of_any_name(pool: Any) -> None:
    @sky.function
    def named(key: int, function: str, self: int) -> Iterator[Any]:
        yield from (key, function, self)

    assert list(named(key=1, function="two", self=3) >> pool) == [1, "two", 3]


def test_value_arrives_before_the_next_is_computed(pool: Any, tmp_path: Path) -> None:
    values = stepwise(str(tmp_path)) >> pool
    assert not list(tmp_path.iterdir())
    assert next(values) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"step0"}


def test_a_slow_value_does_not_hold_back_those_before_it(pool: Any, tmp_path: Path) -> None:
    """The eighth value is computed only after the notebook has shown the seventh."""

    @sky.function
    def hesitant(folder: str) -> Iterator[int]:
        import time

        for n in range(9):
            if n == 4:
                time.sleep(0.1)  # a value that is late: the reader waits for it
            if n == 7:
                wait_for.local(folder, "seen6", 0)
            yield n

    seen = []
    for n in hesitant(str(tmp_path)) >> pool:
        seen.append(n)
        (tmp_path / f"seen{n}").touch()
    assert seen == list(range(9))


def test_streamed_lists_by_rank_arrive_in_step(pool: Any) -> None:
    @sky.function
    def shares() -> Iterator[tuple[int, int]]:
        info = sky.instance_info()
        for step in range(2 + info.rank):
            yield info.rank, step

    assert list(shares() @ pool) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [None, (1, 2)]]


def test_leaving_the_loop_ends_the_generator(pool: Any, tmp_path: Path) -> None:
    for _ in stepwise(str(tmp_path)) >> pool:
        break
    assert {path.name for path in tmp_path.iterdir()} == {"step0", "over"}
    values = stepwise(str(tmp_path / "none")) @ pool
    values.close()
    values.close()
    assert list(values) == []


def test_values_before_an_error_are_not_lost(pool: Any) -> None:
    @sky.function
    def breaks() -> Iterator[int]:
        yield from range(20)
        raise KeyError("planted")

    values, seen = breaks() >> pool, list[int]()
    with pytest.raises(KeyError, match="planted") as caught:
        deque(map(seen.append, values))
    assert seen == list(range(20))
    assert caught.value.rank in (0, 1)  # type: ignore[attr-defined]
    assert list(values) == []


def test_ranks_are_free_between_values(pool: Any) -> None:
    values = countdown(3) @ pool
    assert next(values) == [3, 3]
    assert wait_for("/", "tmp", 5) @ pool == [5, 5]
    assert list(values) == [[2, 2], [1, 1]]


def test_arguments_are_checked_at_once_and_named(golden: Golden, pool: Any) -> None:
    with pytest.raises(CaptureError, match="argument n "):
        countdown(threading.Lock()) >> pool
    with golden.raises(TypeError):
        sky.gather(countdown(1), countdown(2)) >> pool


def test_a_timeout_counts_for_each_value(pool: Any, tmp_path: Path) -> None:
    @sky.function
    def hangs() -> Iterator[int]:
        import time

        yield 1
        time.sleep(600)  # until it is stopped

    values = hangs().with_timeout(0.5) >> pool
    assert next(values) == 1
    with pytest.raises(RunTimeout):
        next(values)
    assert list(values) == []


def test_on_a_rank_it_is_a_plain_generator(pool: Any) -> None:
    @sky.function
    def total(n: int) -> int:
        return sum(countdown(n))

    assert total(3) >> pool == 6


# -------------------------------------------------------------------------------------------------- gather


def test_values_arrive_as_calls_end(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    values = (
        sky.gather(wait_for(folder, "a", 1), wait_for(folder, "b", 2), stream=True, ordered=False)
        >> pool
    )
    (tmp_path / "b").touch()
    assert next(values) == 2
    (tmp_path / "a").touch()
    assert list(values) == [1]


def test_values_arrive_in_call_order_when_ready(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    values = (
        sky.gather(
            wait_for(folder, "a", 1),
            wait_for(folder, "b", 2),
            wait_for(folder, "a", 3),
            stream=True,
        )
        >> pool
    )
    (tmp_path / "a").touch()
    assert next(values) == 1
    (tmp_path / "b").touch()
    assert list(values) == [2, 3]
    assert list(sky.gather(stream=True) >> pool) == []


def test_the_first_failure_ends_a_stream(pool: Any, tmp_path: Path) -> None:
    values = sky.gather(wait_for(str(tmp_path), "never", 1), fail(), stream=True) >> pool
    with pytest.raises(ValueError, match="planted"):
        next(values)
    assert list(values) == []


def test_a_stream_that_is_left_stops_its_calls(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for value in (
        sky.gather(
            wait_for(str(tmp_path), "a", 1), wait_for(str(tmp_path), "never", 2), stream=True
        )
        >> pool
    ):
        assert value == 1
        break
    assert wait_for(str(tmp_path), "a", 3) @ pool == [3, 3]


def test_an_interrupt_stops_all_calls_of_a_stream(pool: Any, tmp_path: Path) -> None:
    @sky.function
    def hang(folder: str, n: int) -> None:
        import time

        Path(folder, str(n)).touch()
        time.sleep(600)  # until it is stopped

    def press() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        press_in(Results._wait)

    thread = threading.Thread(target=press)
    values = sky.gather(*(hang(str(tmp_path), n) for n in range(3)), stream=True) >> pool
    thread.start()
    with pytest.raises(RunInterrupted):
        next(values)
    thread.join()
    assert list(countdown(1) @ pool) == [[1, 1]]


def test_on_all_ranks_calls_follow_each_other(pool: Any) -> None:
    assert list(
        sky.gather(wait_for("/", "tmp", 1), wait_for("/", "tmp", 2), stream=True) @ pool
    ) == [[1, 1], [2, 2]]


# -------------------------------------------------------------------------------------- ranks that go, last of all


def test_restarted_rank_has_no_generator(golden: Golden, pool: Any) -> None:
    values = countdown(3) @ pool
    assert next(values) == [3, 3]
    pool.pool.restart()
    with golden.raises(LookupError):
        list(values)
    left = countdown(3) @ pool
    pool.stop()
    left.close()  # the pool is gone: nothing to end
