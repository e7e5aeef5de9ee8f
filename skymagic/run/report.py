"""One run as values: what it asks of its ranks, its limits, how each rank ended, and what its line in the notebook shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.display.run_line import SEPARATOR, RunState, RunSummary
from skymagic.plan.requests import Defaults
from skymagic.plan.units import agreeing, count, rank_words
from skymagic.run.metrics import Metrics, reasons_now, reasons_over
from skymagic.wire import agent as wire

DEAD_OUTPUT_TIMEOUT = 1.0
"""Seconds to wait for the last text of a rank that has died."""
LOST_OUTPUT_TIMEOUT = 10.0
"""Seconds without news to wait for the last text of a rank whose cell is over; it comes at once, unless its agent is gone."""


@dataclass(frozen=True)
class RunSpec:
    """One run: the source, who executes it, what is shipped before it and gathered after it."""

    source: str
    """What the ranks execute."""
    source_without_magics: str
    """Source as plain Python, without IPython's syntax: what it needs of the notebook is found in it."""
    ranks: tuple[int, ...]
    visible_ranks: tuple[int, ...]
    """Ranks whose output is shown."""
    value_ranks: tuple[int, ...] = ()
    """Ranks that send back the value of the cell's last expression."""
    gather: tuple[str, ...] = ()
    """Variables that come back."""
    gather_ranks: tuple[int, ...] = ()
    """Ranks that send them."""
    profile: tuple[int, ...] = ()
    """Ranks that profile it, and send what they found."""
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    fresh: bool = False
    execution_count: int = 1
    compiler_flags: int = 0
    """Flags of ``__future__``, as the notebook's cells have set them."""
    waits: bool = True
    """Whether it waits for other runs on its ranks; else it is refused."""
    job: str = "cell"
    """What it is: a cell, a ``script``, or a ``call``."""
    output: str = ""
    """The variable that takes the values of the last expression."""
    head: bool = False
    """Whether the variables take the first rank's values alone."""
    beside: bool = False
    """The notebook does not wait for it, and the user has a handle."""
    taken: Callable[[], object] = field(default=lambda: None, compare=False)
    """Called once all that it needs of the notebook is in the store, or while it waits for other runs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values by name that only this run brings: arguments of a call. The ranks forget them afterwards."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts of a run, in seconds."""

    timeout: float | None = None
    grace: float = Defaults.grace
    """Grace period: from an interrupt to releasing collectives, and from that to SIGKILL."""
    stall_after: float = Defaults.stall_after
    """Without progress, until a stall is pointed out."""
    interrupt_grace: float = 1.0
    """From an interrupt because of another rank's failure, until the process groups of ranks that do not wait in native code
    are released too."""
    silent_may_leave: bool = False
    """Whether a rank whose control thread does not answer may be leaving its cell: on a busy machine it is only slow."""
    view_after: float = math.inf
    """Until a line says how the run is; infinite for none."""


@dataclass
class RankRun:
    """The state of one rank's part of a run."""

    outcome: Mapping[str, Any] | None = None
    ended: bool = False
    """Whether the rank's output is complete."""
    died: wire.RankExited | None = None
    died_at: float = 0.0
    stopped: bool = False
    """Whether it was interrupted or released because of another rank's failure, a timeout or the user."""
    killed: bool = False
    last_event_at: float = 0.0
    waited_at: Sequence[Mapping[str, Any]] = ()
    """Where it waited in native code and could not take an interrupt: the innermost frame of the user's own, and the innermost of all."""

    @property
    def over(self) -> bool:
        """Whether its cell has ended, well or not."""
        return self.outcome is not None or self.died is not None

    @property
    def settled(self) -> bool:
        """Nothing more is to come."""
        return self.ended and self.over

    @property
    def output_deadline(self) -> float | None:
        """When to give up waiting for its last output; None while its cell goes on, or when the output is complete."""
        if self.ended or not self.over:
            return None
        return (
            self.died_at + DEAD_OUTPUT_TIMEOUT
            if self.died
            else self.last_event_at + LOST_OUTPUT_TIMEOUT
        )

    @property
    def stopped_at(self) -> Sequence[Mapping[str, Any]]:
        """Where it was when it was interrupted, likewise; empty if nobody knows."""
        return self.waited_at or (self.outcome or {}).get("stopped_at") or ()

    @property
    def failed(self) -> bool:
        """Whether the rank died, or its cell did not end well."""
        return self.died is not None or (
            self.outcome is not None and self.outcome["status"] != "ok"
        )


@dataclass
class Report:
    """The report of a run: how each rank ended, and what was done to end it."""

    ranks: dict[int, RankRun]
    run: int = 0
    """The pool's number of the run; 0 for what is none."""
    interrupted: bool = False
    timed_out: bool = False
    left: bool = False
    """This process ends, and its ranks carry the run on for the notebook that attaches next."""
    closed: bool = False
    """The pool was ended by this notebook: nothing more comes, whatever its ranks were doing."""
    stacks: Mapping[int, Mapping[str, Any] | None] = field(default_factory=dict)
    """Stacks of the ranks that had not ended when the time was over or the user stopped them."""
    freed: bool = False
    """Connections of process groups were shut down: groups must be formed anew."""
    notes: list[str] = field(default_factory=list)
    """What could not be carried over, and the like."""
    metrics: Metrics = field(default_factory=Metrics)
    """What its ranks have reported."""
    shipped: int = 0
    """Bytes that it needed on its ranks and they had not."""
    ship_seconds: float = 0.0
    """How long it took to find and write them."""
    lagged: str = ""
    """Which rank was behind others, in words."""
    incomplete: bool = False
    """Output was left out of what the notebook shows."""

    @property
    def good(self) -> bool:
        """Every rank ended well."""
        return not (
            self.interrupted or self.timed_out or any(rank.failed for rank in self.ranks.values())
        )

    def unfinished(self) -> list[int]:
        """Ranks whose cell has not ended, as far as is known."""
        return [
            number
            for number, rank in self.ranks.items()
            if rank.outcome is None and rank.died is None
        ]

    @property
    def out_of_step(self) -> bool:
        """Whether ranks have begun different numbers of collectives on a group in a run that failed, or that was interrupted, which a cell
        may have caught: the next would never match."""
        if self.good and not any(
            (rank.outcome or {}).get("interrupted") for rank in self.ranks.values()
        ):
            return False
        begun: dict[str, set[int]] = {}
        for rank in self.ranks.values():
            for group, begun_count in ((rank.outcome or {}).get("collectives") or {}).items():
                begun.setdefault(group, set()).add(begun_count)
        return any(len(counts) > 1 for counts in begun.values())


def state_of(
    report: Report,
    waiting: Sequence[int],
    always_last: Sequence[int] = (),
    in_vain: str = "",
) -> RunState:
    """How a run is now; its seconds are for who knows when it was asked for.

    Args:
        waiting: ranks that wait for others in a collective.
        always_last: ranks for which the others wait again and again.
        in_vain: which ranks are in collectives that the others will not join, as a part of the line.
    """
    ended = [number for number, rank in report.ranks.items() if rank.over]
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
        waiting=() if in_vain else tuple(rank for rank in waiting if rank not in ended),
        progress=metrics.progress(),
        numbers=metrics.numbers(),
        importing=import_words(metrics.importing(ended), len(report.ranks)),
        lagging=SEPARATOR.join(
            filter(
                None,
                [
                    in_vain,
                    lag_words(lagging, "is", "are"),
                    last_words(last, "is", "are"),
                    *reasons_now(metrics.usage(), ended),
                ],
            )
        ),
    )


def end_of(
    report: Report, seconds: float, names: Sequence[str], gathered: tuple[int, float]
) -> RunSummary:
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
        progress=None if report.good else report.metrics.progress(),
        numbers=report.metrics.numbers(),
        lagged=SEPARATOR.join(filter(None, [report.lagged, *reasons_over(report.metrics.usage())])),
        cell=report.metrics.cell,
        incomplete=report.incomplete,
    )


def import_words(importing: Mapping[str, Sequence[int]], count_of_all: int) -> str:
    """Say what ranks import, as a part of a line: "importing torch on 4 ranks", "importing jax on rank 1"; "" for nothing."""
    parts = []
    for module, ranks in importing.items():
        every = len(ranks) == count_of_all
        where = (
            ""
            if count_of_all == 1
            else f" on {count(len(ranks), 'rank') if every else rank_words(list(ranks))}"
        )
        parts.append(f"{module}{where}")
    return f"importing {', '.join(parts)}" if parts else ""


def failed_ranks(report: Report) -> tuple[int, ...]:
    """Ranks whose own cell failed; those that were stopped because of it are not among them."""

    def by_itself(rank: RankRun) -> bool:
        outcome = (
            rank.outcome or {}
        )  # an interrupt may come to a rank whose own error is on its way
        ended_for = rank.died is not None or outcome.get("interrupted") or outcome.get("freed")
        return rank.failed and not (rank.stopped and ended_for)

    return tuple(number for number, rank in report.ranks.items() if by_itself(rank))


def last_words(ranks: Sequence[int], one: str, several: str) -> str:
    """Ranks for which the others wait again and again, as a part of a line; "" for none."""
    return (
        f"{rank_words(list(ranks))} {agreeing(len(ranks), one, several)} last in every collective"
        if ranks
        else ""
    )


def lag_words(behind: dict[int, int], one: str = "was", several: str = "were") -> str:
    """Ranks that are behind others, as a part of a line; "" for none."""
    if not behind:
        return ""
    verb = one if len(behind) == 1 else several
    return f"{rank_words(list(behind))} {verb} {count(max(behind.values()), 'step')} behind"
