"""Cloning: names of one rank are copied to others, through the nodes' stores; what they share stays shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.display.screen import Screen
from skymagic.errors import CaptureError, PoolError, RequestError
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import rank_words
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import Resources
from skymagic.pool.runs import Runs
from skymagic.pool.scheduling import Scheduler
from skymagic.pool.status import Status
from skymagic.run import interrupt
from skymagic.run.report import Limits, Report
from skymagic.run.submission import Submission
from skymagic.wire.order import Lend, Order, RunCell


@dataclass
class Cloned:
    """What was copied.

    Attributes:
        names: those that were asked for, and others that their functions use.
        notes: what else the user must know.
        report: of the order that went wrong, where one did: a rank died, or could not rebuild the values.
    """

    names: tuple[str, ...] = ()
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    report: Report | None = None


@dataclass(eq=False, repr=False)
class Cloning:
    """Lends on one rank, binds on others, and lets all ranks meet again where a wrapper around their group was copied."""

    _status: Status
    _resources: Resources
    _dispatch: Dispatch
    _scheduler: Scheduler
    _recovery: Recovery
    _runs: Runs

    def clone(self, ranks: Sequence[int], names: Sequence[str], source: int) -> Cloned:
        """See `Pool.clone`."""
        ranks, names = tuple(sorted(set(ranks))), tuple(dict.fromkeys(names))
        self._check(ranks, names, source)
        with self._scheduler.request({*ranks, source}):
            self._runs.check((source, *ranks))
            with self._runs.counted():
                cloned, wrappers = self._copy(ranks, names, source)
            if cloned.report is not None:
                self._recovery.begin_after(cloned.report)
        if cloned.report is None and wrappers:
            self._meet_again()
            cloned.notes += self._status.take_notes()
        return cloned

    def _check(self, ranks: Sequence[int], names: Sequence[str], source: int) -> None:
        world_size = self._status.world_size
        wrong = [rank for rank in {source, *ranks} if not 0 <= rank < world_size]
        mistakes = (
            [f"pool {self._status.name!r} has ranks 0 to {world_size - 1}, not {rank_words(wrong)}"] if wrong else []
        )
        if source in ranks:
            mistakes.append(f"rank {source} cannot get names from itself: say another rank behind --from")
        if not names or not ranks:
            mistakes.append("nothing is named")
        if mistakes:
            raise RequestError(mistakes)

    def _copy(self, ranks: tuple[int, ...], names: tuple[str, ...], source: int) -> tuple[Cloned, bool]:
        """Returns what was copied, and whether there are wrappers around the process group among it."""
        from skymagic.data.shipping.packing import orders_for_lent

        shipper = self._resources.shipper
        held = frozenset.intersection(*map(shipper.bindings.names, ranks))
        report = self._send((source,), Lend(ranks=(source,), names=names, held=tuple(sorted(held))))
        if not report.good:
            return Cloned(report=report), False
        outcome = report.ranks[source].outcome or {}
        self._check_lent(outcome, source)
        lent = outcome["lent"]
        nodes = {self._resources.agents.specs[rank][0] for rank in (source, *ranks)}
        same_node, sources = len(nodes) == 1, shipper.sources
        with orders_for_lent(sources, shipper.store, lent, ranks, same_node=same_node) as manifest:
            report = self._send(ranks, RunCell(ranks=ranks, execution_count=0, manifest=manifest))
        if not report.good:
            return Cloned(report=report), False
        shipper.cloned(lent["names"], source, ranks)
        left = [f"{name} stays on rank {source}, for it cannot travel: {why}" for name, why in lent["left"].items()]
        return Cloned(tuple(lent["names"]), lent["nbytes"], left), bool(lent["wrappers"])

    def _check_lent(self, outcome: dict[str, Any] | Any, source: int) -> None:
        if missing := outcome.get("missing"):
            known = self._resources.shipper.bindings.names(source)
            raise RequestError([f"rank {source} has no {name}{did_you_mean(name, known)}" for name in missing])
        if refused := outcome.get("refused"):
            said = [f"{name} cannot travel from rank {source}: {reason}" for name, reason in refused.items()]
            raise CaptureError("; ".join(said))

    def _send(self, ranks: Sequence[int], order: Order) -> Report:
        submission = Submission(ranks)
        limits = Limits(grace=self._status.defaults.grace)
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            return self._dispatch.send(submission, order, "", Screen(), limits)

    def _meet_again(self) -> None:
        self._recovery.begin(())
        if not self._recovery.wait():
            raise PoolError("the process group is still being formed anew; %sky_status says when the ranks are ready")
        self._recovery.check()
