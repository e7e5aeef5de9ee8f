"""From a request to a pool: the one that runs and fits, one that another notebook has left, or a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skymagic import providers
from skymagic.display import panel
from skymagic.display.panel import PoolView, StartStep
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, PoolError, ProvisionError, RequestError
from skymagic.plan.planning import fits
from skymagic.plan.plans import cost_words
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.plan.units import count
from skymagic.pool import Pool, keys, readers, records, registry, reuse, stopped, surveys, view
from skymagic.pool.attaching import Unfinished
from skymagic.pool.states import State
from skymagic.providers import Survey

DEFAULT_NAME = "main"


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
    there = _there(request)
    if request.name is None and there is None:
        waiting = [pool for pool in registry.every() if pool.state is State.DECLARED and not fits(request, pool.plan)]
        if waiting:
            return ready(waiting[-1].name, tell)
    differences = fits(request, there.plan) if there is not None else []
    if there is not None and not differences:
        registry.use(there)
        return there
    if there is not None and resize and there.ended is None:
        # the same request, where nothing is said of how many nodes there are, and which; --ranks is a number of both
        size = {"nodes", "hosts", *(() if there.plan.remote or request.nodes is None else ("procs_per_node",))}
        others = replace(request, nodes=None, procs_per_node=None, hosts=(), stated=request.given() - size)
        if "procs_per_node" not in size:
            others = replace(others, procs_per_node=request.procs_per_node)
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
            return _declared(Pool(name, provider, survey, namespace, defaults, registry.drop), survey, tell)
        surveys.confirm(survey.plan)
        return _make(Pool(name, provider, survey, namespace, defaults, registry.drop), tell)
    except BaseException:
        survey.close()
        raise


def _there(request: PoolRequest) -> Pool | None:
    """The pool that runs and serves a request, or the one of its name, which may be another."""
    made = [pool for pool in registry.every() if pool.state is not State.DECLARED]
    named = next((pool for pool in made if pool.name == (request.name or DEFAULT_NAME)), None)
    if request.name is not None:
        return named
    return next((pool for pool in reversed(made) if not fits(request, pool.plan)), named)


def runs_already(request: PoolRequest) -> bool:
    """Whether a running pool serves a request, so that `ensure` makes none."""
    pool = _there(request)
    return pool is not None and not fits(request, pool.plan)


def ready(name: str | None, tell: Callable[[str], None]) -> Pool:
    """The pool that a cell runs on: of this name, or the one used last. One that is lazy is made where nothing of it runs.

    Raises:
        PoolError: there is none, or it has ended by itself and is not lazy.
        RequestError: the user did not want to pay for it, or there was nobody to ask.
    """
    pool = registry.find(name, ended=True)
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
    registry.displace(pool.name)
    registry.adopt(pool)
    cost = f", for {cost_words(pool.plan.price, pool.plan.priced)}" if pool.plan.region else ""
    tell(f"pool {pool.name!r} is declared: its next cell starts {pool.plan.size} on {', '.join(pool.plan.hosts)}{cost}")
    return pool


def resized(pool: Pool, request: PoolRequest, tell: Callable[[str], None]) -> Pool:
    """A running pool with the nodes that a request names: in place on this machine, made anew elsewhere.

    Raises:
        RequestError: there is no room for them, and nothing has changed.
    """
    hosts = request.hosts or pool.plan.request.hosts
    wanted = replace(
        pool.plan.request, nodes=request.nodes, procs_per_node=request.procs_per_node or pool.plan.request.procs_per_node,
        hosts=hosts, yes=request.yes, resizes=pool.job_id,
    )  # fmt: skip
    provider = providers.serving(wanted)
    survey = provider.plan(wanted, tell)
    plan = survey.plan
    try:
        surveys.confirm(plan)
        in_ranks = plan.counted_in_ranks and pool.plan.counted_in_ranks
        before, after = (one.topology.world_size if in_ranks else one.topology.nodes for one in (pool.plan, plan))
        nodes = count(after, "rank" if in_ranks else "node")
        registry.use(pool)
        if not plan.remote:
            tell(f"pool {pool.name!r} gets {nodes} instead of {before} …")
            for words in plan.gpu_words:
                tell(words)
            tell(pool.resize(plan))
            survey.close()
            pool.keep_key()
            return pool
        tell(f"pool {pool.name!r} is made anew with {nodes}: the ranks' variables are gone")
        pool.close()
        return _make(Pool(pool.name, provider, survey, pool.namespace, pool.defaults, registry.drop), tell)
    except BaseException:
        survey.close()
        raise


def _make(pool: Pool, tell: Callable[[str], None]) -> Pool:
    provider = pool.plan.request.provider if pool.plan.remote else pool.plan.provider
    keep = reuse.claim if provider in reuse.RENTED else records.write if pool.plan.outlives else records.note_local
    if pool.plan.outlives or provider == "local":
        keep(records.PoolRecord(pool.name, pool.job_id, provider, pool.plan.hosts, str(Path.cwd())))
    before = registry.displace(pool.name)
    if before is not None and before.ended is not None and not before.plan.request.lazy:
        tell(f"{before.ended}, and its variables are gone")
    with panel.shown_start(tell, partial(_picture, pool), drawn=tell is print_note) as say:
        say(f"{pool.plan.starting} …")
        registry.adopt(pool)
        try:
            pool.start(say)
        except BaseException:
            registry.drop(pool)
            raise
        pool.keep_key()
        say(f"ready in {pool.start_seconds:.1f} s")
    return pool


def _picture(pool: Pool, steps: Mapping[str, StartStep]) -> PoolView:
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
    record = reuse.left(request, name, {pool.job_id for pool in [*registry.every(), *registry.ended()]})
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
    return _make(Pool(key.name, provider, survey, namespace, defaults, registry.drop, key.job_id), tell)


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
    if any(pool.job_id == record.job_id for pool in [*registry.every(), *registry.ended()]):
        raise PoolError(f"pool {record.name!r} is this notebook's already")
    if registry.known(record.name):
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
        pool = Pool(key.name, provider, survey, namespace, defaults, registry.drop, key.job_id)
        found = pool.attach(nodes, key)
    except (PoolError, ProvisionError) as problem:
        if isinstance(problem, CloudError) and problem.kind == "missing":
            records.remove(record.job_id)
        raise PoolError(f"pool {key.name!r} cannot be attached: {problem}") from problem
    readers.stop(pool.name)
    registry.adopt(pool)
    records.write(records.taken(record))
    return pool, found
