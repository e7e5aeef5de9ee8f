"""``%sky_status``, ``%sky_stacks``, ``%sky_vars`` and ``%sky_check``, and ``%debug`` on a rank.

They show pools, the stacks and variables of ranks, and the health of nodes. ``%debug`` works after
a cell that failed on a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell

from skymagic.api import costs
from skymagic.cluster.health import Findings
from skymagic.display.screen import NotebookScreen, print_note
from skymagic.display.status import PoolStatus, PoolStatuses, RankStatus
from skymagic.errors import PoolError, RankError
from skymagic.jobs import inspection
from skymagic.magics.arguments.line_magics import RanksRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool, records, registry
from skymagic.wire.order import Debug

USE_WINDOW = 0.25
"""Seconds over which ``%sky_status`` measures CPU use."""
NO_POOL = f"no pool is running: make one with {registry.start_line()}"


def pools(name: str | None, own_jobs: Iterable[str] = ()) -> PoolStatuses:
    """Return the state of pools with the cost of rented ones, or a hint if no pool is running.

    Args:
        own_jobs: job ids of this notebook's rented pools.

    Raises:
        PoolError: no pool has this name.
    """
    running = [registry.pool_named(name)] if name else registry.pools()
    ended = [] if name else [f"{pool.ended}: {pool.remedy}" for pool in registry.ended_pools()]
    ended += [] if name else records.reminders(records.readable_records())
    # current costs only; --cost lists a month
    paid = [
        cost
        for cost in costs.costs((), None, own_jobs)
        if cost.per_hour != 0 and name in (None, cost.pool)
    ]
    cost_text = [costs.text(paid)] if paid else []
    notes = [*ended, *cost_text] if running or ended else [NO_POOL, *cost_text]
    return PoolStatuses({pool.name: _pool(pool) for pool in running}, tuple(notes))


def _pool(pool: Pool) -> PoolStatus:
    use = pool.use(USE_WINDOW)
    ranks = {
        number: RankStatus(number, node, str(host), pid, str(state), use.get(number))
        for rank, node, host, pid, state in pool.status()
        for number in [int(str(rank))]
    }
    return PoolStatus(repr(pool), ranks, pool.picture(use))


def stacks(request: RanksRequest) -> str:
    """Return the current position of each rank. Raises RequestError and PoolError."""
    return inspection.stacks(*_selected_ranks(request))


def variables(request: RanksRequest) -> str:
    """Return the variables of each rank as a table. Raises as `stacks` does."""
    return inspection.variables(*_selected_ranks(request))


def _selected_ranks(request: RanksRequest) -> tuple[Pool, tuple[int, ...]]:
    pool = registry.pool_named(request.pool)
    return pool, (request.ranks or Selection("all")).ranks(pool.world_size)


def check_nodes(name: str | None) -> Findings:
    """Check the nodes of a pool. Raises PoolError if it does not exist or is lost."""
    pool = registry.pool_named(name)
    return inspection.check(pool, print_note)


# -- ``%debug`` after a failed cell: the frames stay on the rank, and each command is sent there ---

QUIT_COMMANDS = ("q", "quit", "exit")
FRAMES_GONE = (
    "rank {rank} no longer has the frames of that error: it keeps them until its next cell"
)
NO_INPUT = "%debug reads commands, and this front end has no input"


def register(shell: InteractiveShell) -> None:
    """Let ``%debug`` open the frames of a rank if the last error came from a rank.

    Otherwise it is IPython's own. Calling it twice is safe.
    """
    plain = shell.find_line_magic("debug")
    if hasattr(plain, "skymagic_plain"):
        return

    def debug(line: str) -> Any:
        error = getattr(sys, "last_value", None)
        return _session(error) if isinstance(error, RankError) and not line.strip() else plain(line)

    debug.__doc__ = plain.__doc__
    debug.skymagic_plain = plain  # type: ignore[attr-defined]
    shell.register_magic_function(debug, "line", "debug")


def unregister(shell: InteractiveShell) -> None:
    """Restore IPython's own ``%debug``."""
    if (plain := getattr(shell.find_line_magic("debug"), "skymagic_plain", None)) is not None:
        shell.register_magic_function(plain, "line", "debug")


def _session(error: RankError) -> None:
    rank = error._report.rank
    pool = registry.pool_named()
    if rank >= pool.world_size or not _send(pool, rank, "where"):
        raise UsageError(FRAMES_GONE.format(rank=rank))
    print_note(
        f"[frames of rank {rank}: p, pp, up, down, where, list, locals, or an expression; q quits]"
    )
    while True:
        try:
            line = input(f"rank {rank}> ")
        except StdinNotImplementedError:
            raise UsageError(NO_INPUT) from None
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() in QUIT_COMMANDS:
            return
        try:
            if line.strip() and not _send(pool, rank, line):
                raise UsageError(FRAMES_GONE.format(rank=rank))
        except PoolError as problem:
            raise UsageError(str(problem)) from None


def _send(pool: Pool, rank: int, command: str) -> bool:
    """Run a pdb command or an expression on the frames of the error that ended a rank's last cell.

    Returns:
        True if the rank still has these frames: it keeps them until its next cell.

    Raises:
        PoolStateError: the pool, or the rank, is stopped or lost.
    """
    screen = NotebookScreen((rank,))
    order = Debug(
        ranks=(rank,),
        visible_ranks=(rank,),
        screen_limit=pool.defaults.screen_limit,
        command=command,
    )
    try:
        with pool.scheduler.request({rank}):
            pool.runs.check((rank,))
            with pool.runs.count_run():
                report = pool.runs.order((rank,), order, screen)
            if not report.succeeded:
                pool.recovery.begin_after(report)
        outcome = report.ranks[rank].outcome
        return outcome is not None and outcome.inspectable
    finally:
        screen.finish()
