"""How a run is, and how it has ended, as its line shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from skymagic.display.run_line import SEPARATOR, RunState, RunSummary
from skymagic.plan.units import agreeing, count, rank_words
from skymagic.run import slowness
from skymagic.run.report import RankRun, Report

EMPTY: Mapping[str, Sequence[int]] = MappingProxyType({})


def state_of(
    report: Report,
    waiting: Sequence[int],
    always_last: Sequence[int] = (),
    deserted: Mapping[str, Sequence[int]] = EMPTY,
) -> RunState:
    """How a run is now; its seconds are for who knows when it was asked for.

    Args:
        waiting: ranks that wait for others in a collective.
        always_last: ranks for which the others wait again and again.
        deserted: ranks in a collective that ranks which have ended will not join, by its name.
    """
    ended = [number for number, rank in report.ranks.items() if rank.outcome is not None or rank.died is not None]
    failed = failed_ranks(report)
    metrics = report.metrics
    lagging = metrics.lagging(ended)
    last = [] if lagging else [rank for rank in always_last if rank not in ended]
    report.lagged = lag_words(lagging) or last_words(last, "was", "were") or report.lagged
    return RunState(
        ranks=len(report.ranks),
        seconds=0.0,
        done=len(ended) - len(failed),
        failed=failed,
        waiting=() if deserted else tuple(rank for rank in waiting if rank not in ended),
        progress=metrics.progress(),
        numbers=metrics.numbers(),
        lagging=SEPARATOR.join(
            filter(
                None,
                [
                    deserted_words(deserted, ended),
                    lag_words(lagging, "is", "are"),
                    last_words(last, "is", "are"),
                    *slowness.now(metrics.usage(), ended),
                ],
            )
        ),
    )


def end_of(report: Report, seconds: float, names: Sequence[str], gathered: tuple[int, float]) -> RunSummary:
    """How a run has ended.

    Args:
        seconds: since it was asked for.
        names: the notebook's variables that hold what came back.
        gathered: how many bytes came back, and in how many seconds.
    """
    return RunSummary(
        ranks=len(report.ranks),
        seconds=seconds,
        failed=() if report.interrupted or report.timed_out else failed_ranks(report),
        interrupted=report.interrupted,
        timed_out=report.timed_out,
        shipped=report.shipped,
        ship_seconds=report.ship_seconds,
        gathered=gathered[0],
        gather_seconds=gathered[1],
        names=tuple(names) if report.good else (),
        numbers=report.metrics.numbers(),
        lagged=SEPARATOR.join(filter(None, [report.lagged, *slowness.over(report.metrics.usage())])),
    )


def failed_ranks(report: Report) -> tuple[int, ...]:
    """Ranks whose own cell failed; those that were stopped because of it are not among them."""

    def by_itself(rank: RankRun) -> bool:
        outcome = rank.outcome or {}  # an interrupt may come to a rank whose own error is on its way
        ended_for = rank.died is not None or outcome.get("interrupted") or outcome.get("freed")
        return rank.failed and not (rank.stopped and ended_for)

    return tuple(number for number, rank in report.ranks.items() if by_itself(rank))


def deserted_words(deserted: Mapping[str, Sequence[int]], ended: Sequence[int]) -> str:
    """Ranks that wait for others which have ended, as a part of a line: "rank 0 waits in all_reduce, rank 1 has ended"; "" for none."""
    waiting = {name: [rank for rank in ranks if rank not in ended] for name, ranks in deserted.items()}
    words = [
        f"{rank_words(ranks)} {agreeing(len(ranks), 'waits', 'wait')} in {name}"
        for name, ranks in waiting.items()
        if ranks
    ]
    over = f"{rank_words(list(ended))} {agreeing(len(ended), 'has', 'have')} ended"
    return ", ".join([*words, over]) if words else ""


def last_words(ranks: Sequence[int], one: str, several: str) -> str:
    """Ranks for which the others wait again and again, as a part of a line; "" for none."""
    return f"{rank_words(list(ranks))} {agreeing(len(ranks), one, several)} last in every collective" if ranks else ""


def lag_words(behind: dict[int, int], one: str = "was", several: str = "were") -> str:
    """Ranks that are behind others, as a part of a line; "" for none."""
    if not behind:
        return ""
    verb = one if len(behind) == 1 else several
    return f"{rank_words(list(behind))} {verb} {count(max(behind.values()), 'step')} behind"
