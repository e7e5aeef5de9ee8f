"""Registry of this process's pools by name, the most recently used last."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from skymagic.display import live
from skymagic.display.screen import print_note
from skymagic.errors import PoolError
from skymagic.plan.suggest import did_you_mean
from skymagic.pool import Pool, records
from skymagic.wire.processes import NOTEBOOK_CLOSED, NOTEBOOK_JOB

logger = logging.getLogger(__name__)

_pools: dict[str, Pool] = {}
KEPT_POOLS = 4
"""Number of ended pools whose ranks' last log lines are kept."""
_last_lines: dict[str, dict[int, str]] = {}


def pool_named(name: str | None = None, *, ended: bool = False) -> Pool:
    """Return the pool of this name, or the most recently used one.

    Args:
        ended: also return a pool that has ended by itself.

    Raises:
        PoolError: the pool does not exist or has ended by itself; the message shows how to make
            one.
    """
    if name in _pools or (name is None and _pools):
        # a dict keeps the order of insertion, and `use` inserts again: the last one was used last
        pool = _pools[name] if name is not None else next(reversed(_pools.values()))
        if not ended:
            pool.check_ended()
        return pool
    problem = f"there is no pool {name!r}" if name else "there is no pool yet"
    if name and (nearest := did_you_mean(name, _pools)):
        raise PoolError(
            f"{problem}; available: {', '.join(_pools)}{nearest}",
            code="no-pool",
            names=filter(None, [name]),
        )
    if _pools:
        raise PoolError(
            f"{problem}; available: {', '.join(_pools)}; {start_line(name)} makes it",
            code="no-pool",
            names=filter(None, [name]),
        )
    raise PoolError(
        f"{problem}: make one with {start_line(name)}", code="no-pool", names=filter(None, [name])
    )


def start_line(name: str | None = None) -> str:
    """Return the line that starts a small pool on this machine, for messages."""
    return f"%sky_pool {f'{name} ' if name else ''}--ranks 2 --plugin torch"


def is_registered(name: str) -> bool:
    """Return True if a pool of this name is running, or has ended by itself."""
    return name in _pools


def pools() -> list[Pool]:
    """List the running pools, the most recently used last."""
    return [pool for pool in _pools.values() if pool.ended is None]


def ended_pools() -> list[Pool]:
    """List the pools that have ended by themselves and were not recreated."""
    return [pool for pool in _pools.values() if pool.ended is not None]


def register(pool: Pool) -> None:
    """Register a pool with this process as the most recently used one."""
    logger.debug("pool is registered: pool=%s job=%s", pool.name, pool.job_id)
    _pools[pool.name] = pool
    atexit.unregister(at_exit)
    # Registered last, to be called first: ipykernel's shutdown may hang for seconds, during which
    # Jupyter kills the process.
    atexit.register(at_exit)


def pop(name: str) -> Pool | None:
    """Remove the pool of this name to make room for another, and return it, or None."""
    return _pools.pop(name, None)


def unregister(pool: Pool) -> None:
    """Unregister a pool, and change nothing on its nodes. Safe to call twice."""
    # by then another pool may have the name
    if _pools.get(pool.name) is pool:
        del _pools[pool.name]


def mark_used(pool: Pool) -> None:
    """Make a pool the most recently used one."""
    _pools[pool.name] = _pools.pop(pool.name)


def last_lines(name: str | None) -> tuple[str, dict[int, str]] | None:
    """Return the name of an ended pool, and the last lines of each rank's log.

    Args:
        name: name of the pool; None for the one that ended last.

    Returns:
        Name, and rank → lines; None if the name matches a running pool, or if nothing was kept.
    """
    running = pools()
    # the agents of a running pool have the logs, up to the newest line
    if any(name in (None, pool.name) for pool in running):
        return None
    logs = {**_last_lines, **{pool.name: pool.last_lines for pool in ended_pools()}}
    pool_name = next(reversed(logs), None) if name is None else name
    return (pool_name, logs[pool_name]) if pool_name in logs and logs[pool_name] else None


def unregister_closed(pool: Pool) -> None:
    """Unregister a pool that has released everything; keep its last log lines."""
    if pool.last_lines:
        # removed first, so that the name moves to the end: the oldest names are dropped below
        _last_lines.pop(pool.name, None)
        _last_lines[pool.name] = pool.last_lines
        for name in list(_last_lines)[:-KEPT_POOLS]:
            del _last_lines[name]
    if folder := os.environ.get(NOTEBOOK_JOB):
        # for the process of the notebook job: the notebook itself has ended the pool
        Path(folder, NOTEBOOK_CLOSED).touch()
    # The record of a pool that another notebook has taken is that notebook's. That of a pool with
    # unreached machines is needed to end them later.
    if pool.plan.outlives and not pool.unreached and records.is_own(pool.job_id):
        records.remove(pool.job_id)
    unregister(pool)


def close_all(
    pools: Iterable[Pool], on_closed: Callable[[Pool], object] = lambda pool: None
) -> None:
    """Close each of these pools, even if others fail.

    Args:
        on_closed: called after each pool that was closed.

    Raises:
        PoolError: some pools were not closed; the message lists what was not released.
    """
    problems: list[str] = []
    interrupt: BaseException | None = None
    # a copy: closing a pool removes it from the registry
    for pool in list(pools):
        try:
            pool.close()
            on_closed(pool)
        except PoolError as problem:
            problems.append(str(problem))
        # raised once all pools were told to end: the user does not want to wait, and no machine may
        # keep running because of that
        except KeyboardInterrupt as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt
    if problems:
        raise PoolError("; ".join(problems), code="not-released")


def at_exit() -> None:
    """Leave or close all pools when this process exits normally.

    Pools for which `Pool.stays` is true are left running; the others are closed.
    """
    # Jupyter sends SIGTERM 2.5 s after its shutdown request. SIGTERM would end this process before
    # the nodes of its pools have been told to end.
    if _pools:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    to_leave = [pool for pool in _pools.values() if pool.stays(live.is_restarting())]
    to_close = [pool for pool in _pools.values() if pool not in to_leave]
    # leaving takes milliseconds, and closing may take until Jupyter kills the process
    steps: list[Callable[[], None]] = [
        *(pool.leave for pool in to_leave),
        lambda: close_all(to_close),
    ]
    for step in steps:
        try:
            step()
        except PoolError as problem:
            print_note(str(problem))
