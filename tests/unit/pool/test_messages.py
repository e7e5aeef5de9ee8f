"""What a pool says of its ranks, in sentences that hold for one rank as for several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skymagic.pool.messages import suggest_without_ranks, suggestions_without_ranks, variables_then
from skymagic.run.results import KILLED, RankFailure, heading, other_failure_lines
from tests.lab.golden import Golden


@pytest.mark.parametrize(
    ("lost", "world_size", "told"),
    [
        ((1,), 2, "rank 0 keeps its variables (-t 0 runs cells there, "),
        ((1,), 3, "ranks 0, 2 keep their variables (-t 0,2 runs cells there, "),
        ((0, 1), 5, "ranks 2–4 keep their variables (-t 2,3,4 runs cells there, "),
        ((0, 1), 2, "%sky_restart tries to reach them again"),
    ],
)
def test_suggestion_without_some_ranks(lost: tuple[int, ...], world_size: int, told: str) -> None:
    assert suggest_without_ranks(lost, world_size).startswith(told)


def test_each_way_without_some_ranks_is_a_sentence(golden: Golden) -> None:
    keep, again = suggestions_without_ranks((1,), 2)
    assert suggest_without_ranks((1,), 2) == f"{keep}; {again}"
    assert suggestions_without_ranks((0, 1), 2) == [again]
    golden(suggestions_without_ranks((1,), 2, replaced=True))


def test_resize_reports_the_fate_of_variables(golden: Golden) -> None:
    golden(variables_then(1, 2, []))
    golden(variables_then(4, 2, []))


def failed(rank: int, *, freed: bool = False, ename: str = "KeyboardInterrupt") -> RankFailure:
    return RankFailure(rank, "here", ename, "", freed=freed)


def summary(cause: RankFailure, failures: Sequence[RankFailure], world: int) -> str:
    return "\n".join([heading(cause, failures, world), *other_failure_lines(cause, failures)])


def test_ranks_that_were_only_stopped_have_not_failed_alike(golden: Golden) -> None:
    cause = failed(0)
    golden(summary(cause, [cause, *(failed(rank, freed=True) for rank in (1, 2, 3))], 4))
    alike = [failed(rank, ename="ValueError") for rank in range(4)]
    golden(summary(alike[0], alike, 4))


def test_why_ranks_were_stopped(golden: Golden) -> None:
    others = [failed(0, freed=True), failed(2, freed=True)]
    died = RankFailure(1, "here", "", "", died="SIGKILL", status=-9)
    lost = RankFailure(1, "here", "", "", died="here does not answer")
    killed = RankFailure(2, "here", KILLED, "", freed=True)
    golden(summary(failed(1), [*others, failed(1)], 3))
    golden(summary(died, [*others, died], 3))
    golden(summary(lost, [*others, lost], 3))
    golden(summary(failed(1), [others[0], failed(1), killed], 3))


def test_a_colour_is_not_cut_in_half() -> None:
    cause = failed(0, ename="ValueError")
    other = RankFailure(1, "here", "OSError", "\x1b[31m" + 60 * "\x1b[1mx\x1b[0m" + "\x1b[0m")
    assert (
        summary(cause, [cause, other], 2) == "[rank 0 of 2 on here]\nrank 1: OSError: " + 60 * "x"
    )
