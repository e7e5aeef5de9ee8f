"""All pools of this process, by name: the one used last comes last."""

from __future__ import annotations

import atexit
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

_pools: dict[str, Pool] = {}
KEPT_POOLS = 4
"""How many pools that have ended leave the ends of their ranks' logs here."""
_last_lines: dict[str, dict[int, str]] = {}


def pool_named(name: str | None = None, *, ended: bool = False) -> Pool:
    """The pool of this name, or the one used last.

    Args:
        ended: also one that has ended by itself.

    Raises:
        PoolError: there is none, or it has ended by itself; the message says how to make one.
    """
    if name in _pools or (name is None and _pools):
        pool = _pools[name] if name is not None else next(reversed(_pools.values()))
        if not ended:
            pool.check_ended()
        return pool
    wanted = f"there is no pool {name!r}" if name else "there is no pool yet"
    if name and (nearest := did_you_mean(name, _pools)):
        raise PoolError(f"{wanted}; available: {', '.join(_pools)}{nearest}")
    if _pools:
        raise PoolError(f"{wanted}; available: {', '.join(_pools)}; {start_line(name)} makes it")
    raise PoolError(f"{wanted}: make one with {start_line(name)}")


def start_line(name: str | None = None) -> str:
    """Return the line that starts a small pool on this machine, for messages."""
    return f"%sky_pool {f'{name} ' if name else ''}--ranks 2 --plugin torch"


def known(name: str) -> bool:
    """Whether a pool of this name runs, or has ended by itself."""
    return name in _pools


def pools() -> list[Pool]:
    """All pools, the one used last at the end; not those that have ended by themselves."""
    return [pool for pool in _pools.values() if pool.ended is None]


def ended_pools() -> list[Pool]:
    """The pools that have ended by themselves, and were not made anew."""
    return [pool for pool in _pools.values() if pool.ended is not None]


def adopt(pool: Pool) -> None:
    """A pool is one of this process's from now on, and the one used last."""
    _pools[pool.name] = pool
    atexit.unregister(at_exit)
    atexit.register(
        at_exit
    )  # called first: ipykernel's end may hang for seconds, and Jupyter kills it meanwhile


def displace(name: str) -> Pool | None:
    """Take out the pool of this name, for another one comes in its place; None where there is none."""
    return _pools.pop(name, None)


def forget(pool: Pool) -> None:
    """A pool that was left is none of this process's any more; twice is safe."""
    if _pools.get(pool.name) is pool:
        del _pools[pool.name]


def use(pool: Pool) -> None:
    """Make a pool the one used last."""
    _pools[pool.name] = _pools.pop(pool.name)


def last_lines(name: str | None) -> tuple[str, dict[int, str]] | None:
    """(name, by rank the end of its log) of a pool that is over: of this name, or the one that ended last.

    None where a pool runs that is meant, or nothing is kept.
    """
    running = pools()
    if any(name in (None, pool.name) for pool in running):
        return None
    over = {**_last_lines, **{pool.name: pool.last_lines for pool in ended_pools()}}
    chosen = next(reversed(over), None) if name is None else name
    return (chosen, over[chosen]) if chosen in over and over[chosen] else None


def drop(pool: Pool) -> None:
    """Forget a pool of which nothing is left; its last lines are kept."""
    if pool.last_lines:
        _last_lines.pop(pool.name, None)
        _last_lines[pool.name] = pool.last_lines
        for name in list(_last_lines)[:-KEPT_POOLS]:
            del _last_lines[name]
    if folder := os.environ.get(NOTEBOOK_JOB):  # the job goes on without its pool
        Path(folder, NOTEBOOK_CLOSED).touch()
    if pool.plan.outlives and not pool.unreached and records.own(pool.job_id):
        records.remove(pool.job_id)
    forget(pool)


def close(pools: Iterable[Pool], done: Callable[[Pool], object] = lambda pool: None) -> None:
    """End these pools, each of them whatever became of the others. Raises PoolError: not all was released; names it."""
    problems: list[str] = []
    interrupt: BaseException | None = None
    for pool in list(pools):
        try:
            pool.close()
            done(pool)
        except PoolError as problem:
            problems.append(str(problem))
        except KeyboardInterrupt as stop:
            interrupt = interrupt or stop
    if interrupt is not None:
        raise interrupt
    if problems:
        raise PoolError("; ".join(problems))


def at_exit() -> None:
    """The orderly end of this process: pools that outlive it are left where they were made for that, are at work, or where a kernel comes
    in its place; others end."""
    if _pools:  # Jupyter's SIGTERM comes 2.5 s after its request to end: it would end this process before its nodes have heard of theirs
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    staying = [pool for pool in _pools.values() if pool.stays(live.restarting())]
    ending = [pool for pool in _pools.values() if pool not in staying]
    steps: list[Callable[[], None]] = [*(pool.leave for pool in staying), lambda: close(ending)]
    for step in steps:
        try:
            step()
        except PoolError as problem:
            print_note(str(problem))
