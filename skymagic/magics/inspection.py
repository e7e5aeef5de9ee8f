"""``%sky_status``, ``%sky_stacks``, ``%sky_vars``, ``%sky_check``: pools, where the ranks of one are now, what their names hold, and how
its nodes are.
"""

from __future__ import annotations

from skymagic.cluster.health import Findings
from skymagic.display import panel, text
from skymagic.display.screen import print_note
from skymagic.display.use import words
from skymagic.jobs import inspection
from skymagic.magics.arguments.line_magics import CheckRequest, RanksRequest
from skymagic.plan.selection import Selection
from skymagic.pool import Pool, checking, readers, records, registry
from skymagic.pool.reader import Reader

USE_WINDOW = 0.25
"""Seconds over which ``%sky_status`` takes the use of processors."""
NO_POOL = "no pool is running: make one with %sky_pool --nodes 2 --plugin torch"


def pools(name: str | None) -> list[tuple[str, str]]:
    """Each pool as text, a table of its ranks, and as HTML, where the table is folded below the panel; or why there is none.

    Args:
        name: of a pool; None for all.

    Raises:
        PoolError: there is no such pool.
    """
    chosen: list[Pool | Reader] = [registry.readable(name)] if name else [*registry.every(), *readers.every()]
    gone = [] if name else [f"{one.ended}: %sky_pool makes it anew" for one in registry.ended()]
    gone += [] if name else records.reminders(records.every())
    return [*map(_pool, chosen), *((line, "") for line in gone)] or [(NO_POOL, "")]


def _pool(one: Pool | Reader) -> tuple[str, str]:
    if isinstance(one, Reader):
        return f"{one!r}\n{text.status(one.status())}", ""
    use = one.use(USE_WINDOW)
    table = text.status(one.status(), {rank: words(used) for rank, used in use.items()})
    return f"{one!r}\n{table}", one.picture(use) + panel.folded("processes", table)


def stacks(request: RanksRequest) -> str:
    """Where each rank is.

    Raises:
        RequestError: there are no such ranks.
        PoolError: there is no such pool.
    """
    return inspection.stacks(*_chosen(request))


def variables(request: RanksRequest) -> str:
    """What the names of each rank hold. Raises as `stacks` does."""
    return inspection.variables(*_chosen(request))


def _chosen(request: RanksRequest) -> tuple[Pool | Reader, tuple[int, ...]]:
    pool = registry.readable(request.pool)
    return pool, (request.ranks or Selection("all")).ranks(pool.world_size)


def checked(request: CheckRequest) -> Findings:
    """How a pool's nodes are. Raises PoolError: there is no such pool, or it is lost."""
    pool = registry.find(request.name)
    return checking.check(pool.agents, pool.plan, request.quick, print_note)
