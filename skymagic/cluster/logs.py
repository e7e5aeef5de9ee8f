"""Ranks' logs, as their nodes tell them: the last lines, what follows, what one run wrote, and which runs there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from skymagic.cluster.agents import Agents
from skymagic.errors import PoolError

TIMEOUT = 20.0
"""Seconds in which a node must tell each megabyte of a log."""


def last(agents: Agents, rank: int, lines: int) -> tuple[str, int]:
    """The last lines of a rank's log, and where it ended, in bytes; a rank that has ended has one too.

    Raises:
        PoolError: its node did not answer, as in all that follow.
    """
    found = _answer(agents, rank, lines=lines)
    return found["text"], found["end"]


def since(agents: Agents, rank: int, start: int, timeout: float) -> tuple[str, int]:
    """What a rank's log holds from byte `start` on, and where that ends; waits up to `timeout` seconds for it."""
    found = agents.read_log(rank, timeout, start=start)
    return ("", start) if found is None else (found["text"], found["end"])


def of_run(agents: Agents, rank: int, run: int) -> str | None:
    """What a rank wrote in a run, as its log has it, also while the run goes on; None where its node knows the run no more."""
    found = list(pieces(agents, rank, run))
    return "".join(piece["text"] for piece in found) if found[0]["known"] else None


def pieces(agents: Agents, rank: int, run: int, start: int | None = None) -> Iterator[dict[str, Any]]:
    """The same in pieces of a megabyte at most, from byte `start` on: each with ``text``, ``end``, ``known`` and ``over``."""
    more = True
    while more:
        found = _answer(agents, rank, run=run, start=start)
        start, more = found["end"], found["more"]
        yield found


def runs(agents: Agents, ranks: Sequence[int]) -> dict[int, int]:
    """Run → its cell's number in its notebook, of the runs that the logs of these ranks have; the last 1,000 of each."""
    found = {run: cell for rank in ranks for run, cell in _answer(agents, rank, runs=True)["runs"]}
    return dict(sorted(found.items()))


def _answer(agents: Agents, rank: int, **what: Any) -> dict[str, Any]:
    found = agents.read_log(rank, TIMEOUT, **what)
    if found is None:
        host = agents.ranks[rank].hostname
        raise PoolError(f"{host} does not tell the log of rank {rank}: no answer within {TIMEOUT:.0f} s")
    return found
