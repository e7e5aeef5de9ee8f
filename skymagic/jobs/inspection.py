"""Where the ranks of a pool are now, and what their names hold: for ``%sky_stacks``, ``%sky_vars`` and the button of a run's line."""

from __future__ import annotations

from collections.abc import Sequence

from skymagic.display import inspection as display
from skymagic.display.text import NO_ANSWER
from skymagic.pool import Pool
from skymagic.pool.reader import Reader
from skymagic.run import inspection

TIMEOUT = 5.0
"""Seconds in which ranks must answer; they do at once, unless native code holds the interpreter."""
ANSWERING = ("ready", "running", "recovering")
"""States of ranks that are there to answer."""


def stacks(pool: Pool | Reader, ranks: Sequence[int]) -> str:
    """Where each of these ranks is: a heading for those at the same place, and the user's frames below it."""
    there, others = _divided(pool, ranks)
    return display.stacks(inspection.stacks(pool.agents, there, TIMEOUT), others)


def variables(pool: Pool | Reader, ranks: Sequence[int]) -> str:
    """What the names of each of these ranks hold, as a table."""
    there, others = _divided(pool, ranks)
    found = inspection.variables(pool.agents, there, TIMEOUT)
    others |= {rank: NO_ANSWER for rank in there if rank not in found}
    return "\n".join([*([display.variables(found)] if found else []), *display.states(others)])


def _divided(pool: Pool | Reader, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """The ranks that can be asked, and the states of the others."""
    words = {int(str(row[0])): str(row[-1]) for row in pool.status()}
    there = [rank for rank in ranks if words.get(rank) in ANSWERING]
    return there, {rank: words.get(rank, "not there") for rank in ranks if rank not in there}
