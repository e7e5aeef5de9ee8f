"""Where the ranks of a pool are now, what their names hold, and how its nodes are: for ``%sky_stacks``, ``%sky_vars``, ``%sky_check`` and the
button of a run's line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymagic.cluster import checking
from skymagic.cluster.health import Findings
from skymagic.display import inspection as display
from skymagic.display.text import NO_ANSWER
from skymagic.pool import Pool
from skymagic.run import stall

TIMEOUT = 5.0
"""Seconds in which ranks must answer; they do at once, unless native code holds the interpreter."""
ANSWERING = ("ready", "running", "recovering")
"""States of ranks that are there to answer."""


def stacks(pool: Pool, ranks: Sequence[int]) -> str:
    """Where each of these ranks is: a heading for those at the same place, and the user's frames below it."""
    there, others = _divided(pool, ranks)
    return display.stacks(stall.stacks_of(pool.agents, there, TIMEOUT), others)


def variables(pool: Pool, ranks: Sequence[int]) -> str:
    """What the names of each of these ranks hold, as a table."""
    there, others = _divided(pool, ranks)
    found = stall.variables_of(pool.agents, there, TIMEOUT)
    others |= {rank: NO_ANSWER for rank in there if rank not in found}
    return "\n".join([*([display.variables(found)] if found else []), *display.states(others)])


def _divided(pool: Pool, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """The ranks that can be asked, and the states of the others."""
    words = {int(str(row[0])): str(row[-1]) for row in pool.status()}
    there = [rank for rank in ranks if words.get(rank) in ANSWERING]
    return there, {rank: words.get(rank, "not there") for rank in ranks if rank not in there}


def check(pool: Pool, say: Callable[[str], None]) -> Findings:
    """Check all nodes against the pool's plan, also while cells run."""
    plan = pool.plan
    # nodes of a pool on this machine share it
    gpus = (
        max(map(len, plan.devices), default=0)
        if plan.remote
        else len({one.word for node in plan.devices for one in node})
    )
    return checking.check(pool.agents.nodes, expected=gpus, say=say)
