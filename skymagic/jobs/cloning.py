"""Clone variables: copy them from one rank to other ranks.

The source rank pickles its values, and the other ranks unpickle and bind them. If a DDP wrapper was
among them, all ranks form their process group again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymagic.errors import CaptureError, PoolError, RequestError
from skymagic.jobs.failures import failure
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import rank_words
from skymagic.pool import Pool
from skymagic.run import interrupt
from skymagic.run.state import Limits, Report
from skymagic.wire.order import Lend, RunCell
from skymagic.wire.values import LentNames


@dataclass(frozen=True)
class CloneResult:
    """Summary of what was cloned.

    Attributes:
        names: the requested names, and the names that their functions use.
        nbytes: number of bytes copied.
        notes: other messages for the user.
    """

    names: tuple[str, ...]
    nbytes: int
    notes: list[str]


def clone(pool: Pool, ranks: Sequence[int], names: Sequence[str], source: int) -> CloneResult:
    """Copy names from one rank to others, all together: values that share objects still share them.

    DDP wrappers are recreated on each rank, after all ranks have formed a new process group.

    Args:
        ranks: the ranks that get the names; at least one.
        source: the rank that has them.

    Raises:
        RequestError: a rank does not exist, or the source lacks a name; nothing has changed.
        CaptureError: values cannot be sent; nothing has changed.
        RunError: a rank died, or could not rebuild the values.
        PoolStateError: the pool or one of these ranks is stopped or lost.
        PoolError: the process group was not formed again.
    """
    ranks, names = tuple(sorted(set(ranks))), tuple(dict.fromkeys(names))
    _check(pool, ranks, names, source)
    with interrupt.deferred():
        # reserve all ranks: no cell may change the names between pickling and binding
        with pool.scheduler.request({*ranks, source}):
            pool.runs.check((source, *ranks))
            with pool.runs.count_run():
                lent = _copy(pool, ranks, names, source)
            if isinstance(lent, Report):
                pool.recovery.begin_after(lent)
                raise failure(lent, pool, Limits())
        notes = [
            f"{name} stays on rank {source}, because it cannot be sent: {reason}"
            for name, reason in lent.skipped.items()
        ]
        if lent.wrappers:  # after the ranks are released, because recovery reserves all of them
            _reform_process_group(pool)
            notes += pool.take_notes()
        assert lent.value is not None
        return CloneResult(lent.names, lent.value.nbytes, notes)


def _check(pool: Pool, ranks: Sequence[int], names: Sequence[str], source: int) -> None:
    unknown_ranks = [rank for rank in {source, *ranks} if not 0 <= rank < pool.world_size]
    mistakes = (
        [
            f"pool {pool.name!r} has ranks 0 to {pool.world_size - 1}, not "
            f"{rank_words(unknown_ranks)}"
        ]
        if unknown_ranks
        else []
    )
    if source in ranks:
        mistakes.append(
            f"rank {source} cannot get names from itself: name another rank after --from"
        )
    if not names:
        mistakes.append("name at least one variable")
    if not ranks:
        mistakes.append("name at least one rank that gets the variables")
    if mistakes:
        raise RequestError(mistakes)


def _copy(
    pool: Pool, ranks: tuple[int, ...], names: tuple[str, ...], source: int
) -> Report | LentNames:
    """Copy the names; return the values that the source sent, or the report of a failed order."""
    from skymagic.data.shipping.packing import bind_orders_for_lent_names

    shipper, specs = pool.shipper, pool.agents.specs
    # functions may use these names, but all receiving ranks have them already
    held = frozenset.intersection(*map(shipper.bindings.names, ranks))
    report = pool.runs.order(
        (source,), Lend(ranks=(source,), names=names, held=tuple(sorted(held)))
    )
    if not report.succeeded:
        return report
    outcome = report.ranks[source].outcome
    assert outcome is not None
    assert outcome.lent is not None
    lent = outcome.lent
    _check_sent(pool, lent, source)
    same_node = len({specs[rank][0] for rank in (source, *ranks)}) == 1
    with bind_orders_for_lent_names(
        shipper.sources, shipper.store, lent, ranks, same_node=same_node
    ) as manifest:
        report = pool.runs.order(ranks, RunCell(ranks=ranks, execution_count=0, manifest=manifest))
    if not report.succeeded:
        return report
    shipper.record_clone(lent.names, source, ranks)
    return lent


def _check_sent(pool: Pool, lent: LentNames, source: int) -> None:
    if lent.missing:
        names = pool.shipper.bindings.names(source)
        raise RequestError(
            [f"rank {source} has no {name}{did_you_mean(name, names)}" for name in lent.missing],
            code="no-name",
            rank=source,
            names=lent.missing,
        )
    if lent.refused:
        reasons = [
            f"{name} cannot be sent from rank {source}: {reason}"
            for name, reason in lent.refused.items()
        ]
        raise CaptureError("; ".join(reasons), rank=source, names=lent.refused)


def _reform_process_group(pool: Pool) -> None:
    pool.recovery.begin(())
    if not pool.recovery.wait():
        raise PoolError(
            "the process group is still being formed again; %sky_status says when the ranks are "
            "ready",
            code="group-forming",
        )
    pool.recovery.check()
