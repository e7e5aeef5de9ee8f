"""Start plans: decide what a request for a pool becomes, and change nothing.

A start plan is a value that can be printed and compared, and that `pool.launch` carries out::

    a running pool of this notebook fits ──────────▶ Reuse    or differs in its nodes ──▶ Resize
    a pool that another notebook left fits ────────▶ Attach
    no pool fits ──────────────────────────────────▶ Make     or later, with --lazy ────▶ Declare
    another pool has the name ─────────────────────▶ Refuse

`Attach` relies on local records: the machines may be gone by now, and `after_refusal` decides
what to do then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from skymagic.errors import PoolError, RequestError
from skymagic.plan.planning import fits
from skymagic.plan.plans import Plan
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count
from skymagic.pool import keys, records
from skymagic.pool.records import RENTED, PoolRecord
from skymagic.pool.status import SharedStatus, State

DEFAULT_NAME = "main"
OTHER_NAME = "or give the new one another name (%sky_pool NAME …)"


@dataclass(frozen=True)
class Reuse:
    """A running pool of this notebook fits."""

    pool: SharedStatus


@dataclass(frozen=True)
class Resize:
    """A pool of this notebook fits except for its number of nodes.

    `request` is the pool's own request with the new number.
    """

    pool: SharedStatus
    request: PoolRequest


@dataclass(frozen=True)
class Attach:
    """A rented pool that its notebook has left fits."""

    record: PoolRecord
    request: PoolRequest


@dataclass(frozen=True)
class Declare:
    """A pool that its first cell will make."""

    name: str
    request: PoolRequest


@dataclass(frozen=True)
class Make:
    """A new pool."""

    name: str
    request: PoolRequest


@dataclass(frozen=True)
class Refuse:
    """Another pool has the name.

    Attributes:
        mistakes: the obstacle, and what to do.
        busy: True if the obstacle is the other pool's state, not the request.
    """

    request: PoolRequest
    mistakes: tuple[str, ...]
    busy: bool = False

    def error(self) -> RequestError | PoolError:
        """Return the error that refuses the request."""
        if self.busy:
            return PoolError(
                "; ".join(self.mistakes), code="pool-exists", names=[self.request.name]
            )
        return RequestError(list(self.mistakes))


StartPlan = Reuse | Resize | Attach | Declare | Make | Refuse


def start_plan(
    request: PoolRequest,
    own: Sequence[SharedStatus],
    recorded: Iterable[PoolRecord] = (),
    *,
    allocate: Callable[[PoolRequest], PoolRequest] = lambda request: request,
    plan_of: Callable[[PoolRecord], Plan] = lambda record: keys.read(record.job_id).plan,
    runs: Callable[[PoolRecord], bool] = lambda record: True,
    resize: bool = False,
    start: bool = False,
) -> StartPlan:
    """Decide what a request becomes.

    Args:
        own: the pools of this notebook that have not ended, the most recently used last.
        recorded: pools of other notebooks, the newest first; read only if no own pool fits.
        allocate: chooses the provider of a request; called only if no own pool is reused, because
            it inspects this machine.
        plan_of: returns the plan that a recorded pool was made from, or raises PoolError.
        runs: returns True if a pool that its notebook has left still runs; called only if its name
            collides, because it may query hosts.
        resize: give a running pool that differs only in its number of nodes the requested number.
        start: make the pool now even if the request is lazy.
    """
    running = running_pool(request, own)
    # A line without a name means the pool that the user has declared, if it fits: a request with
    # fewer options, as %%sky_broadcast has them, must not make a second pool.
    if request.name is None and running is None:
        declared = [
            pool for pool in own if pool.state is State.DECLARED and not fits(request, pool.plan)
        ]
        if declared:
            declared_request = replace(declared[-1].plan.request, name=declared[-1].name)
            return start_plan(
                declared_request, own, recorded, allocate=allocate, runs=runs, start=True
            )
    name = request.name or DEFAULT_NAME
    # From here on the request needs a provider, and to choose one inspects this machine. Not
    # before: this function runs for each cell, and mostly returns a running pool.
    if running is None:
        request = allocate(request)
        return _find_elsewhere(request, name, recorded, plan_of, runs) or _new(request, name, start)
    differences = fits(request, running.plan)
    if not differences:
        return Reuse(running)
    # Only if the size is all that differs: whether the ranks' variables are worth another image or
    # other GPUs is for the user to decide.
    if resize and not fits(_without_size(request, running.plan), running.plan):
        return Resize(running, _with_nodes_of(request, running))
    problem = f"pool {running.name!r} is already running"
    return Refuse(allocate(request), _explain_conflict(problem, running.name, differences))


def after_refusal(step: Attach, kind: str, start: bool) -> StartPlan | None:
    """Decide what to do if a provider refuses to attach a pool.

    Args:
        kind: `CloudError.kind`; "" for another error.
        start: as in `start_plan`.

    Returns:
        None if nothing can be done, and the refusal is an error.
    """
    # A bare name means that pool and no other one; only a request that states machines can make
    # them.
    if kind == "missing" and step.request.stated_fields():
        return _new(step.request, step.request.name or DEFAULT_NAME, start)
    return None


def step_text(step: StartPlan, plan: Plan) -> str:
    """Return a start plan as --dry-run prints it."""
    match step:
        case Reuse(pool):
            heading = f"pool {pool.name!r} is already running and fits: it is used"
        case Resize(pool, _):
            verb = "is started again with" if plan.remote else "gets"
            heading = f"pool {pool.name!r} {verb} {size_words(pool.plan, plan)}"
        case Attach(record, _):
            heading = f"attaches to a pool that was left: {records.record_text(record)}"
        case Declare(name, _):
            heading = f"pool {name!r} is declared: its next cell starts it"
        case Refuse():
            heading = "\n".join(f"not made: {mistake}" for mistake in step.mistakes)
        case Make():
            return plan.text()
    return f"{heading}\n{plan.text()}"


def running_pool(request: PoolRequest, own: Sequence[SharedStatus]) -> SharedStatus | None:
    """Return the running pool that fits a request, else the one of its name, which may not fit."""
    running = [pool for pool in own if pool.state is not State.DECLARED]
    same_name = next(
        (pool for pool in running if pool.name == (request.name or DEFAULT_NAME)), None
    )
    if request.name is not None:
        return same_name
    # Without a name any pool that fits will do, the most recently used one first. If none fits, the
    # one of the default name is returned, because the new pool could not have that name.
    return next((pool for pool in reversed(running) if not fits(request, pool.plan)), same_name)


def size_words(before: Plan, after: Plan) -> str:
    """Compare two plans' sizes: "4 nodes instead of 2"."""
    in_ranks = before.counted_in_ranks and after.counted_in_ranks
    old, new = (
        plan.topology.world_size if in_ranks else plan.topology.nodes for plan in (before, after)
    )
    return f"{count(new, 'rank' if in_ranks else 'node')} instead of {old}"


def _new(request: PoolRequest, name: str, start: bool) -> Declare | Make:
    return Declare(name, request) if request.lazy and not start else Make(name, request)


def _without_size(request: PoolRequest, plan: Plan) -> PoolRequest:
    """Drop the number and the names of the nodes from a request.

    --ranks is a number of both nodes and processes.
    """
    # on this machine, --ranks N sets both `nodes` and `procs_per_node`
    is_ranks = not plan.remote and request.nodes is not None
    size = {"nodes", "hosts", *({"procs_per_node"} if is_ranks else ())}
    ranks = None if is_ranks else request.procs_per_node
    return replace(
        request, nodes=None, procs_per_node=ranks, hosts=(), stated=request.stated_fields() - size
    )


def _with_nodes_of(request: PoolRequest, pool: SharedStatus) -> PoolRequest:
    """Return a pool's request with the nodes of another request."""
    own_request = pool.plan.request
    return replace(
        own_request,
        nodes=request.nodes,
        procs_per_node=request.procs_per_node or own_request.procs_per_node,
        hosts=request.hosts or own_request.hosts,
        yes=request.yes,
        # so that the GPUs which the pool itself holds count as free
        resizes=pool.job_id,
    )


def _find_elsewhere(
    request: PoolRequest,
    name: str,
    recorded: Iterable[PoolRecord],
    plan_of: Callable[[PoolRecord], Plan],
    runs: Callable[[PoolRecord], bool],
) -> Attach | Refuse | None:
    """Find another notebook's rented pool that fits a request, or one whose name collides, or None.

    A request without a name accepts any pool that fits, as it does among its own notebook's pools.
    """
    if request.provider not in RENTED:
        return _name_in_the_way(request, name, recorded, runs)
    candidates = [
        record
        for record in recorded
        if record.provider in RENTED and (record.name == name or request.name is None)
    ]
    # a generator: to read a plan opens a file and unpickles a key, and the first match is enough
    steps = (_of_recorded(request, name, record, plan_of) for record in candidates)
    return next((step for step in steps if step is not None), None)


def _name_in_the_way(
    request: PoolRequest,
    name: str,
    recorded: Iterable[PoolRecord],
    runs: Callable[[PoolRecord], bool],
) -> Refuse | None:
    """Refuse a second pool under a name that another notebook could attach to.

    A pool that ends with its notebook claims no name.
    """
    if request.is_here and not request.detached:
        return None
    for record in recorded:
        if record.name != name or record.provider in RENTED:
            continue
        if not records.is_left(record):
            return Refuse(request, (records.taken_message(record),), busy=True)
        # asks hosts or a scheduler, so it comes last
        if runs(record):
            return Refuse(request, (records.left_message(record),), busy=True)
    return None


def _of_recorded(
    request: PoolRequest, name: str, record: PoolRecord, plan_of: Callable[[PoolRecord], Plan]
) -> Attach | Refuse | None:
    """Decide what a rented pool is to a request: a match, an obstacle, or nothing."""
    # Under another name, an obstacle is none: the request then makes a pool of its own.
    has_name = record.name == name
    if not records.is_left(record):
        return Refuse(request, (records.taken_message(record),), busy=True) if has_name else None
    try:
        plan = plan_of(record)
    except PoolError as problem:
        mistake = f"{problem}; %sky_down {name} ends what is left of it"
        return Refuse(request, (mistake,), busy=True) if has_name else None
    differences = fits(request, plan)
    if not differences:
        return Attach(record, request)
    if not has_name:
        return None
    description = f"pool {name!r}, left by another notebook, is already running"
    return Refuse(request, _explain_conflict(description, name, differences))


def _explain_conflict(what: str, name: str, differences: Sequence[str]) -> tuple[str, str]:
    """Explain why a running pool of the requested name does not fit, and what to do about it.

    Args:
        what: the pool, as the beginning of a sentence.
        differences: as returned by `fits`.
    """
    *first, last = differences
    reasons = f"{', '.join(first)}, and {last}" if first else last
    return f"{what} and {reasons}", f"end it first (%sky_down {name}), {OTHER_NAME}"
