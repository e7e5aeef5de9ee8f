"""``%sky_status``, ``%sky_stacks``, ``%sky_vars``, ``%sky_check``: pools, where the ranks of one are now, what their names hold, and how
its nodes are.
"""

from __future__ import annotations

from collections.abc import Iterable

from skymagic.api import costs
from skymagic.cluster.health import Findings
from skymagic.display.screen import print_note
from skymagic.display.status import PoolStatus, PoolStatuses, RankStatus
from skymagic.jobs import inspection
from skymagic.magics.arguments.line_magics import CheckRequest, RanksRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool, records, registry

USE_WINDOW = 0.25
"""Seconds over which ``%sky_status`` takes the use of processors."""
NO_POOL = "no pool is running: make one with %sky_pool --nodes 2 --plugin torch"


def pools(name: str | None, own_jobs: Iterable[str] = ()) -> PoolStatuses:
    """How pools are and what rented ones cost; or why there is none. Raises PoolError: there is no such pool.

    Args:
        own_jobs: job ids of this notebook's rented pools.
    """
    chosen = [registry.pool_named(name)] if name else registry.pools()
    gone = [] if name else [f"{one.ended}: recreate it with %sky_pool" for one in registry.ended_pools()]
    gone += [] if name else records.reminders(records.every())
    cost = [costs.text(found)] if (found := costs.paid_now(name, own_jobs)) else []
    notes = [*gone, *cost] if chosen or gone else [NO_POOL, *cost]
    return PoolStatuses({one.name: _pool(one) for one in chosen}, tuple(notes))


def _pool(one: Pool) -> PoolStatus:
    use = one.use(USE_WINDOW)
    ranks = {
        number: RankStatus(number, node, str(host), pid, str(state), use.get(number))
        for rank, node, host, pid, state in one.status()
        for number in [int(str(rank))]
    }
    return PoolStatus(repr(one), ranks, one.picture(use))


def stacks(request: RanksRequest) -> str:
    """Where each rank is. Raises RequestError and PoolError."""
    return inspection.stacks(*_chosen(request))


def variables(request: RanksRequest) -> str:
    """What the names of each rank hold. Raises as `stacks` does."""
    return inspection.variables(*_chosen(request))


def _chosen(request: RanksRequest) -> tuple[Pool, tuple[int, ...]]:
    pool = registry.pool_named(request.pool)
    return pool, (request.ranks or Selection("all")).ranks(pool.world_size)


def checked(request: CheckRequest) -> Findings:
    """How a pool's nodes are. Raises PoolError: there is no such pool, or it is lost."""
    pool = registry.pool_named(request.name)
    return inspection.check(pool, request.quick, print_note)
