"""The end of a run, for the line that stays of it: its values come back, or it has failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skymagic.display.run_line import SHOWN_BYTES, RunEnd, RunState
from skymagic.display.run_view import RunView
from skymagic.plan.units import size
from skymagic.run.report import Report
from skymagic.run.state import end_of


@dataclass
class Ending:
    """What the line of a run will say at its end."""

    view: RunView | None
    report: Report | None = None
    gathered: int = 0
    """Bytes that come back."""
    since: float = 0.0

    def gathers(self, nbytes: int) -> None:
        """The cell is over, and its values come back."""
        self.gathered, self.since = nbytes, time.monotonic()
        if self.view is not None and self.view.shown and self.report is not None and nbytes >= SHOWN_BYTES:
            activity = f"gathering {size(nbytes)}"
            self.view.draw(RunState(len(self.report.ranks), self.view.seconds, activity=activity))


@contextlib.contextmanager
def ended(
    view: RunView | None, names: Sequence[str], told: Callable[[RunEnd], RunEnd] = lambda end: end
) -> Iterator[Ending]:
    """Inside, a run goes on; at the end its line is the one that stays, whatever has happened; `told` makes it of the run's end."""
    ending = Ending(view)
    try:
        yield ending
    finally:
        if view is not None and ending.report is not None:
            gathered = (ending.gathered, time.monotonic() - ending.since) if ending.since else (0, 0.0)
            view.end(told(end_of(ending.report, view.seconds, names, gathered)))
        elif view is not None and view.shown:
            view.end(RunEnd(0, view.seconds, interrupted=True))


def sent_bytes(report: Report) -> int:
    """How many bytes the ranks have packed, of values that come back."""
    refs = [ref for rank in report.ranks.values() for ref in (rank.outcome or {}).get("values", {}).values()]
    files = {(ref["file"], ref.get("node", 0)): ref.get("nbytes", 0) for ref in refs if ref.get("file")}
    return sum(files.values())
