"""Which ranks count as hanging while a process group is formed: those that could go on and do not, while others wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from skymagic.run.stall import HANG_DEADLINE, SignsOfLife
from skymagic.wire.queries import Joining, ThreadUsage

WAITS = Joining(waits=True, in_cell=False)
WORKS = Joining(waits=False, in_cell=False)
IN_CELL = Joining(waits=False, in_cell=True)
ASLEEP = (ThreadUsage("S", 1.0), ThreadUsage("S", 1.0))
"""What an agent says at the first look and at a later one: state of the main thread, processor time."""


def hanging(
    usage: tuple[Any, Any], joining: Any, *, others: Any = WAITS, seconds: float = HANG_DEADLINE
) -> list[int]:
    """The ranks that hang, when rank 1 is seen like this twice, and rank 0 is like the others."""
    signs, said = SignsOfLife(), {0: others, 1: joining}
    looks = zip((0.0, seconds), usage, strict=True)
    return [signs.hanging(at, {0: ThreadUsage("S", 1.0), 1: seen}, said) for at, seen in looks][-1]


@pytest.mark.parametrize("joining", [WORKS, None], ids=["answers", "is too broken to answer"])
def test_rank_asleep_outside_a_wait_hangs(joining: Any) -> None:
    assert hanging(ASLEEP, joining) == [1]


def test_hang_is_detected_in_a_function_that_a_cell_replaced() -> None:
    assert hanging((ThreadUsage("R", 1.0), ThreadUsage("R", 6.0)), IN_CELL) == [1]


@pytest.mark.parametrize(
    ("usage", "joining"),
    [
        (ASLEEP, WAITS),
        ((ThreadUsage("R", 1.0), ThreadUsage("R", 1.0)), WORKS),
        ((ThreadUsage("D", 1.0), ThreadUsage("D", 1.0)), WORKS),
        ((ThreadUsage("S", 1.0), ThreadUsage("S", 1.2)), WORKS),
        ((None, None), None),
    ],
    ids=["waits", "has no turn", "waits for a disk", "is at work now and then", "nobody can tell"],
)
def test_a_slow_rank_does_not(usage: tuple[Any, Any], joining: Any) -> None:
    assert hanging(usage, joining) == []


def test_rank_with_time_left_or_unawaited_does_not_hang() -> None:
    assert hanging(ASLEEP, WORKS, seconds=HANG_DEADLINE - 0.1) == []
    assert hanging(ASLEEP, WORKS, others=WORKS) == []
