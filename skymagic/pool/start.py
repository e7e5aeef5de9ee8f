"""What a request for a pool becomes, as a value that prints, compares and is carried out by `pool.making`; pure.

::

    a pool of this notebook serves it ─────────────▶ Reuse      or has another number of nodes ──▶ Resize
    one that its notebook has left serves it ──────▶ Attach
    none does ─────────────────────────────────────▶ Make       or later, with --lazy ───────────▶ Declare
    one of its name is in the way ─────────────────▶ Refuse

`Attach` goes by what is written here: the machines may be gone by now, and `instead` says what follows then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from skymagic.errors import PoolError, RequestError
from skymagic.plan.planning import fits
from skymagic.plan.plans import Plan
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count
from skymagic.pool import records
from skymagic.pool.records import RENTED, PoolRecord

DEFAULT_NAME = "main"
OTHER_NAME = "or give the new one another name (%sky_pool NAME …)"


@dataclass(frozen=True)
class OwnPool:
    """A pool of this notebook that has not ended.

    Attributes:
        declared: nothing of it is made yet (``--lazy``).
    """

    name: str
    job_id: str
    plan: Plan
    declared: bool = False


@dataclass(frozen=True)
class RecordedPool:
    """A rented pool of another notebook of this user.

    Attributes:
        left: its notebook is gone.
        plan: what it was made from; None where that is not known.
        problem: why not.
    """

    record: PoolRecord
    left: bool
    plan: Plan | None
    problem: str = ""


@dataclass(frozen=True)
class Reuse:
    """A pool of this notebook runs and fits."""

    pool: OwnPool


@dataclass(frozen=True)
class Resize:
    """A pool of this notebook fits but for its number of nodes; `wanted` is its own request with the other number."""

    pool: OwnPool
    wanted: PoolRequest


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
        mistakes: what is in the way, and what to do.
        busy: it is a matter of that pool, not of the request.
    """

    request: PoolRequest
    mistakes: tuple[str, ...]
    busy: bool = False

    def error(self) -> RequestError | PoolError:
        """The error that refuses the request."""
        return (
            PoolError("; ".join(self.mistakes)) if self.busy else RequestError(list(self.mistakes))
        )


StartPlan = Reuse | Resize | Attach | Declare | Make | Refuse


def start_plan(
    request: PoolRequest,
    own: Sequence[OwnPool],
    recorded: Iterable[RecordedPool] = (),
    *,
    place: Callable[[PoolRequest], PoolRequest] = lambda request: request,
    runs: Callable[[PoolRecord], bool] = lambda record: True,
    resize: bool = False,
    start: bool = False,
) -> StartPlan:
    """What a request becomes.

    Args:
        own: the pools of this notebook, the one used last at the end.
        recorded: pools of other notebooks, the newest first; read only where no own pool serves the request.
        runs: whether a pool that its notebook has left still runs; called only where its name is in the way, for it may ask hosts.
        place: gives a request the provider that serves it; called only then, for it looks at this machine.
        resize: a running pool that differs in its number of nodes alone gets the other number.
        start: make it now, also where the request is lazy.
    """
    running = running_pool(request, own)
    if request.name is None and running is None:
        declared = [pool for pool in own if pool.declared and not fits(request, pool.plan)]
        if declared:
            asked = replace(declared[-1].plan.request, name=declared[-1].name)
            return start_plan(asked, own, recorded, place=place, runs=runs, start=True)
    name = request.name or DEFAULT_NAME
    if running is None:
        request = place(request)
        return _from_elsewhere(request, name, recorded, runs) or _new(request, name, start)
    differences = fits(request, running.plan)
    if not differences:
        return Reuse(running)
    if resize and not fits(_without_size(request, running.plan), running.plan):
        return Resize(running, _resized(request, running))
    what = f"pool {running.name!r} is already running"
    return Refuse(place(request), _in_the_way(what, running.name, differences))


def instead(step: Attach, kind: str, start: bool) -> StartPlan | None:
    """What follows where a provider refuses to attach a pool; None where nothing does, and it is an error.

    Args:
        kind: `CloudError.kind`; "" for another error. start: as of `start_plan`.
    """
    if kind == "missing" and step.request.given():
        return _new(step.request, step.request.name or DEFAULT_NAME, start)
    return None


def step_text(step: StartPlan, plan: Plan) -> str:
    """A start plan as --dry-run prints it."""
    match step:
        case Reuse(pool):
            heading = f"pool {pool.name!r} is already running and fits: it is used"
        case Resize(pool, _):
            how = "is started again with" if plan.remote else "gets"
            heading = f"pool {pool.name!r} {how} {size_words(pool.plan, plan)}"
        case Attach(record, _):
            heading = f"attaches to a pool that was left: {records.words(record)}"
        case Declare(name, _):
            heading = f"pool {name!r} is declared: its next cell starts it"
        case Refuse():
            heading = "\n".join(f"not made: {mistake}" for mistake in step.mistakes)
        case Make():
            return plan.text()
    return f"{heading}\n{plan.text()}"


def running_pool(request: PoolRequest, own: Sequence[OwnPool]) -> OwnPool | None:
    """The pool that runs and serves a request, or the one of its name, which may be another."""
    made = [pool for pool in own if not pool.declared]
    named = next((pool for pool in made if pool.name == (request.name or DEFAULT_NAME)), None)
    if request.name is not None:
        return named
    return next((pool for pool in reversed(made) if not fits(request, pool.plan)), named)


def size_words(before: Plan, after: Plan) -> str:
    """Two plans' sizes: "4 nodes instead of 2"."""
    in_ranks = before.counted_in_ranks and after.counted_in_ranks
    old, new = (
        plan.topology.world_size if in_ranks else plan.topology.nodes for plan in (before, after)
    )
    return f"{count(new, 'rank' if in_ranks else 'node')} instead of {old}"


def _new(request: PoolRequest, name: str, start: bool) -> Declare | Make:
    return Declare(name, request) if request.lazy and not start else Make(name, request)


def _without_size(request: PoolRequest, plan: Plan) -> PoolRequest:
    """The request where nothing is said of how many nodes there are, and which; --ranks is a number of both."""
    both = not plan.remote and request.nodes is not None
    size = {"nodes", "hosts", *({"procs_per_node"} if both else ())}
    ranks = None if both else request.procs_per_node
    return replace(
        request, nodes=None, procs_per_node=ranks, hosts=(), stated=request.given() - size
    )


def _resized(request: PoolRequest, pool: OwnPool) -> PoolRequest:
    """The request of a pool with the nodes that another one names."""
    made = pool.plan.request
    return replace(
        made, nodes=request.nodes, procs_per_node=request.procs_per_node or made.procs_per_node,
        hosts=request.hosts or made.hosts, yes=request.yes, resizes=pool.job_id,
    )  # fmt: skip


def _from_elsewhere(
    request: PoolRequest,
    name: str,
    recorded: Iterable[RecordedPool],
    runs: Callable[[PoolRecord], bool],
) -> Attach | Refuse | None:
    """A rented pool of another notebook that serves a request, or one whose name is in the way; None where there is none.

    A request without a name takes any that fits, as it does of the pools of its own notebook.
    """
    if request.provider not in RENTED:
        return _name_in_the_way(request, name, recorded, runs)
    candidates = [
        one
        for one in recorded
        if one.record.provider in RENTED and (one.record.name == name or request.name is None)
    ]
    steps = (_of_recorded(request, name, one) for one in candidates)
    return next((step for step in steps if step is not None), None)


def _name_in_the_way(
    request: PoolRequest,
    name: str,
    recorded: Iterable[RecordedPool],
    runs: Callable[[PoolRecord], bool],
) -> Refuse | None:
    """Refuse a second pool of a name under which another notebook could attach; a pool that ends with its notebook has none."""
    if request.here and not request.detached:
        return None
    for one in recorded:
        record = one.record
        if record.name != name or record.provider in RENTED:
            continue
        if not one.left:
            return Refuse(request, (records.taken_words(record),), busy=True)
        if runs(record):
            return Refuse(request, (records.left_words(record),), busy=True)
    return None


def _of_recorded(request: PoolRequest, name: str, one: RecordedPool) -> Attach | Refuse | None:
    """What a rented pool is to a request: the one to take, in its way, or nothing."""
    record, named = one.record, one.record.name == name
    if not one.left:
        return Refuse(request, (records.taken_words(record),), busy=True) if named else None
    if one.plan is None:
        left = f"{one.problem}; %sky_down {name} ends what is left of it"
        return Refuse(request, (left,), busy=True) if named else None
    differences = fits(request, one.plan)
    if not differences:
        return Attach(record, request)
    if not named:
        return None
    what = f"pool {name!r}, left by another notebook, is already running"
    return Refuse(request, _in_the_way(what, name, differences))


def _in_the_way(what: str, name: str, differences: Sequence[str]) -> tuple[str, str]:
    """Why a running pool does not serve a request of its name, and what to do about it.

    Args:
        what: the pool, as the beginning of a sentence.
        differences: as of `fits`.
    """
    *others, last = differences
    reasons = f"{', '.join(others)}, and {last}" if others else last
    return f"{what} and {reasons}", f"end it first (%sky_down {name}), {OTHER_NAME}"
