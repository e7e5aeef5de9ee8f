"""Make pools: carry out what `pool.start` decides for a request, and ask before money is spent."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skymagic import plugins, providers
from skymagic.cluster import Node
from skymagic.data.capture.loaded import imported_modules
from skymagic.data.namespace import Namespace
from skymagic.display import live, panel
from skymagic.display.live import ask_yes_no
from skymagic.display.panel import PoolView, StartStep
from skymagic.display.screen import print_note
from skymagic.display.text import connecting_words
from skymagic.errors import CloudError, PoolError, ProvisionError, RequestError, SkyError
from skymagic.plan.plans import Plan, cost_words
from skymagic.plan.requests import Defaults, PoolRequest, missing_secrets
from skymagic.pool import Pool, debugging, keys, messages, records, registry
from skymagic.pool.pool import keep_key
from skymagic.pool.records import RENTED, PoolRecord
from skymagic.pool.runs import UnfinishedRun
from skymagic.pool.start import (
    Attach,
    Declare,
    Make,
    Refuse,
    Resize,
    Reuse,
    StartPlan,
    after_refusal,
    size_words,
    start_plan,
    step_text,
)
from skymagic.pool.status import PoolEvent, State
from skymagic.providers import PoolLocation, Provider, Survey, head
from skymagic.providers.provider import Attachable
from skymagic.wire.processes import NOTEBOOK_JOB, NOTEBOOK_KERNEL
from skymagic.wire.record import answers, identity

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Reports progress in a line."""


def ensure(
    request: PoolRequest,
    namespace: Namespace,
    defaults: Defaults,
    tell: Tell,
    *,
    resize: bool = False,
    resume: Callable[[Pool, UnfinishedRun], object] = lambda pool, run: None,
    start: bool = False,
) -> Pool:
    """Return the pool that a request describes.

    This is the running pool if it fits, else a fitting rented pool that another notebook left, else
    a new pool.

    Args:
        tell: reports progress in a line.
        resize: give a running pool that differs only in its number of nodes the requested number.
        resume: called with each run of an attached pool whose end its user has not seen.
        start: make the pool now even if the request is lazy; otherwise a lazy pool is only
            declared, and `ready_pool` makes it.

    Raises:
        RequestError: all mistakes of the request; or a pool of this name is running and does not
            fit.
        PoolError: another notebook rents a pool of this name.
    """
    debugging.start()
    maker = Maker(namespace, defaults, tell)
    step = planned(request, resize=resize, start=start)
    logger.debug("request for a pool becomes: %s", type(step).__name__)
    # At most two rounds: only an `Attach` is followed by another step, which is never an `Attach`.
    while True:
        try:
            pool, unfinished = maker.carry_out(step)
            break
        except PoolError as problem:
            if not isinstance(step, Attach):
                raise
            # the record may be out of date: only the provider knows what is running
            # (`_attach` wraps the provider's error)
            kind = next(
                (
                    error.kind
                    for error in (problem, problem.__cause__)
                    if isinstance(error, CloudError)
                ),
                "",
            )
            following = after_refusal(step, kind, start)
            if following is None:
                remedy = f"%sky_down {step.record.name} ends it; then the same line rents it again"
                raise PoolError(str(problem), hint=remedy) from problem
            logger.warning("pool not attached, another way is taken: kind=%s", kind or "unknown")
            if kind == "missing":
                tell(f"{problem}: it is rented again")
            step = following
    for run in unfinished:
        resume(pool, run)
    return pool


def planned(request: PoolRequest, *, resize: bool = False, start: bool = False) -> StartPlan:
    """Decide what a request becomes, based on the running and the recorded pools.

    The options are those of `ensure`.

    Raises:
        PoolError: the notebook's working folder was deleted.
    """
    check_folder()
    return start_plan(
        request,
        own_pools(),
        recorded_pools(),
        allocate=providers.with_provider,
        runs=is_still_running,
        resize=resize,
        start=start,
    )


def check_folder() -> None:
    """Raise PoolError if this process's working folder was deleted.

    The folder is part of a pool's record, and modules are found relative to it.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise PoolError(
            "the notebook's working folder was deleted: go to another one with %cd FOLDER, "
            "then start the pool again",
            code="folder-deleted",
        ) from None


def own_pools() -> list[Pool]:
    """List this notebook's pools that have not ended, the most recently used last."""
    # Another thread may be ending a pool: such a pool serves no request, and does not block a new
    # pool of its name.
    return [pool for pool in registry.pools() if pool.state not in (State.STOPPING, State.STOPPED)]


def recorded_pools() -> Iterator[PoolRecord]:
    """Iterate over other notebooks' pools that this one could attach to, the newest first."""
    pools = [*registry.pools(), *registry.ended_pools()]
    # a pool that another notebook took from this one can be taken back
    own = {pool.job_id for pool in pools if not pool.taken_over}
    for record in reversed(records.readable_records()):
        if record.job_id in own:
            continue
        if record.provider not in RENTED and record.process == identity():
            continue  # this notebook ended it but could not reach all of its nodes
        yield record


def is_still_running(record: PoolRecord) -> bool:
    """Ask a pool's hosts or scheduler whether the pool still runs after its notebook has left it.

    Return False if that cannot be determined: a record may outlive its pool, and must not block the
    name forever.
    """
    try:
        # the daemon of the head, on this machine: there is no need to log in anywhere
        if record.provider == "local":
            return answers(f"{record.job_id}-0")
        pools = providers.find_pools(location_of(record)).pools
        return any(pool.job_id == record.job_id for pool in pools)
    except SkyError:
        return False


def location_of(record: PoolRecord) -> PoolLocation:
    """Return the location of a recorded pool."""
    if record.provider in ("local", "ssh"):
        return PoolLocation(hosts=record.hosts if record.provider == "ssh" else ())
    try:
        plan = keys.read(record.job_id).plan
    except PoolError:  # never ready, or made by another version: it may be in any region
        return PoolLocation(provider=record.provider)
    request = plan.request
    return PoolLocation(
        (), record.provider, request.login, request.cloud, (plan.region,) if plan.region else ()
    )


def preview(
    request: PoolRequest, namespace: Mapping[str, object], defaults: Defaults, tell: Tell
) -> str:
    """Describe what `ensure` would do, with the plan and the price, and start nothing.

    Raises RequestError with all mistakes of the request.
    """
    step = planned(request, resize=True)
    match step:
        case Reuse(pool):
            plan = pool.plan
        case Resize(_, wanted):
            plan = plan_of(wanted, tell)
        case Attach(record, _):
            plan = keys.read(record.job_id).plan
        case _:
            plan = plan_of(step.request, tell, namespace, defaults)
    return step_text(step, plan)


def plan_of(
    request: PoolRequest,
    tell: Tell,
    namespace: Mapping[str, object] = MappingProxyType({}),
    defaults: Defaults = Defaults(),  # noqa: B008  # it is frozen
) -> Plan:
    """Plan a new pool and start nothing. Raises RequestError with all mistakes of the request."""
    _, survey = survey_provider(
        with_imports(providers.with_provider(request), namespace, defaults), tell
    )
    # the plan is a value that outlives the survey's connections to hosts
    survey.close()
    return survey.plan


def has_running_pool(request: PoolRequest) -> bool:
    """Return True if a running pool serves a request, so that `ensure` makes none."""
    return isinstance(start_plan(request, own_pools()), Reuse)


def ready_pool(name: str | None, tell: Tell) -> Pool:
    """Return the pool that a cell runs on: the pool of this name, or the most recently used one.

    A lazy pool is made if it is not running.

    Raises:
        PoolError: the pool does not exist, or it has ended by itself and is not lazy.
        RequestError: the user declined the price, or there was no user to ask.
    """
    pool = registry.pool_named(name, ended=True)
    # not recreated under its name: it runs, and another notebook has it
    if pool.taken_over:
        pool.check_ended()
    if pool.plan.request.lazy and (pool.state is State.DECLARED or pool.ended is not None):
        if pool.ended is not None:
            tell(f"{pool.ended}, and the variables of its ranks are gone")
        request = replace(pool.plan.request, name=pool.name)
        return ensure(request, pool.namespace, pool.defaults, tell, start=True)
    pool.check_ended()
    return pool


@dataclass(frozen=True)
class Maker:
    """Carries out start plans for one notebook.

    Attributes:
        namespace: the notebook's variables.
        tell: reports progress in a line.
    """

    namespace: Namespace
    defaults: Defaults
    tell: Tell

    def carry_out(self, step: StartPlan) -> tuple[Pool, list[UnfinishedRun]]:
        """Carry out a start plan. Raises as `ensure` does.

        Returns:
            The pool, and its runs that the user must be informed of.
        """
        match step:
            case Reuse(own):
                pool = registry.pool_named(own.name)
                registry.mark_used(pool)
            case Resize(own, wanted):
                pool = self._resize(registry.pool_named(own.name), wanted)
            case Attach(record, _):
                return attach(record.job_id, self.namespace, self.defaults, self.tell)
            case Declare(name, request):
                pool = self._declare(name, request)
            case Make(name, request):
                pool = self._make_new(name, request)
            case Refuse():
                raise step.error()
        return pool, []

    def _make_new(self, name: str, request: PoolRequest) -> Pool:
        provider, survey = survey_provider(
            with_imports(request, self.namespace, self.defaults), self.tell
        )
        # once the pool has started, the survey and its connections are the pool's
        with _closed_on_failure(survey):
            confirm(survey.plan)
            return self._start_ranks(self._pool(name, provider, survey))

    def _declare(self, name: str, request: PoolRequest) -> Pool:
        """Declare a pool without making anything of it; it replaces an ended pool of this name."""
        # Surveyed now, so that mistakes and the price appear where the user has written them, and
        # again when the pool is made: by then, hosts or prices may have changed.
        provider, survey = survey_provider(
            with_imports(request, self.namespace, self.defaults), self.tell
        )
        with contextlib.closing(survey):
            pool = self._pool(name, provider, survey)
            pool.move(PoolEvent.DECLARE)
        registry.pop(pool.name)
        registry.register(pool)
        plan = pool.plan
        cost = f", for {cost_words(plan.price, plan.priced)}" if plan.region else ""
        self.tell(
            f"pool {name!r} is declared: its next cell starts {plan.size} on "
            f"{', '.join(plan.hosts)}{cost}"
        )
        return pool

    def _resize(self, pool: Pool, request: PoolRequest) -> Pool:
        """Give a running pool another number of nodes.

        Done in place on this machine, by recreating the pool elsewhere.

        Raises:
            RequestError: the nodes do not fit, and nothing has changed.
        """
        provider = providers.provider_for(request)
        survey = provider.plan(request, self.tell)
        plan = survey.plan
        with _closed_on_failure(survey):
            confirm(plan)
            registry.mark_used(pool)
            if not plan.remote:
                self.tell(f"pool {pool.name!r} gets {size_words(pool.plan, plan)} …")
                for text in plan.gpu_words:
                    self.tell(text)
                self.tell(pool.recovery.resize(plan))
                survey.close()
                keep_key(pool)
                return pool
            nodes = size_words(pool.plan, plan).partition(" instead")[0]
            self.tell(
                f"pool {pool.name!r} is recreated with {nodes}: the ranks' variables are gone"
            )
            # before the new one: it may need the same hosts, GPUs or quota
            pool.close(how=messages.WAS_RECREATED)
            return self._start_ranks(
                Pool(
                    pool.name,
                    provider,
                    survey,
                    pool.namespace,
                    pool.defaults,
                    registry.unregister_closed,
                )
            )

    def _pool(self, name: str, provider: Provider, survey: Survey) -> Pool:
        return Pool(
            name, provider, survey, self.namespace, self.defaults, registry.unregister_closed
        )

    def _start_ranks(self, pool: Pool) -> Pool:
        """Start a pool's ranks and register it with this notebook.

        The pool is recorded before its machines are requested.
        """
        provider = pool.plan.request.provider if pool.plan.remote else pool.plan.provider
        keep_record = (
            records.claim if provider in RENTED or pool.plan.outlives else records.note_local
        )
        # Before anything is requested: if this process dies now, the next one finds the machines by
        # the record, or learns from it that the pool is gone.
        if pool.plan.outlives or provider == "local":
            keep_record(
                PoolRecord(pool.name, pool.job_id, provider, pool.plan.hosts, str(Path.cwd()))
            )
        replaced = registry.pop(pool.name)
        if replaced is None or replaced.taken_over:
            pass
        elif replaced.ended is not None and not replaced.plan.request.lazy:
            self.tell(f"{replaced.ended}, and its variables are gone")
        is_drawn = self.tell is print_note and live.is_watched()
        with panel.start_panel(self.tell, partial(_picture, pool), drawn=is_drawn) as say:
            say(f"{pool.plan.starting} …")
            registry.register(pool)
            # Registered before its start: a process that exits meanwhile closes all registered
            # pools, and so releases machines that were just acquired.
            try:
                pool.start(say)
            except BaseException:
                registry.unregister_closed(pool)
                raise
            # only a ready pool can be attached
            keep_key(pool)
            say(f"ready in {pool.start_seconds:.1f} s")
        if is_drawn:
            pool.announced_in = live.request_id()
        return pool


def _picture(pool: Pool, steps: Mapping[str, StartStep]) -> PoolView:
    return messages.starting_view(pool, pool.status(), pool.start_seconds, steps)


@contextlib.contextmanager
def _closed_on_failure(survey: Survey) -> Iterator[None]:
    """Close the survey if the block fails."""
    try:
        yield
    except BaseException:
        survey.close()
        raise


def with_imports(
    request: PoolRequest, namespace: Mapping[str, object], defaults: Defaults
) -> PoolRequest:
    """Add the notebook's imported modules to a request for other machines."""
    if request.is_here or defaults.packages != "sync":
        return request
    return replace(request, imports=imported_modules(namespace, str(Path.cwd())))


def survey_provider(request: PoolRequest, tell: Callable[[str], None]) -> tuple[Provider, Survey]:
    """Survey the provider that serves a request. Raises RequestError with all mistakes."""
    mistakes = missing_secrets(request.secrets, os.environ)
    # Warn about modules in the working folder before code from them runs.
    names = {request.provider, *(spec.name for spec in request.plugins)} - {
        "auto",
        *providers.TABLE,
        *plugins.TABLE,
    }
    for warning in plugins.shadowing_packages(names, Path.cwd()) if names else ():
        tell(warning)
    provider = providers.provider_for(request)
    # All mistakes at once: the user corrects the line once.
    try:
        survey = provider.plan(request, tell)
    except RequestError as error:
        raise RequestError([*mistakes, *error.mistakes]) from None
    if mistakes:
        survey.close()
        raise RequestError(mistakes)
    if (apt := survey.plan.image.apt) and request.provider not in RENTED:
        tell(f"apt ({', '.join(apt)}) works on rented machines only: it is not installed here")
    return provider, survey


def confirm(plan: Plan) -> None:
    """Ask before money is spent or something unusual is made; with -y the plan has no question.

    Raises:
        RequestError: the user declined, or no user can answer.
    """
    if plan.question and not ask_yes_no(plan.question):
        raise RequestError(f"nothing was started: {plan.question}: add -y if you mean that")


def attach(
    name: str,
    namespace: Namespace,
    defaults: Defaults,
    tell: Callable[[str], None],
    *,
    take_over: bool = False,
) -> tuple[Pool, list[UnfinishedRun]]:
    """Attach to a pool that another notebook of this user has started from here.

    This notebook takes over from that one.

    Args:
        name: name of the pool, or its job ID.
        take_over: attach even if the other notebook may be alive; it loses the pool.

    Returns:
        The pool, and its runs that the user must be informed of.

    Raises:
        PoolError: the pool does not exist, its notebook is alive, its key is not usable, or it is
            gone; the message names the next step.
    """
    debugging.start()
    record = records.named(name)
    if NOTEBOOK_JOB in os.environ:  # the job's first cell has attached already
        for pool in registry.pools():
            if pool.job_id == record.job_id:
                return pool, []
    # if two notebooks attach at once, the lock lets the second one see that the first has the pool
    with records.locked(
        record.job_id, lambda: tell(f"another notebook attaches to pool {record.name!r} now …")
    ):
        pool, unfinished = _attach(name, namespace, defaults, tell, take_over)
    logger.info(
        "attached to the pool: pool=%s job=%s unfinished_runs=%s",
        pool.name,
        pool.job_id,
        len(unfinished),
    )
    tell(
        f"attached to pool {pool.name!r} on {', '.join(pool.plan.hosts)} in "
        f"{pool.start_seconds:.1f} s"
    )
    for note in pool.take_notes():
        tell(note)
    if folder := os.environ.get(NOTEBOOK_JOB):
        Path(folder, NOTEBOOK_KERNEL).write_text(identity())
        pool.keep_in_use()
    return pool, unfinished


def _attach(
    name: str,
    namespace: Namespace,
    defaults: Defaults,
    tell: Callable[[str], None],
    take_over: bool,
) -> tuple[Pool, list[UnfinishedRun]]:
    record = records.named(name)
    own = [*registry.pools(), *registry.ended_pools()]
    # This notebook takes its pool back: what is left of the old connections goes first.
    taken = next((pool for pool in own if pool.taken_over and pool.name == record.name), None)
    if taken is not None and taken.job_id == record.job_id:
        taken.leave()
        registry.unregister(taken)
    elif any(pool.job_id == record.job_id for pool in own):
        raise PoolError(
            f"pool {record.name!r} already belongs to this notebook",
            code="pool-exists",
            names=[record.name],
        )
    if registry.is_registered(record.name):
        raise PoolError(
            f"this notebook already has a pool {record.name!r}: end that first (%sky_down "
            f"{record.name})",
            code="pool-exists",
            names=[record.name],
        )
    if not (take_over or records.is_left(record)):
        raise PoolError(
            f"{records.owner_message(record)}: end that notebook, or take the pool away from it: "
            f"%sky_attach {name} --take-over",
            code="pool-held",
            names=[name],
        )
    key = keys.attachable(record.job_id)
    if key.plan.remote:
        tell(connecting_words(key.plan.hosts))
    attach_nodes: Callable[..., tuple[Survey, Sequence[Node]]]
    if isinstance(key.accesses[0], head.NodeAccess):  # this is a notebook job on the pool's head
        pool_request = key.plan.request  # the head has no credentials of the cloud
        provider = providers.provider_for(
            replace(pool_request, provider="ssh") if key.plan.region else pool_request
        )
        attach_nodes = head.attach
    else:
        provider = attaching_provider(key)
        attach_nodes = provider.attach
    try:
        survey, nodes = attach_nodes(key.plan, key.accesses)
        pool = Pool(
            record.name,
            provider,
            survey,
            namespace,
            defaults,
            registry.unregister_closed,
            record.job_id,
        )
        # before the other notebook loses its links, because it reports who has taken the pool
        records.hand_over(record)
        try:
            unfinished = pool.attach(nodes, key)
        # the other notebook keeps the pool
        except BaseException:
            records.write(record)
            raise
    except (PoolError, ProvisionError) as problem:
        # only if the cloud says so: after other errors the pool may still run
        if isinstance(problem, CloudError) and problem.kind == "missing":
            records.remove(record.job_id)
        raise PoolError(
            f"pool {record.name!r} cannot be attached: {problem}",
            code="attach",
            names=[record.name],
        ) from problem
    registry.register(pool)
    return pool, unfinished


def attaching_provider(key: keys.PoolKey) -> Any:
    """Return the provider of a pool that can be attached. Raises PoolError for other pools."""
    provider = providers.provider_for(key.plan.request)
    if not isinstance(provider, Attachable):
        raise PoolError(
            f"pools of --provider {key.plan.provider} cannot be attached", code="attach"
        )
    return provider


@contextlib.contextmanager
def machines(key: keys.PoolKey) -> Iterator[list[Node]]:
    """Yield the machines of a pool, the head first.

    Each connection is opened when a command runs on the machine.
    """
    _, nodes = attaching_provider(key).attach(key.plan, key.accesses)
    try:
        yield list(nodes)
    finally:
        for node in nodes:
            if node.leave is not None:
                node.leave()
