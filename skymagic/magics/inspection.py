"""``%sky_status``, ``%sky_stacks``, ``%sky_vars``, ``%sky_check``: pools, where the ranks of one are now, what their names hold, and how
its nodes are.
"""

from __future__ import annotations

from skymagic.cluster.health import Findings
from skymagic.display import inspection as display
from skymagic.display import panel, text
from skymagic.display.screen import print_note
from skymagic.display.text import NO_ANSWER
from skymagic.magics.arguments.line_magics import CheckRequest, RanksRequest
from skymagic.plan.selection import Selection
from skymagic.pool import Pool, checking, records, registry, view
from skymagic.run import inspection

TIMEOUT = 5.0
"""Seconds in which ranks must answer; they do at once, unless native code holds the interpreter."""
ANSWERING = ("ready", "running", "recovering")
"""States of ranks that are there to answer."""


NO_POOL = "no pool is running: make one with %sky_pool --nodes 2 --plugin torch"


def pools(name: str | None) -> list[tuple[str, str]]:
    """Each pool as text, a table of its ranks, and as HTML, where the table is folded below the panel; or why there is none.

    Args:
        name: of a pool; None for all.

    Raises:
        PoolError: there is no such pool.
    """
    chosen = [registry.find(name)] if name else registry.every()
    gone = [] if name else [f"{one.ended}: %sky_pool makes it anew" for one in registry.ended()]
    gone += [] if name else records.reminders(records.every())
    return [*map(_pool, chosen), *((line, "") for line in gone)] or [(NO_POOL, "")]


def _pool(one: Pool) -> tuple[str, str]:
    table = text.status(one.status())
    return f"{one!r}\n{table}", panel.html(view.view(one, one.status())) + panel.folded("processes", table)


def stacks(request: RanksRequest) -> str:
    """Where each rank is.

    Raises:
        RequestError: there are no such ranks.
        PoolError: there is no such pool.
    """
    pool = registry.find(request.pool)
    there, others = _chosen(pool, request)
    return display.stacks(inspection.stacks(pool.agents, there, TIMEOUT), others)


def variables(request: RanksRequest) -> str:
    """What the names of each rank hold. Raises as `stacks` does."""
    pool = registry.find(request.pool)
    there, others = _chosen(pool, request)
    found = inspection.variables(pool.agents, there, TIMEOUT)
    others |= {rank: NO_ANSWER for rank in there if rank not in found}
    return "\n".join([*([display.variables(found)] if found else []), *display.states(others)])


def checked(request: CheckRequest) -> Findings:
    """How a pool's nodes are. Raises PoolError: there is no such pool, or it is lost."""
    pool = registry.find(request.name)
    return checking.check(pool.agents, pool.plan, request.quick, print_note)


def _chosen(pool: Pool, request: RanksRequest) -> tuple[list[int], dict[int, str]]:
    """The ranks that can be asked, and the states of the others that are meant."""
    meant = (request.ranks or Selection("all")).ranks(pool.world_size)
    words = {int(str(row[0])): str(row[-1]) for row in pool.status()}
    there = [rank for rank in meant if words.get(rank) in ANSWERING]
    return there, {rank: words.get(rank, "not there") for rank in meant if rank not in there}
