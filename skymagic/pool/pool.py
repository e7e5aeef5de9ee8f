"""A pool: ranks that are ready, from acquiring their machines to releasing them, whatever happens in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymagic.cluster import Agents, Node
from skymagic.cluster.telemetry import Meter
from skymagic.display import panel
from skymagic.display.panel import RankUse
from skymagic.display.proxies import Proxies
from skymagic.display.screen import Screen
from skymagic.plan.plans import Plan
from skymagic.plan.requests import Defaults
from skymagic.plan.units import Selection
from skymagic.pool import kept_logs, keys, view
from skymagic.pool.agent_events import AgentEvents
from skymagic.pool.attaching import Attaching, Unfinished
from skymagic.pool.cloning import Cloned, Cloning
from skymagic.pool.debugging import Debugging
from skymagic.pool.dispatch import Dispatch
from skymagic.pool.keys import PoolKey
from skymagic.pool.messages import rows
from skymagic.pool.packages import Packages
from skymagic.pool.recovery import Recovery
from skymagic.pool.release import Step, run_steps
from skymagic.pool.replacement import Replacement
from skymagic.pool.resources import Resources
from skymagic.pool.runs import Runs
from skymagic.pool.scheduling import Scheduler
from skymagic.pool.states import Event, State
from skymagic.pool.status import Status, now
from skymagic.run.interrupt import StopSignal
from skymagic.run.metrics import table
from skymagic.run.report import Limits, Report
from skymagic.run.spec import RunSpec
from skymagic.wire import processes

if TYPE_CHECKING:
    from skymagic.data.shipping.shipper import Manifest, Shipper
    from skymagic.files.copy import Files
    from skymagic.providers import Provider, Survey


class Pool(Status):
    """One set of ranks: its status, and the parts that share it.

    Args:
        name: what users call it.
        provider: who gives the machines.
        survey: what to make, and what the provider found.
        namespace: the notebook's variables.
        defaults: limits and such.
        gone: called when nothing of it is left, and nobody need hear why.
        job_id: of one that another notebook has made, or whose machines are stopped; a new one unless given.
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
        self.survey = survey
        """Says what `close` does with its machines."""
        self.namespace = namespace
        self.attached = False
        """Whether another notebook has made it."""
        self.started_at = 0.0
        self.start_seconds = 0.0
        self._gone = gone
        self._folder = "~" if survey.plan.remote else str(Path.cwd())
        """Where ranks run, on their node."""
        self._plugin_contexts: list[tuple[str, contextlib.ExitStack]] = []
        """What plugins have open in the notebook, with their names."""
        self.scheduler = Scheduler()
        self.meter = Meter(lambda: self.agents, lambda rank: [one.word for one in self.plan.devices_of(rank)])
        """What measures what its ranks use."""
        self._resources = Resources(self, provider, survey, namespace, defaults.away)
        dispatch = Dispatch(self, self._resources)
        self._recovery = Recovery(self, self._resources, self.scheduler, dispatch.send)
        self._replacement = Replacement(self, self._resources, dispatch, self._recovery, self.keep_key)
        self._events = AgentEvents(self, self._resources, dispatch, self._recovery, self._replacement, self.close)
        self.packages = Packages(self, self._resources)
        self._runs = Runs(
            self, self._resources, dispatch, self.scheduler, self._recovery, self.packages, self._replacement
        )
        self._debugging = Debugging(self, dispatch, self.scheduler, self._recovery, self._runs)
        self._attaching = Attaching(self, self._resources, self._recovery, self._runs, self._events.node_lost)
        self._cloning = Cloning(self, self._resources, dispatch, self.scheduler, self._recovery, self._runs)

    @property
    def agents(self) -> Agents:
        """The agents of a started pool. Raises PoolStateError where there are none."""
        return self._resources.agents

    @property
    def shipper(self) -> Shipper:
        """What knows which values the ranks hold. Raises PoolStateError where the pool was not started."""
        return self._resources.shipper

    @property
    def widgets(self) -> Proxies:
        """The widgets of its ranks that the notebook shows."""
        return self._resources.widgets

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self, say: Callable[[str], None]) -> None:
        """Acquire the machines and bring up all ranks; whatever goes wrong, nothing is left running."""
        begun = time.monotonic()
        self.move(Event.START)
        try:
            self._resources.start(self._events.connect, say)
        except BaseException as problem:
            self._close_after(problem)
            raise
        self.move(Event.STARTED)
        self.lifetime.begin("start")
        self.lifetime.end("start", now())
        self.started_at = now()
        self.start_seconds = time.monotonic() - begun
        self._enter_plugins()
        self._resources.ready()

    def declare(self) -> None:
        """Make nothing of it yet: a pool of this plan is made at its first cell."""
        self.move(Event.DECLARE)

    def attach(self, nodes: Sequence[Node], key: PoolKey) -> list[Unfinished]:
        """Take up a pool that another notebook has made, in that one's place.

        Args:
            nodes: its machines.
            key: what that notebook knew of it.

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

    @property
    def key(self) -> PoolKey | None:
        """What another notebook must know to attach to it; None where its agents end with this one."""
        nodes = self.agents.nodes
        if not all(node.access for node in nodes):
            return None
        places = tuple((node.address, node.hostname) for node in nodes)
        accesses = tuple(node.access for node in nodes)
        return PoolKey(self.name, self.job_id, self.plan, accesses, places, self.agents.started[0].port)

    def keep_key(self) -> None:
        """Let other notebooks of this user attach, where the pool outlives this one."""
        if (key := self.key) is not None:
            keys.write(key)

    def _enter_plugins(self) -> None:
        """Open what plugins do in the notebook; if one fails, the pool goes."""
        for plugin in self.plugins:
            opened = contextlib.ExitStack()
            try:
                opened.enter_context(plugin.around_client(self))
            except BaseException as problem:
                problem.add_note(f"raised by the plugin {plugin.name!r} in around_client; the pool is stopped")
                self._close_after(problem)
                raise
            self._plugin_contexts.append((f"what the plugin {plugin.name!r} has open in the notebook", opened))

    def _close_after(self, problem: BaseException) -> None:
        """End it because of a problem, which stays what the user is told of first."""
        try:
            self.close()
        except Exception as more:
            problem.add_note(str(more))

    @property
    def last_lines(self) -> dict[int, str]:
        """By rank, the end of its log; empty before the pool's end, and where its nodes could not tell."""
        return self._resources.agents.last_lines if self._resources.started else {}

    def close(self) -> None:
        """End all ranks and release all machines; legal in every state, twice is safe.

        Raises:
            PoolError: it is stopped, but not all was released; says what.
        """
        if self.state is State.STOPPED:
            self._gone(self)
            return
        self.move(Event.STOP)
        plugins: list[Step] = [(what, opened.close) for what, opened in reversed(self._plugin_contexts)]
        try:
            replacement: Step = ("machines that are being replaced", self._replacement.close)
            run_steps(f"pool {self.name!r} is stopped", [replacement, *plugins, *self._resources.release_steps()])
        finally:
            self.move(Event.STOPPED)
            kept_logs.write(self.name, self.job_id, self.last_lines.get(0, ""))
            if self.ended is None:
                self._gone(self)

    def stays(self, restart: bool) -> bool:
        """Whether an orderly end of its notebook leaves it: it was made for that, or a run of it goes on, and another can attach.

        Args:
            restart: the notebook's kernel is started again.
        """
        asked = restart or self.plan.request.detached or self.state is State.RUNNING
        return asked and self.plan.outlives and self._resources.started and self.key is not None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Meanwhile it is not idle, whether a cell runs or not, as long as this process is connected or its limits of absence allow."""
        self.lifetime.begin("notebook")
        try:
            with self.agents.busy(()):
                yield
        finally:
            self.lifetime.end("notebook", now())

    def leave(self) -> None:
        """Close all connections, and leave what runs for another notebook to attach to; twice is safe.

        Raises:
            PoolError: not all was closed; says what.
        """
        if self.state is State.STOPPED:
            return
        self.move(Event.STOP)
        plugins: list[Step] = [(what, opened.close) for what, opened in reversed(self._plugin_contexts)]
        try:
            steps: list[Step] = [("machines that are being replaced", self._replacement.close), *plugins]
            run_steps(f"pool {self.name!r} is left", [*steps, ("its connections", self._resources.leave)])
        finally:
            self.move(Event.STOPPED)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Start ranks anew (all of them): their variables are gone. Legal in every state but the end.

        Raises:
            RequestError: there are no such ranks.
            PoolError: they did not come back.
        """
        self._recovery.restart(ranks)

    def resize(self, plan: Plan) -> str:
        """Add or release nodes of a pool on this machine, between runs; the ranks that stay form a new group with the others.

        Args:
            plan: the pool's own with another number of nodes.

        Returns:
            What became of the ranks' variables, in a line.

        Raises:
            PoolStateError: not in this state.
            PoolError: the ranks did not come up.
        """
        return self._recovery.resize(plan)

    # -- runs --------------------------------------------------------------------------------------------------------

    def run(self, spec: RunSpec, screen: Screen, limits: Limits, stop: StopSignal | None = None) -> Report:
        """Ship what the run needs, carry it out, and recover what broke; waits for its ranks first.

        Args:
            stop: ends the run from another thread.

        Raises:
            CaptureError: names that cannot travel; nothing has run.
            PoolStateError: the pool is stopped or lost.
            RunInterrupted: it was stopped before it began.
        """
        return self._runs.run(spec, screen, limits, stop or StopSignal())

    @property
    def metrics(self) -> Any:
        """What ranks have reported with ``sky.report``, while they go on too: a DataFrame with the index (step, rank).

        Columns are ``cell``, ``seconds`` since the cell began on that rank, and the numbers. Where steps begin again, in another
        epoch or another cell, they are counted on. Without pandas: a list of dicts. ``pool.metrics.loss.unstack().plot()``.
        """
        return table(self._runs.reported)

    def follow(self, spec: RunSpec, run: int, screen: Screen, limits: Limits, stop: StopSignal | None = None) -> Report:
        """Show what a run that another notebook began has not shown there, and what follows; wait for its ranks.

        Args:
            run: the pool's number of it.
            stop: ends the run from another thread.
        """
        return self._runs.follow(spec, run, screen, limits, stop or StopSignal())

    def preview(self, spec: RunSpec) -> Manifest:
        """What a run would ship; nothing is written or sent."""
        return self._runs.preview(spec)

    def clone(self, ranks: Sequence[int], names: Sequence[str], *, source: int) -> Cloned:
        """Copy names from one rank to others, all of them as one: what they share stays shared.

        DDP wrappers are made again around the group of all ranks, which is formed anew for them.

        Args:
            ranks: those that get them, above 0 in number.
            source: the rank that has them.

        Raises:
            RequestError: there are no such ranks, or the source has not got the names; nothing has changed.
            CaptureError: values cannot travel; nothing has changed.
            PoolStateError: the pool is stopped or lost, or ranks of it are.
            PoolError: the process group was not formed again.
        """
        return self._cloning.clone(ranks, names, source)

    def debug(self, rank: int, command: str, screen: Screen) -> bool:
        """Carry out a debugger's command on a rank, on the frames of the error with which its last cell has ended.

        Args:
            command: of pdb (``p x``, ``up``, ``where``, ``list``, ``locals``), or an expression.
            screen: shows what it prints.

        Returns:
            Whether there are such frames: they are kept until the rank's next cell.

        Raises:
            PoolStateError: the pool, or the rank, is stopped or lost.
        """
        return self._debugging.command(rank, command, screen)

    # -- its nodes ---------------------------------------------------------------------------------------------------

    def log_path(self, rank: int) -> str:
        """Where a rank's complete output is, on its node."""
        return str(Path(self.agents.started[0].directory) / f"rank-{rank}.log")

    def files(self) -> Files:
        """What copies between the notebook and the machines of the pool; all nodes of this machine are one."""
        from skymagic.files.copy import Files

        return Files(self.agents.nodes, lambda node: node.run(processes.FILES, self._folder), self._resources.plane())

    def machines(self, chosen: Selection) -> tuple[int, ...]:
        """The numbers of the machines of these nodes, as `files` knows them. Raises RequestError for nodes that there are not."""
        nodes = chosen.ranks(self.plan.topology.nodes, "node")
        last = len(self.agents.nodes) - 1
        return tuple(sorted({min(node, last) for node in nodes}))

    def status(self) -> list[tuple[object, ...]]:
        """A row for each rank: rank, node, host, process id, state."""
        return rows(self.plan.topology, self.agents, self.state) if self._resources.started else []

    def __repr__(self) -> str:
        names = ", ".join(spec.name for spec in self.plan.request.plugins) or "none"
        where = f"{self.plan.size} on {', '.join(self.plan.hosts)}"
        return f"<Pool {self.name!r}: {where}, plugins: {names}, {self.state.value}>"

    def _repr_html_(self) -> str:
        return self.picture({})

    def picture(self, use: Mapping[int, RankUse] | None = None) -> str:
        """Its panel as HTML: nodes, ranks and their states, and what each rank uses.

        Args:
            use: by rank; measured now unless given.
        """
        running = self.started_at and self.state is not State.STOPPED
        seconds = now() - self.started_at + self.start_seconds if running else 0.0
        return panel.pool_html(view.view(self, self.status(), self.use() if use is None else use, seconds))

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

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
