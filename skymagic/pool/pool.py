"""The public class `Pool`: ranks that are ready for cells.

It covers a pool's life from acquiring the machines to releasing them, whatever happens in between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skymagic.cluster import Agents, Node
from skymagic.cluster.telemetry import Meter
from skymagic.data.namespace import Namespace
from skymagic.display import live, panel
from skymagic.display.panel import RankUse
from skymagic.errors import PoolError
from skymagic.plan.requests import Defaults
from skymagic.plan.units import Selection
from skymagic.pool import messages, records
from skymagic.pool.dispatch import Dispatch, Scheduler
from skymagic.pool.failures import AgentEvents, Replacement
from skymagic.pool.keys import PoolKey
from skymagic.pool.messages import rows
from skymagic.pool.packages import Packages
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources, Step, data_plane
from skymagic.pool.runs import Attaching, PoolRuns, UnfinishedRun
from skymagic.pool.status import PoolEvent, SharedStatus, State, now
from skymagic.providers.provider import Replaceable
from skymagic.run.metrics import table
from skymagic.wire import debug_log, processes

if TYPE_CHECKING:
    from skymagic.content.files.copy import Files
    from skymagic.data.shipping.shipper import Shipper
    from skymagic.providers import Provider, Survey
    from skymagic.run.state import RunSpec
    from skymagic.wire.codec import Transport

logger = logging.getLogger(__name__)


def run_steps(done: str, steps: Sequence[Step]) -> None:
    """Run all steps in order. If a step is interrupted, skip the rest of it and run the others.

    Args:
        done: what holds even if steps fail, for the error: "pool 'main' is stopped".

    Raises:
        PoolError: steps have failed; names each of them.
        KeyboardInterrupt: the user did not want to wait; carries a note on each step that failed.
    """
    failed: list[str] = []
    first: BaseException | None = None
    interrupt: BaseException | None = None
    for what, release in steps:
        try:
            release()
        except Exception as problem:
            failed.append(f"{what} ({type(problem).__name__}: {problem})")
            first = first or problem
        # an interrupt skips one step only: the later ones release machines that cost money
        except BaseException as stop:
            interrupt = interrupt or stop
    message = f"{done}, but this was not released: {'; '.join(failed)}" if failed else ""
    if interrupt is not None:
        if message:
            interrupt.add_note(message)
        raise interrupt
    if message:
        raise PoolError(message, code="not-released") from first


def pool_key(pool: Pool) -> PoolKey | None:
    """Return what another notebook needs to attach to a pool.

    Returns:
        None if the pool's agents end with this notebook.
    """
    nodes = pool.agents.nodes
    # ranks on this machine whose agent is a child of this process
    if not all(node.access for node in nodes):
        return None
    addresses = tuple((node.address, node.hostname) for node in nodes)
    accesses = tuple(node.access for node in nodes)
    return PoolKey(pool.plan, accesses, addresses, pool.agents.started[0].port)


def keep_key(pool: Pool) -> None:
    """Store the key of a pool that outlives this notebook in its record.

    Other notebooks of this user can then attach.
    """
    if (key := pool_key(pool)) is not None:
        records.save_key(pool.job_id, key.saved())


class Pool(SharedStatus):
    """A set of ranks: its status, and the parts that share it.

    Args:
        name: name of the pool.
        provider: provider of the machines.
        survey: what to make, and what the provider found.
        namespace: the notebook's variables.
        defaults: limits and other settings.
        on_closed: called when the pool has released everything and its end needs no explanation.
        job_id: job ID of a pool that another notebook has started; a new ID unless given.
    """

    def __init__(
        self,
        name: str,
        provider: Provider,
        survey: Survey,
        namespace: Namespace,
        defaults: Defaults,
        on_closed: Callable[[Pool], None],
        job_id: str = "",
    ) -> None:
        super().__init__(name, survey.plan, defaults, job_id)
        self.survey = survey  # decides what `close` does with the machines
        self.namespace = namespace
        self.attached = False  # True if another notebook has started it
        self.announced_in = ""
        """ID of the request whose cell shows the pool's start."""
        self.started_at = 0.0
        self.start_seconds = 0.0
        self.stopped_runs: tuple[RunSpec, ...] = ()
        """Runs that the end of the pool stopped, including those that waited for their ranks."""
        self._gone = on_closed
        # working folder of the ranks on their node
        self._folder = "~" if survey.plan.remote else str(Path.cwd())
        self._in_use = contextlib.ExitStack()
        self._plugin_contexts: list[tuple[str, contextlib.ExitStack]] = []
        """Names and open contexts of plugins in the notebook."""
        self.scheduler = Scheduler()
        self.meter = Meter(
            lambda: self.agents, lambda rank: [device.word for device in self.plan.devices_of(rank)]
        )
        """Measures the resource usage of the ranks."""
        self.resources = PoolResources(self, provider, survey, namespace, defaults.away)
        dispatch = Dispatch(self, self.resources)
        self._dispatch = dispatch
        self.recovery = Recovery(self, self.resources, self.scheduler, dispatch.send)
        replaces = survey.plan.request.replace and isinstance(provider, Replaceable)
        replace = partial(cast(Replaceable, provider).replace, survey) if replaces else None
        self.replacement = Replacement(
            self, self.resources, dispatch, self.recovery, replace, partial(keep_key, self)
        )
        self._events = AgentEvents(
            self,
            self.resources,
            dispatch,
            self.recovery,
            self.replacement,
            partial(self.close, keeps_name=True),
            self.leave,
        )
        self.packages = Packages(self, self.resources)
        self.runs = PoolRuns(
            self,
            self.resources,
            dispatch,
            self.scheduler,
            self.recovery,
            self.packages,
            self.replacement,
        )
        self._attaching = Attaching(
            self, self.resources, self.recovery, self.runs, self._events.on_loss
        )

    @property
    def agents(self) -> Agents:
        """The agents of a started pool. Raises PoolStateError if the pool was not started."""
        return self.resources.agents

    @property
    def shipper(self) -> Shipper:
        """The shipper, which knows which values the ranks hold.

        Raises PoolStateError if the pool was not started.
        """
        return self.resources.shipper

    # -- life cycle -------------------------------------------------------------------------------

    def start(self, say: Callable[[str], None]) -> None:
        """Acquire the machines and start all ranks; a failure leaves nothing running."""
        started = time.monotonic()
        self.move(PoolEvent.START)
        try:
            self.resources.start(self._events.connect, say)
        except BaseException as problem:
            self._close_after(problem)
            raise
        self.move(PoolEvent.STARTED)
        # idle time counts from here: provisioning may have taken longer than the limit
        self.lifetime.begin("start")
        self.lifetime.end("start", now())
        self.started_at = now()
        self.start_seconds = time.monotonic() - started
        self._enter_plugins()
        self.survey.mark_ready()

    def attach(self, nodes: Sequence[Node], key: PoolKey) -> list[UnfinishedRun]:
        """Take over a pool that another notebook has started.

        Returns:
            The runs whose end the user has not seen, the oldest first, for `follow`.

        Raises:
            ProvisionError: a machine is gone or does not answer; everything on the machines is left
                as it is.
        """
        started = time.monotonic()
        self.attached = True
        unfinished = self._attaching.attach(nodes, self._events.connect, key)
        self.started_at, self.start_seconds = now(), time.monotonic() - started
        self._enter_plugins()
        return unfinished

    def _enter_plugins(self) -> None:
        """Open the plugins' contexts in the notebook; close the pool if one fails."""
        # One stack for each plugin, and not one for all: closing must name the plugin that failed,
        # and continue with the others.
        for plugin in self.plugins:
            context = contextlib.ExitStack()
            try:
                logger.debug("plugin is entered: pool=%s plugin=%s", self.name, plugin.name)
                context.enter_context(plugin.around_client(self))
            except BaseException as problem:
                problem.add_note(
                    f"raised by the plugin {plugin.name!r} in around_client; the pool is stopped"
                )
                self._close_after(problem)
                raise
            self._plugin_contexts.append(
                (f"what the plugin {plugin.name!r} has open in the notebook", context)
            )

    def _close_after(self, problem: BaseException) -> None:
        """Close the pool because of an error that stays the first one the user sees."""
        logger.warning(
            "pool is closed after an error: pool=%s error=%s", self.name, type(problem).__name__
        )
        try:
            self.close()
        except Exception as close_error:
            problem.add_note(str(close_error))

    def close(self, *, keeps_name: bool = False, how: str = messages.WAS_ENDED) -> None:
        """End all ranks and release all machines; legal in every state, safe to call twice.

        Current runs end with a PoolError on their threads before anything is released.

        Args:
            keeps_name: keep the name registered until the pool is closed or recreated, because it
                has ended by itself.
            how: cause and remedy, for the runs that are stopped.

        Raises:
            PoolError: not everything was released; names what was not.
        """
        with contextlib.ExitStack() as at_last:
            if not keeps_name:
                at_last.callback(self._gone, self)
            if self.state is State.STOPPED:
                return
            self.move(PoolEvent.STOP)
            # before the runs are ended, which removes them from the scheduler
            self.stopped_runs = tuple(self.runs.active_runs())
            self._dispatch.close(f"pool {self.name!r} {how}")
            plugins: list[Step] = [
                (what, context.close) for what, context in reversed(self._plugin_contexts)
            ]
            # The replacement first: it could rent a machine while the others are released. Plugins
            # come before the ranks, which they may still use.
            try:
                replacement: Step = ("machines that are being replaced", self.replacement.close)
                run_steps(
                    f"pool {self.name!r} is stopped",
                    [replacement, *plugins, *self.resources.release_steps()],
                )
            finally:
                self.move(PoolEvent.STOPPED)
                if self.resources.has_agents:
                    self.last_lines = self.agents.last_lines
                records.keep_log(self.name, self.job_id, self.last_lines.get(0, ""))

    def stays(self, restart: bool) -> bool:
        """Return True if the pool stays when its notebook ends normally.

        That is the case if another notebook can attach to it, and it is detached, has a run in
        progress, or belongs to a notebook job.

        Args:
            restart: True if the notebook's kernel is being restarted.
        """
        # the pool outlives its job, whose notebook is a guest on it
        in_job = processes.NOTEBOOK_JOB in os.environ
        wanted_to_stay = (
            restart or in_job or self.plan.request.detached or self.state is State.RUNNING
        )
        return (
            wanted_to_stay
            and self.plan.outlives
            and self.resources.has_agents
            and pool_key(self) is not None
        )

    def keep_in_use(self) -> None:
        """Keep the pool from counting as idle between a notebook job's cells, until `leave`."""
        self.lifetime.begin("notebook")
        self._in_use.callback(lambda: self.lifetime.end("notebook", now()))
        self._in_use.enter_context(self.agents.busy(()))

    def leave(self) -> None:
        """Close all connections and leave the pool running; safe to call twice.

        Another notebook can attach to it.

        Raises:
            PoolError: not everything was closed; names what was not.
        """
        if self.state is State.STOPPED:
            return
        self.move(PoolEvent.STOP)
        plugins: list[Step] = [
            (what, context.close) for what, context in reversed(self._plugin_contexts)
        ]
        try:
            steps: list[Step] = [
                ("its time limits", self._in_use.close),
                ("machines that are being replaced", self.replacement.close),
                *plugins,
            ]
            logger.info("pool is left running: pool=%s job=%s", self.name, self.job_id)
            run_steps(
                f"pool {self.name!r} is left", [*steps, ("its connections", self.resources.leave)]
            )
        finally:
            self.move(PoolEvent.STOPPED)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Restart ranks (by default all of them); their variables are gone.

        Legal in every state but the end.

        Raises:
            RequestError: a rank does not exist.
            PoolError: the ranks did not come back.
        """
        self.recovery.restart(ranks)

    @property
    def metrics(self) -> Any:
        """Numbers reported with ``sky.report``, by step and rank, also by runs in progress.

        A DataFrame with the index (step, rank). Columns are ``cell``, ``seconds`` since the cell
        began on that rank, and the numbers. If the steps start again, in another epoch or another
        cell, the step count continues. ``pool.metrics.loss.unstack().plot()``. Without pandas: a
        list of dicts whose columns are read in the same way (``pool.metrics.loss.mean()``).
        """
        return table(self.runs.reported)

    # -- nodes and status -------------------------------------------------------------------------

    def files(self) -> Files:
        """Return what copies files between the notebook and the pool's machines.

        All nodes on this machine count as one.
        """
        from skymagic.content.files.copy import Files

        def run(node: Node) -> Transport:
            folder = self.agents.started[node.index].directory
            log = debug_log.arguments(folder, "files", self.name, node.index)
            return node.run(processes.TRANSFER_SERVER, self._folder, *log)

        return Files(
            self.agents.nodes,
            run,
            data_plane(self.resources),
        )

    def machines(self, selection: Selection) -> tuple[int, ...]:
        """Return the indexes of these nodes' machines as `files` counts them.

        Raises RequestError for nodes that do not exist.
        """
        nodes = selection.ranks(self.plan.topology.nodes, "node")
        # several nodes on this machine have one agent, and share its file system
        last = len(self.agents.nodes) - 1
        return tuple(sorted({min(node, last) for node in nodes}))

    def status(self) -> list[tuple[object, ...]]:
        """Return a row for each rank: rank, node, host, process ID, state."""
        return (
            rows(self.plan.topology, self.agents, self.state) if self.resources.has_agents else []
        )

    def __repr__(self) -> str:
        names = ", ".join(spec.name for spec in self.plan.request.plugins) or "none"
        location = f"{self.plan.size} on {', '.join(self.plan.hosts)}"
        remaining = f", {text}" if (text := messages.time_left(self.plan.ends)) else ""
        return f"<Pool {self.name!r}: {location}, plugins: {names}, {self.state.value}{remaining}>"

    def _repr_html_(self) -> str:
        # the panel of the start, above in the same cell, shows the title already
        is_announced = bool(self.announced_in) and self.announced_in == live.request_id()
        return self.picture({}, titled=not (is_announced and self.state is State.READY))

    def picture(self, use: Mapping[int, RankUse] | None = None, *, titled: bool = True) -> str:
        """Return the pool panel as HTML: nodes, ranks, their states, and their resource usage.

        Args:
            use: resource usage by rank; measured now unless given.
            titled: include the title.
        """
        running = self.started_at and self.state is not State.STOPPED
        seconds = now() - self.started_at + self.start_seconds if running else 0.0
        return panel.pool_html(
            messages.pool_view(self, self.status(), self.use() if use is None else use, seconds),
            titled=titled,
        )

    def use(self, window: float = 0.0) -> dict[int, RankUse]:
        """Return the known resource usage of the ranks.

        Args:
            window: seconds over which to measure the processors' utilization; 0 for the time since
                the last measurement.
        """
        if self.state not in (State.READY, State.RUNNING, State.DEGRADED):
            return {}
        if window:
            self.meter.measure()
            time.sleep(window)
        return self.meter.measure()
