"""A pool: ranks that are ready, from acquiring their machines to releasing them, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skymagic.cluster import Agents, Node
from skymagic.cluster.telemetry import Meter
from skymagic.display import live, panel
from skymagic.display.panel import RankUse
from skymagic.errors import PoolError
from skymagic.plan.requests import Defaults
from skymagic.plan.units import Selection
from skymagic.pool import keys, messages, records
from skymagic.pool.dispatch import Dispatch, Scheduler
from skymagic.pool.keys import PoolKey
from skymagic.pool.losses import AgentEvents, Replacement
from skymagic.pool.messages import rows
from skymagic.pool.packages import Packages
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import PoolResources, Step, data_plane
from skymagic.pool.runs import Attaching, PoolRuns, UnfinishedRun
from skymagic.pool.status import PoolEvent, SharedStatus, State, now
from skymagic.providers.provider import Replaceable
from skymagic.run.metrics import table
from skymagic.wire import processes

if TYPE_CHECKING:
    from skymagic.data.shipping.shipper import Shipper
    from skymagic.files.copy import Files
    from skymagic.providers import Provider, Survey
    from skymagic.run.report import RunSpec


def run_steps(done: str, steps: Sequence[Step]) -> None:
    """Run all steps, in this order. One that is interrupted is given up, and the others run.

    Args:
        done: what is so all the same, for the error: "pool 'main' is stopped".

    Raises:
        PoolError: steps have failed; names each of them.
        KeyboardInterrupt: the user did not want to wait; has a note on each step that failed.
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
        except BaseException as stop:
            interrupt = interrupt or stop
    told = f"{done}, but this was not released: {'; '.join(failed)}" if failed else ""
    if interrupt is not None:
        if told:
            interrupt.add_note(told)
        raise interrupt
    if told:
        raise PoolError(told) from first


def pool_key(pool: Pool) -> PoolKey | None:
    """What another notebook must know to attach to a pool; None where its agents end with this one."""
    nodes = pool.agents.nodes
    if not all(node.access for node in nodes):
        return None
    places = tuple((node.address, node.hostname) for node in nodes)
    accesses = tuple(node.access for node in nodes)
    return PoolKey(pool.name, pool.job_id, pool.plan, accesses, places, pool.agents.started[0].port)


def keep_key(pool: Pool) -> None:
    """Let other notebooks of this user attach to a pool, where it outlives this one."""
    if (key := pool_key(pool)) is not None:
        keys.write(key)


class Pool(SharedStatus):
    """One set of ranks: its status, and the parts that share it.

    Args:
        name: what users call it.
        provider: who gives the machines.
        survey: what to make, and what the provider found.
        namespace: the notebook's variables.
        defaults: limits and such.
        gone: called when nothing of it is left, and nobody need hear why.
        job_id: of one that another notebook has made; a new one unless given.
    """

    def __init__(
        self,
        name: str,
        provider: Provider,
        survey: Survey,
        namespace: dict[str, Any],
        defaults: Defaults,
        gone: Callable[[Pool], None],
        job_id: str = "",
    ) -> None:
        super().__init__(name, survey.plan, defaults, job_id)
        self.survey = survey  # says what `close` does with its machines
        self.namespace = namespace
        self.attached = False  # whether another notebook has made it
        self.announced_in = ""
        """The request in whose cell a display has shown its start."""
        self.started_at = 0.0
        self.start_seconds = 0.0
        self.stopped_runs: tuple[RunSpec, ...] = ()
        """After the end: runs that were under way, or waited for their ranks."""
        self._gone = gone
        self._folder = (
            "~" if survey.plan.remote else str(Path.cwd())
        )  # where ranks run, on their node
        self._in_use = contextlib.ExitStack()
        self._plugin_contexts: list[tuple[str, contextlib.ExitStack]] = []
        """What plugins have open in the notebook, with their names."""
        self.scheduler = Scheduler()
        self.meter = Meter(
            lambda: self.agents, lambda rank: [one.word for one in self.plan.devices_of(rank)]
        )
        """What measures what its ranks use."""
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
            self, self.resources, self.recovery, self.runs, self._events.node_lost
        )

    @property
    def agents(self) -> Agents:
        """The agents of a started pool. Raises PoolStateError where there are none."""
        return self.resources.agents

    @property
    def shipper(self) -> Shipper:
        """What knows which values the ranks hold. Raises PoolStateError where the pool was not started."""
        return self.resources.shipper

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self, say: Callable[[str], None]) -> None:
        """Acquire the machines and bring up all ranks; whatever goes wrong, nothing is left running."""
        begun = time.monotonic()
        self.move(PoolEvent.START)
        try:
            self.resources.start(self._events.connect, say)
        except BaseException as problem:
            self._close_after(problem)
            raise
        self.move(PoolEvent.STARTED)
        self.lifetime.begin("start")
        self.lifetime.end("start", now())
        self.started_at = now()
        self.start_seconds = time.monotonic() - begun
        self._enter_plugins()
        self.survey.ready()

    def attach(self, nodes: Sequence[Node], key: PoolKey) -> list[UnfinishedRun]:
        """Take up a pool that another notebook has made, in that one's place.

        Returns:
            The runs whose end the user has not seen, the oldest first, for `follow`.

        Raises:
            ProvisionError: a machine is gone, or does not answer; what runs there is left as it is.
        """
        begun = time.monotonic()
        self.attached = True
        found = self._attaching.attach(nodes, self._events.connect, key)
        self.started_at, self.start_seconds = now(), time.monotonic() - begun
        self._enter_plugins()
        return found

    def _enter_plugins(self) -> None:
        """Open what plugins do in the notebook; if one fails, the pool goes."""
        for plugin in self.plugins:
            opened = contextlib.ExitStack()
            try:
                opened.enter_context(plugin.around_client(self))
            except BaseException as problem:
                problem.add_note(
                    f"raised by the plugin {plugin.name!r} in around_client; the pool is stopped"
                )
                self._close_after(problem)
                raise
            self._plugin_contexts.append(
                (f"what the plugin {plugin.name!r} has open in the notebook", opened)
            )

    def _close_after(self, problem: BaseException) -> None:
        """End it because of a problem, which stays what the user is told of first."""
        try:
            self.close()
        except Exception as more:
            problem.add_note(str(more))

    def close(self, *, keeps_name: bool = False, how: str = messages.WAS_ENDED) -> None:
        """End all ranks and release all machines; legal in every state, twice is safe.

        Runs that are under way, on whatever thread, end with a PoolError before anything is released.

        Args:
            keeps_name: it has ended by itself, and is known by its name until it is closed or made again.
            how: what becomes of it and what to do, for the runs that are under way.

        Raises:
            PoolError: not all was released; says what.
        """
        with contextlib.ExitStack() as at_last:
            if not keeps_name:
                at_last.callback(self._gone, self)
            if self.state is State.STOPPED:
                return
            self.move(PoolEvent.STOP)
            self.stopped_runs = tuple(self.runs.under_way())
            self._dispatch.close(f"pool {self.name!r} {how}")
            plugins: list[Step] = [
                (what, opened.close) for what, opened in reversed(self._plugin_contexts)
            ]
            try:
                replacement: Step = ("machines that are being replaced", self.replacement.close)
                run_steps(
                    f"pool {self.name!r} is stopped",
                    [replacement, *plugins, *self.resources.release_steps()],
                )
            finally:
                self.move(PoolEvent.STOPPED)
                if self.resources.started:
                    self.last_lines = self.agents.last_lines
                records.keep_log(self.name, self.job_id, self.last_lines.get(0, ""))

    def stays(self, restart: bool) -> bool:
        """Whether an orderly end of its notebook leaves it: it was made for that, or a run of it goes on, and another can attach.

        Args:
            restart: the notebook's kernel is started again.
        """
        in_job = processes.NOTEBOOK_JOB in os.environ
        asked = restart or in_job or self.plan.request.detached or self.state is State.RUNNING
        return (
            asked and self.plan.outlives and self.resources.started and pool_key(self) is not None
        )

    def keep_in_use(self) -> None:
        """Keep it from being idle between the cells of a notebook job, until `leave`."""
        self.lifetime.begin("notebook")
        self._in_use.callback(lambda: self.lifetime.end("notebook", now()))
        self._in_use.enter_context(self.agents.busy(()))

    def leave(self) -> None:
        """Close all connections, and leave what runs for another notebook to attach to; twice is safe.

        Raises:
            PoolError: not all was closed; says what.
        """
        if self.state is State.STOPPED:
            return
        self.move(PoolEvent.STOP)
        plugins: list[Step] = [
            (what, opened.close) for what, opened in reversed(self._plugin_contexts)
        ]
        try:
            steps: list[Step] = [
                ("its time limits", self._in_use.close),
                ("machines that are being replaced", self.replacement.close),
                *plugins,
            ]
            run_steps(
                f"pool {self.name!r} is left", [*steps, ("its connections", self.resources.leave)]
            )
        finally:
            self.move(PoolEvent.STOPPED)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Start ranks anew (all of them): their variables are gone. Legal in every state but the end.

        Raises:
            RequestError: there are no such ranks.
            PoolError: they did not come back.
        """
        self.recovery.restart(ranks)

    @property
    def metrics(self) -> Any:
        """What ranks have reported with ``sky.report``, while they go on too: a DataFrame with the index (step, rank).

        Columns are ``cell``, ``seconds`` since the cell began on that rank, and the numbers. Where steps begin again, in another
        epoch or another cell, they are counted on. ``pool.metrics.loss.unstack().plot()``.
        Without pandas: a list of dicts whose columns are read in the same way (``pool.metrics.loss.mean()``).
        """
        return table(self.runs.reported)

    # -- its nodes ---------------------------------------------------------------------------------------------------

    def files(self) -> Files:
        """What copies between the notebook and the machines of the pool; all nodes of this machine are one."""
        from skymagic.files.copy import Files

        return Files(
            self.agents.nodes,
            lambda node: node.run(processes.FILES, self._folder),
            data_plane(self.resources),
        )

    def machines(self, chosen: Selection) -> tuple[int, ...]:
        """The numbers of the machines of these nodes, as `files` knows them. Raises RequestError for nodes that there are not."""
        nodes = chosen.ranks(self.plan.topology.nodes, "node")
        last = len(self.agents.nodes) - 1
        return tuple(sorted({min(node, last) for node in nodes}))

    def status(self) -> list[tuple[object, ...]]:
        """A row for each rank: rank, node, host, process id, state."""
        return rows(self.plan.topology, self.agents, self.state) if self.resources.started else []

    def __repr__(self) -> str:
        names = ", ".join(spec.name for spec in self.plan.request.plugins) or "none"
        where = f"{self.plan.size} on {', '.join(self.plan.hosts)}"
        left = f", {text}" if (text := messages.time_left(self.plan.ends)) else ""
        return f"<Pool {self.name!r}: {where}, plugins: {names}, {self.state.value}{left}>"

    def _repr_html_(self) -> str:
        # the display of its start, above it in the same cell, has the title already
        announced = bool(self.announced_in) and self.announced_in == live.request_id()
        return self.picture({}, titled=not (announced and self.state is State.READY))

    def picture(self, use: Mapping[int, RankUse] | None = None, *, titled: bool = True) -> str:
        """Return the pool panel as HTML: nodes, ranks and their states, and what each rank uses; measured now unless given."""
        running = self.started_at and self.state is not State.STOPPED
        seconds = now() - self.started_at + self.start_seconds if running else 0.0
        return panel.pool_html(
            messages.pool_view(self, self.status(), self.use() if use is None else use, seconds),
            titled=titled,
        )

    def use(self, window: float = 0.0) -> dict[int, RankUse]:
        """By rank what it uses, of those that are known.

        Args:
            window: seconds over which the use of processors is taken; 0 for since the last time that it was measured.
        """
        if self.state not in (State.READY, State.RUNNING, State.DEGRADED):
            return {}
        if window:
            self.meter.measure()
            time.sleep(window)
        return self.meter.measure()
