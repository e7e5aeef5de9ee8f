"""Post-mortem debugging: commands of a debugger, each an order to the rank whose cell has failed."""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.display.screen import Screen
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.recovery import Recovery
from skymagic.pool.runs import Runs
from skymagic.pool.scheduling import Scheduler
from skymagic.pool.status import Status
from skymagic.run import interrupt
from skymagic.run.report import Limits
from skymagic.run.submission import Submission
from skymagic.wire.order import Debug


@dataclass(eq=False, repr=False)
class Debugging:
    """Sends the commands."""

    _status: Status
    _dispatch: Dispatch
    _scheduler: Scheduler
    _recovery: Recovery
    _runs: Runs

    def command(self, rank: int, text: str, screen: Screen) -> bool:
        """See `Pool.debug`."""
        defaults = self._status.defaults
        order = Debug(ranks=(rank,), visible_ranks=(rank,), screen_limit=defaults.screen_limit, command=text)
        submission = Submission((rank,))
        with self._scheduler.request({rank}):
            self._runs.check((rank,))
            with self._runs.counted(), interrupt.deferred() as interrupts, interrupts.sent_to(submission):
                report = self._dispatch.send(submission, order, "", screen, Limits(grace=defaults.grace))
            if not report.good:
                self._recovery.begin_after(report)
        return bool((report.ranks[rank].outcome or {}).get("kept"))
