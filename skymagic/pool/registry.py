"""All pools of this process, by name: the one used last comes last."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skymagic import providers
from skymagic.display import live, starting
from skymagic.display.panel import PoolView
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, PoolError, ProvisionError, RequestError
from skymagic.plan.planning import fits
from skymagic.plan.plans import cost_words
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import count
from skymagic.pool import Pool, keys, readers, records, reuse, stopped, surveys, view
from skymagic.pool.attaching import Unfinished
from skymagic.pool.reader import Reader
from skymagic.pool.states import State
from skymagic.providers import Survey

DEFAULT_NAME = "main"
_pools: dict[str, Pool] = {}
KEPT_POOLS = 4
"""How many pools that have ended leave the ends of their ranks' logs here."""
_last_lines: dict[str, dict[int, str]] = {}


def find(name: str | None = None, *, ended: bool = False) -> Pool:
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
    if reader := readers.find(name):
        raise PoolError(reader.refusal())
    if record := stopped.named(name):
        raise PoolError(f"pool {name!r}: {records.stopped_words(record)}")
    there = f"there are {', '.join(_pools)}" if _pools else "there is none"
    wanted = f"there is no pool {name!r}; {there}" if name else "there is no pool yet"
    if name and (nearest := did_you_mean(name, _pools)):
        raise PoolError(f"{wanted}{nearest}")
    raise PoolError(f"{wanted}: make one with %sky_pool {f'{name} ' if name else ''}--nodes 2 --plugin torch")


def readable(name: str | None = None) -> Pool | Reader:
    """The same, or a pool that is only read here. Raises as `find` does."""
    reader = None if name in _pools or (name is None and _pools) else readers.find(name)
    return find(name) if reader is None else reader


def known(name: str) -> bool:
    """Whether a pool of this name runs, or has ended by itself."""
    return name in _pools


def every() -> list[Pool]:
    """All pools, the one used last at the end; not those that have ended by themselves."""
    return [pool for pool in _pools.values() if pool.ended is None]


def ended() -> list[Pool]:
    """The pools that have ended by themselves, and were not made anew."""
    return [pool for pool in _pools.values() if pool.ended is not None]


def ensure(
    request: PoolRequest,
    namespace: dict[str, Any],
    defaults: Defaults,
    tell: Callable[[str], None],
    *,
    resize: bool = False,
    resume: Callable[[Pool, Unfinished], object] = lambda pool, run: None,
    start: bool = False,
) -> Pool:
    """The pool that a request describes: the running one where it fits, also one that is rented and was left by another
    notebook; else a new one.

    Args:
        tell: told in a line what is done.
        resize: a running pool that differs in its number of nodes alone gets the other number.
        resume: called with each run of a pool that was left whose end its user has not seen.
        start: make it now, also where the request is lazy; else such a pool is declared, and `ready` makes it.

    Raises:
        RequestError: all mistakes of the request; or a pool of this name runs and is another.
        PoolError: another notebook rents a pool of this name.
    """
    name = request.name or DEFAULT_NAME
    made = [pool for pool in every() if pool.state is not State.DECLARED]
    there = next((pool for pool in made if pool.name == name), None)
    if request.name is None:
        there = next((pool for pool in reversed(made) if not fits(request, pool.plan)), there)
        waiting = [pool for pool in every() if pool not in made and not fits(request, pool.plan)]
        if there is None and waiting:
            return ready(waiting[-1].name, tell)
    differences = fits(request, there.plan) if there is not None else []
    if there is not None and not differences:
        use(there)
        return there
    if there is not None and resize and there.ended is None:
        # the same request, where nothing is said of how many nodes there are, and which
        others = replace(request, nodes=None, hosts=(), stated=request.given() - {"nodes", "hosts"})
        if not fits(others, there.plan):
            return resized(there, request, tell)
    by_name = not request.given() and stopped.named(request.name) is not None  # which says all else
    request = surveys.with_imports(providers.placed(request), namespace, defaults)
    if there is None and (request.provider in reuse.RENTED or by_name):
        found = _found_again(request, name, namespace, defaults, tell, start)
        if found is not None:
            for run in found[1]:
                resume(found[0], run)
            return found[0]
    provider, survey = surveys.surveyed(request, tell)
    try:
        if there is not None:
            raise RequestError(
                [f"pool {there.name!r} runs already and {reason}" for reason in differences]
                + [f"end it first (%sky_down {there.name}), or give the new one another name (%sky_pool NAME …)"]
            )
        if request.lazy and not start:
            return _declared(Pool(name, provider, survey, namespace, defaults, drop), survey, tell)
        surveys.confirm(survey.plan)
        return _make(Pool(name, provider, survey, namespace, defaults, drop), tell)
    except BaseException:
        survey.close()
        raise


def ready(name: str | None, tell: Callable[[str], None]) -> Pool:
    """The pool that a cell runs on: of this name, or the one used last. One that is lazy is made where nothing of it runs.

    Raises:
        PoolError: there is none, or it has ended by itself and is not lazy.
        RequestError: the user did not want to pay for it, or there was nobody to ask.
    """
    pool = find(name, ended=True)
    if pool.plan.request.lazy and (pool.state is State.DECLARED or pool.ended is not None):
        if pool.ended is not None:
            tell(f"{pool.ended}, and the variables of its ranks are gone")
        request = replace(pool.plan.request, name=pool.name)
        return ensure(request, pool.namespace, pool.defaults, tell, start=True)
    pool.check_ended()
    return pool


def _declared(pool: Pool, survey: Survey, tell: Callable[[str], None]) -> Pool:
    """A pool of which nothing is made yet, in the place of one that has ended."""
    pool.declare()
    survey.close()
    _pools.pop(pool.name, None)
    _pools[pool.name] = pool
    cost = f", for {cost_words(pool.plan.price, pool.plan.priced)}" if pool.plan.region else ""
    tell(f"pool {pool.name!r} is declared: its next cell starts {pool.plan.size} on {', '.join(pool.plan.hosts)}{cost}")
    return pool


def resized(pool: Pool, request: PoolRequest, tell: Callable[[str], None]) -> Pool:
    """A running pool with the nodes that a request names: in place on this machine, made anew elsewhere.

    Raises:
        RequestError: there is no room for them, and nothing has changed.
    """
    hosts = request.hosts or pool.plan.request.hosts
    wanted = replace(pool.plan.request, nodes=request.nodes, hosts=hosts, yes=request.yes)
    provider = providers.serving(wanted)
    survey = provider.plan(wanted, tell)
    plan = survey.plan
    try:
        surveys.confirm(plan)
        nodes = count(plan.topology.nodes, "rank" if plan.counted_in_ranks else "node")
        use(pool)
        if not plan.remote:
            tell(f"pool {pool.name!r} gets {nodes} instead of {pool.plan.topology.nodes} …")
            tell(pool.resize(plan))
            survey.close()
            pool.keep_key()
            return pool
        tell(f"pool {pool.name!r} is made anew with {nodes}: the ranks' variables are gone")
        pool.close()
        return _make(Pool(pool.name, provider, survey, pool.namespace, pool.defaults, drop), tell)
    except BaseException:
        survey.close()
        raise


def _make(pool: Pool, tell: Callable[[str], None]) -> Pool:
    if pool.plan.outlives:
        provider = pool.plan.request.provider if pool.plan.remote else pool.plan.provider
        keep = reuse.claim if provider in reuse.RENTED else records.write
        keep(records.PoolRecord(pool.name, pool.job_id, provider, pool.plan.hosts, str(Path.cwd())))
    before = _pools.pop(pool.name, None)
    if before is not None and before.ended is not None and not before.plan.request.lazy:
        tell(f"{before.ended}, and its variables are gone")
    with starting.shown(tell, partial(_picture, pool), drawn=tell is print_note) as say:
        say(f"{pool.plan.starting} …")
        _pools[pool.name] = pool
        try:
            pool.start(say)
        except BaseException:
            drop(pool)
            raise
        pool.keep_key()
        say(f"ready in {pool.start_seconds:.1f} s")
    return pool


def _picture(pool: Pool, steps: Mapping[str, starting.StartStep]) -> PoolView:
    return view.starting(pool, pool.status(), pool.start_seconds, steps)


def _found_again(
    request: PoolRequest,
    name: str,
    namespace: dict[str, Any],
    defaults: Defaults,
    tell: Callable[[str], None],
    start: bool,
) -> tuple[Pool, list[Unfinished]] | None:
    """A rented pool that another notebook has left, attached to, or one that was stopped, started again; None where there is none.
    Raises as `ensure`."""
    record = reuse.left(request, name, {pool.job_id for pool in _pools.values()})
    if record is None or (record.stopped and request.lazy and not start):
        return None
    try:
        if record.stopped:
            return _started_again(record, request, namespace, defaults, tell), []
        return attach(record.job_id, namespace, defaults, tell)
    except PoolError as problem:
        kind = next((one.kind for one in (problem, problem.__cause__) if isinstance(one, CloudError)), "")
        if kind == "missing" and request.given():
            tell(f"{problem}: it is rented anew")
            return None
        if kind == "stopped":  # by who was killed then, or in the console
            return _started_again(record, request, namespace, defaults, tell), []
        if record.stopped:
            raise
        raise PoolError(f"{problem}\n  %sky_down {record.name} ends it; the same line rents it anew then") from problem


def _started_again(
    record: records.PoolRecord,
    request: PoolRequest,
    namespace: dict[str, Any],
    defaults: Defaults,
    tell: Callable[[str], None],
) -> Pool:
    """A pool whose machines are stopped, started again under the name of its job: by that its machines know their agents.

    Raises:
        RequestError: the user does not want to pay for it, or there is nobody to ask.
        ProvisionError: it does not start; its machines are stopped as they were.
    """
    key, provider, survey = stopped.surveyed(record, request, namespace, defaults, tell)
    return _make(Pool(key.name, provider, survey, namespace, defaults, drop, key.job_id), tell)


def attach(
    name: str,
    namespace: dict[str, Any],
    defaults: Defaults,
    tell: Callable[[str], None],
    *,
    take_over: bool = False,
) -> tuple[Pool, list[Unfinished]]:
    """A pool that another notebook of this user has made from here, in that one's place; and the runs that its user has to hear of.

    Args:
        name: the pool's, or its job id.
        take_over: whether that notebook may be alive: it loses the pool.

    Raises:
        PoolError: there is no such pool, its notebook is alive, its key is not to be used, or it is gone; says what to do.
    """
    record = records.named(name)
    # of two notebooks that attach at once the later one finds that the other has the pool
    with records.locked(record.job_id, lambda: tell(f"another notebook attaches to pool {record.name!r} now …")):
        pool, found = _attached(name, namespace, defaults, take_over)
    tell(f"attached to pool {pool.name!r} on {', '.join(pool.plan.hosts)} in {pool.start_seconds:.1f} s")
    for note in pool.take_notes():
        tell(note)
    return pool, found


def _attached(
    name: str, namespace: dict[str, Any], defaults: Defaults, take_over: bool
) -> tuple[Pool, list[Unfinished]]:
    record = records.named(name)
    if any(pool.job_id == record.job_id for pool in _pools.values()):
        raise PoolError(f"pool {record.name!r} is this notebook's already")
    if record.name in _pools:
        raise PoolError(
            f"this notebook has a pool {record.name!r} of its own: end that first (%sky_down {record.name})"
        )
    if not (take_over or records.left(record)):
        raise PoolError(
            f"{records.words(record)}: end that notebook, read what it does (%sky_attach {name}), or take the pool away from it: "
            f"%sky_attach {name} --take-over"
        )
    key = keys.attachable(record.job_id)
    provider = readers.attachable(key)
    try:
        survey, nodes = provider.attach(key.plan, key.accesses)
        pool = Pool(key.name, provider, survey, namespace, defaults, drop, key.job_id)
        found = pool.attach(nodes, key)
    except (PoolError, ProvisionError) as problem:
        if isinstance(problem, CloudError) and problem.kind == "missing":
            records.remove(record.job_id)
        raise PoolError(f"pool {key.name!r} cannot be attached: {problem}") from problem
    readers.stop(pool.name)
    _pools[pool.name] = pool
    records.write(records.taken(record))
    return pool, found


def adopt(pool: Pool) -> None:
    """A pool that was attached to in another way is one of this process's, and the one used last."""
    _pools[pool.name] = pool


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
    running = every()
    if any(name in (None, pool.name) for pool in running):
        return None
    over = {**_last_lines, **{pool.name: pool.last_lines for pool in ended()}}
    chosen = next(reversed(over), None) if name is None else name
    return (chosen, over[chosen]) if chosen in over and over[chosen] else None


def drop(pool: Pool) -> None:
    """Forget a pool of which nothing is left; its last lines are kept."""
    if pool.last_lines:
        _last_lines.pop(pool.name, None)
        _last_lines[pool.name] = pool.last_lines
        for name in list(_last_lines)[:-KEPT_POOLS]:
            del _last_lines[name]
    if (monthly := pool.survey.monthly) is not None:
        records.stop(pool.job_id, monthly)
    elif pool.plan.outlives and not pool.unreached and records.own(pool.job_id):
        records.remove(pool.job_id)
    forget(pool)


def close(pools: Iterable[Pool], done: Callable[[Pool], object] = lambda pool: None) -> None:
    """End these pools, each of them whatever became of the others.

    Args:
        done: called with each pool that has ended as it should.

    Raises:
        PoolError: not all was released; names it.
    """
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
    restart = live.restarting()
    for pool in [one for one in _pools.values() if one.stays(restart)]:
        _pools.pop(pool.name)
        try:
            pool.leave()
        except PoolError as problem:
            print_note(str(problem))
    readers.stop_all()
    try:
        close(_pools.values())
    except PoolError as problem:
        print_note(str(problem))


atexit.register(at_exit)
