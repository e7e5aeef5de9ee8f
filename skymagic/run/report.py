"""A run's limits, and its report: the state of each rank's part, and how all of it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.plan.requests import Defaults
from skymagic.run.metrics import Metrics
from skymagic.wire import agent as wire

DEAD_OUTPUT_TIMEOUT = 1.0
"""Seconds to wait for the last text of a rank that has died."""
LOST_OUTPUT_TIMEOUT = 10.0
"""Seconds without news to wait for the last text of a rank whose cell is over; it comes at once, unless its agent is gone."""


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
    """Its output is complete."""
    died: wire.RankExited | None = None
    died_at: float = 0.0
    stopped: bool = False
    """It was interrupted or released because of another rank's failure, a timeout or the user."""
    killed: bool = False
    last_event_at: float = 0.0
    waited_at: Sequence[Mapping[str, Any]] = ()
    """Where it waited in native code and could not take an interrupt: the innermost frame of the user's own, and the innermost of all."""

    @property
    def settled(self) -> bool:
        """Nothing more is to come."""
        return self.ended and (self.outcome is not None or self.died is not None)

    @property
    def output_deadline(self) -> float | None:
        """When to give up waiting for its last output; None while its cell goes on, or when the output is complete."""
        if self.ended or not (self.died or self.outcome):
            return None
        return self.died_at + DEAD_OUTPUT_TIMEOUT if self.died else self.last_event_at + LOST_OUTPUT_TIMEOUT

    @property
    def stopped_at(self) -> Sequence[Mapping[str, Any]]:
        """Where it was when it was interrupted, likewise; empty if nobody knows."""
        return self.waited_at or (self.outcome or {}).get("stopped_at") or ()

    @property
    def failed(self) -> bool:
        """It died, or its cell did not end well."""
        return self.died is not None or (self.outcome is not None and self.outcome["status"] != "ok")


@dataclass
class Report:
    """The report of a run: how each rank ended, and what was done to end it."""

    ranks: dict[int, RankRun]
    run: int = 0
    """The pool's number of the run; 0 for what is none."""
    interrupted: bool = False
    timed_out: bool = False
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

    @property
    def good(self) -> bool:
        """Every rank ended well."""
        return not (self.interrupted or self.timed_out or any(rank.failed for rank in self.ranks.values()))

    @property
    def out_of_step(self) -> bool:
        """Whether ranks have begun different numbers of collectives on a group in a run that failed, or that was interrupted, which a cell
        may have caught: the next would never match."""
        if self.good and not any((rank.outcome or {}).get("interrupted") for rank in self.ranks.values()):
            return False
        begun: dict[str, set[int]] = {}
        for rank in self.ranks.values():
            for group, count in ((rank.outcome or {}).get("collectives") or {}).items():
                begun.setdefault(group, set()).add(count)
        return any(len(counts) > 1 for counts in begun.values())
