"""``%sky_logs``: what ranks wrote, of a pool that runs or of one that has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from skymagic.display.text import log_lines
from skymagic.magics.arguments.line_magics import LogsRequest
from skymagic.plan.selection import Selection
from skymagic.pool import Pool, registry
from skymagic.wire.agent import KEPT_LINES

TIMEOUT = 20.0
"""Seconds in which a node must tell a log."""

Write = Callable[[str], None]


def show(request: LogsRequest, write: Write) -> None:
    """Write what is asked for; of a pool that runs, with --follow until the stop button.

    Raises:
        RequestError: there are no such ranks. PoolError: there is no such pool, and no log of one.
    """
    kept = registry.last_lines(request.pool)
    if kept is None:
        _of(registry.find(request.pool), request, write)
        return
    name, lines = kept
    chosen, labels = _chosen(request, max(lines, default=-1) + 1)
    for rank in chosen:
        last = lines.get(rank, "").removesuffix("\n").split("\n")[-request.lines :]
        write(log_lines("\n".join(last), labels[rank]))
    write(f"[pool {name!r} has ended; the last {KEPT_LINES} lines of each rank are kept while the notebook runs]\n")


def _of(pool: Pool, request: LogsRequest, write: Write) -> None:
    ranks, labels = _chosen(request, pool.world_size)
    ends = {}
    for rank in ranks:
        text, ends[rank] = pool.agents.log(rank, request.lines, TIMEOUT)
        write(log_lines(text, labels[rank]))
    with contextlib.suppress(KeyboardInterrupt):
        while request.follow:  # until the stop button
            for rank in ranks:
                text, ends[rank] = pool.agents.log_since(rank, ends[rank], 1.0 / len(ranks))
                write(log_lines(text, labels[rank]))


def _chosen(request: LogsRequest, world_size: int) -> tuple[tuple[int, ...], dict[int, str]]:
    """The ranks that are asked for, and what stands before the lines of each."""
    ranks = (request.rank or Selection("all")).ranks(world_size) if world_size else ()
    return ranks, {rank: f"[{rank}] " if len(ranks) > 1 else "" for rank in ranks}
