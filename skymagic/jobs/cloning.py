"""Names copied from one rank to others: lent by the one, bound on the others; all ranks meet again where a wrapper around their group was copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import CaptureError, PoolError, RequestError
from skymagic.jobs.failures import failure
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import rank_words
from skymagic.pool import Pool
from skymagic.run import interrupt
from skymagic.run.report import Limits, Report
from skymagic.wire.order import Lend, RunCell


@dataclass(frozen=True)
class Cloned:
    """What was copied.

    Attributes:
        names: those that were asked for, and others that their functions use.
        notes: what else the user must know.
    """

    names: tuple[str, ...]
    nbytes: int
    notes: list[str]


def clone(pool: Pool, ranks: Sequence[int], names: Sequence[str], source: int) -> Cloned:
    """Copy names from one rank to others, all of them as one: what they share stays shared.

    DDP wrappers are made again around the group of all ranks, which is formed again for them.

    Args:
        ranks: those that get them, above 0 in number.
        source: the rank that has them.

    Raises:
        RequestError: there are no such ranks, or the source has not got the names; nothing has changed.
        CaptureError: values cannot travel; nothing has changed.
        RunError: a rank died, or could not rebuild the values.
        PoolStateError: the pool is stopped or lost, or ranks of it are.
        PoolError: the process group was not formed again.
    """
    ranks, names = tuple(sorted(set(ranks))), tuple(dict.fromkeys(names))
    _check(pool, ranks, names, source)
    with interrupt.deferred():
        # all at once: no cell may change the names between the lending and the binding
        with pool.scheduler.request({*ranks, source}):
            pool.runs.check((source, *ranks))
            with pool.runs.counted():
                found = _copied(pool, ranks, names, source)
            if isinstance(found, Report):
                pool.recovery.begin_after(found)
                raise failure(found, pool, Limits())
        notes = [
            f"{name} stays on rank {source}, because it cannot be sent: {why}"
            for name, why in found["left"].items()
        ]
        if found["wrappers"]:  # after the ranks are given back: recovery reserves all of them
            _meet_again(pool)
            notes += pool.take_notes()
        return Cloned(tuple(found["names"]), found["nbytes"], notes)


def _check(pool: Pool, ranks: Sequence[int], names: Sequence[str], source: int) -> None:
    wrong = [rank for rank in {source, *ranks} if not 0 <= rank < pool.world_size]
    mistakes = (
        [f"pool {pool.name!r} has ranks 0 to {pool.world_size - 1}, not {rank_words(wrong)}"]
        if wrong
        else []
    )
    if source in ranks:
        mistakes.append(
            f"rank {source} cannot get names from itself: name another rank after --from"
        )
    if not names or not ranks:
        mistakes.append("no name is given")
    if mistakes:
        raise RequestError(mistakes)


def _copied(
    pool: Pool, ranks: tuple[int, ...], names: tuple[str, ...], source: int
) -> Report | Mapping[str, Any]:
    """What the source has lent, once the others have it; or the report of the order that went wrong."""
    from skymagic.data.shipping.packing import orders_for_lent

    shipper, specs = pool.shipper, pool.agents.specs
    held = frozenset.intersection(*map(shipper.bindings.names, ranks))
    report = pool.runs.order(
        (source,), Lend(ranks=(source,), names=names, held=tuple(sorted(held)))
    )
    if not report.good:
        return report
    outcome = report.ranks[source].outcome or {}
    _check_lent(pool, outcome, source)
    lent: Mapping[str, Any] = outcome["lent"]
    same_node = len({specs[rank][0] for rank in (source, *ranks)}) == 1
    with orders_for_lent(
        shipper.sources, shipper.store, lent, ranks, same_node=same_node
    ) as manifest:
        report = pool.runs.order(ranks, RunCell(ranks=ranks, execution_count=0, manifest=manifest))
    if not report.good:
        return report
    shipper.cloned(lent["names"], source, ranks)
    return lent


def _check_lent(pool: Pool, outcome: Mapping[str, Any], source: int) -> None:
    if missing := outcome.get("missing"):
        known = pool.shipper.bindings.names(source)
        raise RequestError(
            [f"rank {source} has no {name}{did_you_mean(name, known)}" for name in missing]
        )
    if refused := outcome.get("refused"):
        said = [
            f"{name} cannot travel from rank {source}: {reason}" for name, reason in refused.items()
        ]
        raise CaptureError("; ".join(said))


def _meet_again(pool: Pool) -> None:
    pool.recovery.begin(())
    if not pool.recovery.wait():
        raise PoolError(
            "the process group is still being formed again; %sky_status says when the ranks are ready"
        )
    pool.recovery.check()
