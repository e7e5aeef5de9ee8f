"""Values of one run: its request to the ranks, its limits, the state of each rank, its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.display.run_line import SEPARATOR, RunState, RunSummary
from skymagic.plan.requests import Defaults
from skymagic.plan.units import count, rank_words, verb_form
from skymagic.run.metrics import Metrics, causes_over_run, current_causes
from skymagic.wire import agent as wire
from skymagic.wire.order import RunCell
from skymagic.wire.outcome import Failure, Outcome
from skymagic.wire.queries import Stack, StackFrame
from skymagic.wire.values import PackedValue

LOST_OUTPUT_TIMEOUT = 10.0
"""Seconds without news to wait for the last output of a rank whose cell is over.

Its agent always sends an end, and a lost agent is known: only one that hangs takes this long.
"""


@dataclass(frozen=True)
class RunSpec:
    """Specification of a run: the order to its ranks, the source, and the values to ship."""

    order: RunCell
    """Order to the ranks, without the number, the values and the limits that the pool adds."""
    source: str = ""
    """Source that the ranks execute; empty for a run that another notebook has sent."""
    source_without_magics: str = ""
    """Source as plain Python, without IPython's syntax.

    It shows which names the run needs from the notebook.
    """
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    fresh: bool = False
    waits: bool = True
    """Wait for other runs on the same ranks; otherwise the run is refused if there are any."""
    beside: bool = False
    """The run is in the background: the notebook does not wait, and the user has a handle."""
    taken: Callable[[], object] = field(default=lambda: None, compare=False)
    """Called once the store has everything that the run needs, or while it waits for other runs."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Values for this run only, by name, such as a call's arguments.

    The ranks forget them afterwards.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part."""
        return self.order.ranks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts of a run, in seconds."""

    timeout: float | None = None
    grace: float = Defaults.grace
    """Grace period: from an interrupt to releasing collectives, and from that to SIGKILL."""
    stall_after: float = Defaults.stall_after
    """Seconds without progress until a stall is reported."""
    interrupt_grace: float = 1.0
    """Seconds from an interrupt to the release of ranks that do not wait in native code.

    Counts for interrupts that follow another rank's failure.
    """
    silent_may_leave: bool = False
    """Treat a rank whose control thread does not answer as leaving its cell.

    On a busy machine it may only be slow.
    """
    view_after: float = math.inf
    """Seconds until a progress line is shown; infinite for never."""


@dataclass
class RankRun:
    """State of one rank in a run."""

    outcome: Outcome | None = None
    ended: bool = False
    """True if the rank's output is complete."""
    died: wire.RankExited | None = None
    stopped: bool = False
    """True if it was interrupted or released after another rank's failure, a timeout or a stop."""
    killed: bool = False
    last_event_at: float = 0.0
    waited_at: Sequence[StackFrame] = ()
    """Frames of a rank that waited in native code and could not handle an interrupt.

    The first one is the user's innermost frame, the second one the innermost of all.
    """

    @property
    def over(self) -> bool:
        """True if the rank's cell has ended, successfully or not."""
        return self.outcome is not None or self.died is not None

    @property
    def settled(self) -> bool:
        """True if nothing more will arrive from the rank."""
        return self.ended and self.over

    @property
    def output_deadline(self) -> float | None:
        """Deadline for the last output.

        None while the cell is running, and once the output is complete.
        """
        if self.ended or not self.over:
            return None
        return self.last_event_at + LOST_OUTPUT_TIMEOUT

    @property
    def stopped_at(self) -> Sequence[StackFrame]:
        """Frames of the rank at the interrupt, as in `waited_at`; empty if unknown."""
        return self.waited_at or (self.outcome.stopped_at if self.outcome is not None else ())

    @property
    def failed(self) -> bool:
        """True if the rank died, or its cell failed."""
        return self.died is not None or self.failure is not None

    @property
    def failure(self) -> Failure | None:
        """Error that ended the rank's cell; None also for a rank that died."""
        return self.outcome.failure if self.outcome is not None else None

    @property
    def interrupted(self) -> bool:
        """True if an interrupt reached the rank's cell, or ended it."""
        return self.outcome is not None and self.outcome.interrupted

    @property
    def profile(self) -> PackedValue | None:
        """Profile of the rank's cell."""
        return self.outcome.profile if self.outcome is not None else None

    @property
    def values(self) -> Mapping[str, PackedValue]:
        """Values that the rank has sent back, by name."""
        return self.outcome.values if self.outcome is not None else {}


@dataclass
class Report:
    """Report of a run: how each rank ended, and what was done to end it."""

    ranks: dict[int, RankRun]
    run: int = 0
    """Number of the run in the pool; 0 for an order that is not a run."""
    interrupted: bool = False
    timed_out: bool = False
    left_running: bool = False
    """This process ends, and the ranks continue the run for the notebook that attaches next."""
    closed: bool = False
    """This notebook has ended the pool: nothing more arrives, even from unfinished ranks."""
    stacks: Mapping[int, Stack | None] = field(default_factory=dict)
    """Stacks of the ranks that were still running at the timeout or when the user stopped them."""
    freed: bool = False
    """Connections of process groups were shut down, so the groups must be formed again."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, for example on values that could not be carried over."""
    metrics: Metrics = field(default_factory=Metrics)
    """Metrics that the ranks have reported."""
    shipped: int = 0
    """Bytes shipped to the ranks because they did not have them."""
    ship_seconds: float = 0.0
    """Seconds it took to find and write the shipped values."""
    lagged: str = ""
    """Description of the ranks that were behind others."""
    incomplete: bool = False
    """The notebook does not show all of the output."""

    @property
    def succeeded(self) -> bool:
        """True if every rank ended successfully."""
        return not (
            self.interrupted or self.timed_out or any(rank.failed for rank in self.ranks.values())
        )

    def unfinished(self) -> list[int]:
        """List the ranks whose cell is not known to have ended."""
        return [
            number
            for number, rank in self.ranks.items()
            if rank.outcome is None and rank.died is None
        ]

    @property
    def out_of_step(self) -> bool:
        """True if ranks have begun different numbers of collectives on a group.

        The next collective would not match. Only checked if the run failed or was interrupted,
        which a cell may have caught.
        """
        # a cell may have caught the interrupt, so a good run counts too if it was interrupted
        if self.succeeded and not any(rank.interrupted for rank in self.ranks.values()):
            return False
        counts_by_group: dict[str, set[int]] = {}
        for rank in self.ranks.values():
            if rank.outcome is None:
                continue
            for group, begun_count in rank.outcome.collectives.items():
                counts_by_group.setdefault(group, set()).add(begun_count)
        return any(len(counts) > 1 for counts in counts_by_group.values())


def state_of(
    report: Report,
    waiting: Sequence[int],
    always_last: Sequence[int] = (),
    in_vain: str = "",
) -> RunState:
    """Compute the current state of a run; `seconds` is set by the caller, who knows the start.

    Args:
        waiting: ranks that wait for others in a collective.
        always_last: ranks that the others wait for in every collective.
        in_vain: description of ranks in collectives that the others will not join, as a part of the
            line.
    """
    ended = [number for number, rank in report.ranks.items() if rank.over]
    failed = failed_ranks(report)
    metrics = report.metrics
    lagging = metrics.lagging(ended)
    last_ranks = [] if lagging else [rank for rank in always_last if rank not in ended]
    # remembered for the summary at the end of the run
    report.lagged = lag_text(lagging) or straggler_text(last_ranks, "was", "were") or report.lagged
    return RunState(
        ranks=len(report.ranks),
        seconds=0.0,
        done=len(ended) - len(failed),
        failed=failed,
        waiting=() if in_vain else tuple(rank for rank in waiting if rank not in ended),
        progress=metrics.progress(),
        numbers=metrics.numbers(),
        importing=import_text(metrics.importing(ended), len(report.ranks)),
        lagging=SEPARATOR.join(
            filter(
                None,
                [
                    in_vain,
                    lag_text(lagging, "is", "are"),
                    straggler_text(last_ranks, "is", "are"),
                    *current_causes(metrics.usage(), ended),
                ],
            )
        ),
    )


def end_of(
    report: Report, seconds: float, names: Sequence[str], gathered: tuple[int, float]
) -> RunSummary:
    """Summarize a finished run.

    Args:
        seconds: seconds since it was requested.
        names: the notebook's variables that hold the results.
        gathered: number of bytes gathered, and the seconds it took.
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
        names=tuple(names) if report.succeeded else (),
        progress=None if report.succeeded else report.metrics.progress(),
        numbers=report.metrics.numbers(),
        lagged=SEPARATOR.join(
            filter(None, [report.lagged, *causes_over_run(report.metrics.usage())])
        ),
        cell=report.metrics.cell,
        incomplete=report.incomplete,
    )


def import_text(importing: Mapping[str, Sequence[int]], count_of_all: int) -> str:
    """Describe current imports as a part of a line: "importing torch on 4 ranks"; "" for none."""
    parts = []
    for module, ranks in importing.items():
        is_all = len(ranks) == count_of_all
        location = (
            ""
            if count_of_all == 1
            else f" on {count(len(ranks), 'rank') if is_all else rank_words(list(ranks))}"
        )
        parts.append(f"{module}{location}")
    return f"importing {', '.join(parts)}" if parts else ""


def failed_ranks(report: Report) -> tuple[int, ...]:
    """Return the ranks whose own cell failed, without those that were stopped because of it."""

    def failed_by_itself(rank: RankRun) -> bool:
        # an interrupt may reach a rank whose own error is already on its way here
        is_freed = rank.outcome is not None and rank.outcome.freed
        ended_for = rank.died is not None or rank.interrupted or is_freed
        return rank.failed and not (rank.stopped and ended_for)

    return tuple(number for number, rank in report.ranks.items() if failed_by_itself(rank))


def straggler_text(ranks: Sequence[int], singular: str, plural: str) -> str:
    """Describe ranks that the others wait for in every collective, as a part of a line.

    Return "" for none.
    """
    if not ranks:
        return ""
    verb = verb_form(len(ranks), singular, plural)
    return f"{rank_words(list(ranks))} {verb} last in every collective"


def lag_text(behind: dict[int, int], singular: str = "was", plural: str = "were") -> str:
    """Describe ranks that are behind others, as a part of a line; "" for none."""
    if not behind:
        return ""
    verb = verb_form(len(behind), singular, plural)
    return f"{rank_words(list(behind))} {verb} {count(max(behind.values()), 'step')} behind"
