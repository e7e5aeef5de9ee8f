"""``%sky_stacks`` and ``%sky_vars``: where the ranks of a pool are now, and what their names hold."""

from __future__ import annotations

from skymagic.display import inspection as display
from skymagic.display.text import NO_ANSWER
from skymagic.magics.arguments.line_magics import RanksRequest
from skymagic.plan.selection import Selection
from skymagic.pool import Pool, registry
from skymagic.run import inspection

TIMEOUT = 5.0
"""Seconds in which ranks must answer; they do at once, unless native code holds the interpreter."""
ANSWERING = ("ready", "running", "recovering")
"""States of ranks that are there to answer."""


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


def _chosen(pool: Pool, request: RanksRequest) -> tuple[list[int], dict[int, str]]:
    """The ranks that can be asked, and the states of the others that are meant."""
    meant = (request.ranks or Selection("all")).ranks(pool.world_size)
    words = {int(str(row[0])): str(row[-1]) for row in pool.status()}
    there = [rank for rank in meant if words.get(rank) in ANSWERING]
    return there, {rank: words.get(rank, "not there") for rank in meant if rank not in there}
