"""Inspection of a pool: stacks and variables of its ranks, and checks of its nodes.

Used by ``%sky_stacks``, ``%sky_vars``, ``%sky_check`` and the button of a run's progress line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymagic.cluster import checking
from skymagic.cluster.health import Findings
from skymagic.display import inspection as display
from skymagic.display.text import NO_ANSWER
from skymagic.pool import Pool
from skymagic.run import stall

TIMEOUT = 5.0
"""Seconds for ranks to answer; they answer at once unless native code holds the interpreter."""
ANSWERING = ("ready", "running", "recovering")
"""States of ranks that can answer."""


def stacks(pool: Pool, ranks: Sequence[int]) -> str:
    """Return the stacks of these ranks, with one heading for ranks at the same place.

    The user's frames follow below the heading.
    """
    answering, states = _split_by_availability(pool, ranks)
    return display.stacks(stall.stacks_of(pool.agents, answering, TIMEOUT), states)


def variables(pool: Pool, ranks: Sequence[int]) -> str:
    """Return the variables of these ranks as a table."""
    answering, states = _split_by_availability(pool, ranks)
    answers = stall.variables_of(pool.agents, answering, TIMEOUT)
    states |= {rank: NO_ANSWER for rank in answering if rank not in answers}
    return "\n".join([*([display.variables(answers)] if answers else []), *display.states(states)])


def _split_by_availability(pool: Pool, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """Return the ranks that can answer, and the states of the others."""
    states = {int(str(row[0])): str(row[-1]) for row in pool.status()}
    answering = [rank for rank in ranks if states.get(rank) in ANSWERING]
    return answering, {
        rank: states.get(rank, "not there") for rank in ranks if rank not in answering
    }


def check(pool: Pool, say: Callable[[str], None]) -> Findings:
    """Check all nodes against the pool's plan, even while cells are running."""
    plan = pool.plan
    # nodes of a pool on this machine share it
    gpus = (
        max(map(len, plan.devices), default=0)
        if plan.remote
        else len({device.word for node in plan.devices for device in node})
    )
    return checking.check(pool.agents.nodes, expected=gpus, say=say)
