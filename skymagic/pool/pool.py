"""A pool: ranks that are ready, from acquiring their machines to releasing them, whatever happens in between."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skymagic import plugins
from skymagic.cluster import Agents
from skymagic.display.screen import NullScreen, Progress
from skymagic.errors import PoolError, PoolStateError, RequestError, RunInterrupted
from skymagic.plan import Defaults, Plan, Selection
from skymagic.plan.lifetime import Lifetime
from skymagic.plan.units import count, rank_words
from skymagic.plugins import packing
from skymagic.pool import specs, states
from skymagic.pool.messages import rows, variables_then, without
from skymagic.pool.open_store import open_store
from skymagic.pool.recovery import Mending
from skymagic.pool.scheduling import Turns
from skymagic.pool.states import Event, State
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.report import Limits, Report
from skymagic.run.run import Run, Screen
from skymagic.run.spec import RunSpec
from skymagic.run.submission import Submission
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.exit_status import describe
from skymagic.wire.order import Order, RunCell

if TYPE_CHECKING:
    from skymagic.data.remote.remote_store import RemoteStore
    from skymagic.data.shipping.shipper import Manifest, Shipper
    from skymagic.files import Files
    from skymagic.providers import Provider
    from skymagic.run.engine import Engine

START_TIMEOUT = 120.0
TOLD_AT_ONCE = 0.2
"""Seconds for which an error waits for what mending finds out, so that it is told with the error."""


class Pool:
    """Owns machines, agents, engine and store of one set of ranks.

    Args:
        name: what users call it.
        plan: what to make.
        provider: who made the plan, and gives the machines.
        namespace: the notebook's variables.
        defaults: limits and such.
        gone: called when nothing of it is left, and nobody need hear why.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        provider: Provider,
        namespace: dict[str, Any],
        defaults: Defaults,
        gone: Callable[[Pool], None] = lambda pool: None,
    ) -> None:
        self.name = name
        self.plan = plan
        self.job_id = f"{name}-{secrets.token_hex(4)}"
        self.state = State.NEW
        self.started_at = 0.0
        self.start_seconds = 0.0
        self.runs = 0
        self.defaults = defaults
        self.namespace = namespace
        self._lifetime = Lifetime(plan.request.idle, plan.request.max_lifetime, time.time())
        """What the agents know too, for the time when they cannot be heard."""
        self.ended: str | None = None
        """Why it has ended by itself; such a pool stays known until it is stopped or made anew."""
        self._gone = gone
        self._folder = "~" if plan.remote else str(Path.cwd())
        """Where ranks run, on their node."""
        self.plugins = plugins.resolve(plan.request.plugins)
        for plugin in self.plugins:
            packing.packed(plugin)  # one that cannot travel is refused before anything starts
        self._provider = provider
        self._agents: Agents | None = None
        self._engine: Engine | None = None
        self._shipper: Shipper | None = None
        self.untold: tuple[str, ...] = ()
        """After the end: machines that could not be told of it."""
        self.turns = Turns()
        """Runs wait here for their ranks."""
        self._news = threading.Lock()
        """Held for moments, while what follows is changed."""
        self._under_way: set[Submission] = set()
        self._numbers = itertools.count(1)
        self._running = 0
        """Runs that have begun and not ended."""
        self._clients = contextlib.ExitStack()
        """What plugins have open in the notebook."""
        self._mending = Mending(self, self.turns, self.world_size, inseparable=self.inseparable)
        self._notes: list[str] = []
        """What the user must hear before the next run."""

    # -- start and end -----------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.topology.world_size

    @property
    def inseparable(self) -> bool:
        """Whether all ranks must be started anew when one has died."""
        return any(plugin.rejoin is None for plugin in self.plugins)

    @property
    def agents(self) -> Agents:
        """The agents of a started pool."""
        if self._agents is None:
            raise PoolStateError(f"pool {self.name!r} is {self.state.value}: {self.state.sentence}")
        return self._agents

    @property
    def shipper(self) -> Shipper:
        """What knows which values the ranks hold."""
        if self._shipper is None:
            raise PoolStateError(f"pool {self.name!r} is {self.state.value}: {self.state.sentence}")
        return self._shipper

    def move(self, event: Event) -> None:
        """Something has happened to the pool; refused where it is not allowed."""
        self.state = states.move(self.state, event, self.name)

    def start(self, say: Callable[[str], None] = lambda said: None) -> Pool:
        """Acquire the machines and bring up all ranks; whatever goes wrong, nothing is left running."""
        begun = time.monotonic()
        self.move(Event.START)
        try:
            self._bring_up(say)
        except BaseException:
            self.close()
            raise
        self.move(Event.STARTED)
        self._lifetime.begin("start")
        self._lifetime.end("start", time.time())
        self.started_at = time.time()
        self.start_seconds = time.monotonic() - begun
        self._enter_clients()
        return self

    def _enter_clients(self) -> None:
        """Open what plugins do in the notebook; if one fails, the pool goes."""
        for plugin in self.plugins:
            try:
                self._clients.enter_context(plugin.around_client(self))
            except BaseException as problem:
                problem.add_note(
                    f"raised by the plugin {plugin.name!r} in around_client; the pool is stopped"
                )
                self.close()
                raise

    def _bring_up(self, say: Callable[[str], None]) -> None:
        nodes = self._provider.acquire(self.plan, self.job_id, say)
        self._agents = Agents(nodes, self._on_death, self._on_loss, self._on_note, self._on_limit)
        self._agents.start(
            specs.of_agents(
                self.plan, self.plugins, self.name, self.job_id, nodes, self.defaults.away, os.environ
            )
        )
        from skymagic.data.shipping.shipper import Shipper
        from skymagic.run.engine import Engine  # imports ipyparallel, while the agents start

        self._agents.order(
            specs.of_ranks(
                self.plan, self.plugins, self.job_id, self._agents.meet(self.job_id, START_TIMEOUT)
            )
        )
        controller = self._agents.wait_controller(START_TIMEOUT)
        self._engine = Engine(controller.client, nodes[0].forward)
        self._shipper = Shipper(
            open_store(self._agents, self.plan.remote, self.tell), self.namespace, str(Path.cwd())
        )
        self._agents.wait_ready(START_TIMEOUT)
        self._bind(range(self.world_size))

    def _bind(self, ranks: Iterable[int]) -> None:
        assert self._engine is not None and self._agents is not None
        idents = {rank: self._agents.ranks[rank].ident for rank in ranks}
        self._engine.bind({rank: ident for rank, ident in idents.items() if ident is not None}, START_TIMEOUT)

    def close(self) -> None:
        """End all ranks and release all machines; legal in every state, twice is safe."""
        if self.state is State.STOPPED:
            self._gone(self)
            return
        self.move(Event.STOP)
        for release in (
            self._clients.close,
            self._close_store,
            self._close_engine,
            self._close_agents,
            self._provider.release,
        ):
            with contextlib.suppress(Exception):
                release()
        self.move(Event.STOPPED)
        if self.ended is None:
            self._gone(self)

    def _close_store(self) -> None:
        if self._shipper is not None and self.plan.remote:
            self._shipper.store.close()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _close_agents(self) -> None:
        if self._agents is None:
            return
        self._agents.close()
        self.untold = tuple(self._agents.untold)
        hello = self._agents.started.get(0)
        if not self.plan.remote and hello is not None:  # an agent that was killed could not
            for folder in (hello.directory, hello.store):
                shutil.rmtree(folder, ignore_errors=True)

    # -- news from below ---------------------------------------------------------------------------------------------

    def _on_death(self, exited: wire.RankExited) -> None:
        with self._news:
            current = next((each for each in self._under_way if exited.rank in each.ranks), None)
            if current is not None:
                current.put("died", exited.rank, {"exited": exited})
        if current is None:
            self._died_between_runs(exited)

    def _died_between_runs(self, exited: wire.RankExited) -> None:
        if self.state in (State.READY, State.RUNNING) and not exited.expected:
            host = self.agents.ranks[exited.rank].hostname
            self.tell(
                f"rank {exited.rank} on {host} had died ({describe(exited)}); it was started anew and lost its variables"
            )
            self._mend([exited.rank])

    def _on_loss(self, index: int, reason: str) -> None:
        if self.state in (State.STOPPING, State.STOPPED, State.STARTING, State.LOST):
            return
        if limit := self._lifetime.reason(time.time()):  # over while nobody here could be told
            self._on_limit(limit)
            return
        ranks = self.agents.ranks_of(index) if index else list(range(self.world_size))
        self.move(Event.DEGRADE if index else Event.LOSE)
        if index:
            self._far_store(lambda store: store.lose(index))
            self.tell(
                f"{reason}: {rank_words(ranks)} and their variables are lost; {without(ranks, self.world_size)}"
            )
        with self._news:
            under_way = list(self._under_way)
        if not under_way and not index:
            self.tell(f"pool {self.name!r} is lost: {reason}")
        for current in under_way:
            for rank in {*current.ranks} & {*ranks}:
                gone = wire.RankExited(rank, 0, None, False, tail=reason)
                current.put("died", rank, {"exited": gone})

    def _far_store(self, act: Callable[[RemoteStore], None]) -> None:
        if self._shipper is not None and self.plan.remote:
            act(cast("RemoteStore", self._shipper.store))

    def _on_note(self, text: str) -> None:
        with self._news:
            for current in self._under_way:
                current.put("note", -1, {"text": text})

    def _on_limit(self, reason: str) -> None:
        """The agents end everything: whoever waits hears it at once, and what is held here is given back."""
        if self.state in (State.STARTING, State.STOPPING, State.STOPPED):
            return
        with self._news:
            self.ended = f"pool {self.name!r} ended {reason}"
            under_way = list(self._under_way)
        self.move(Event.STOP)
        for current in under_way:
            for rank in current.ranks:
                gone = wire.RankExited(rank, 0, None, True, tail=self.ended)
                current.put("died", rank, {"exited": gone})
        threading.Thread(target=self.close, name="skymagic-end", daemon=True).start()

    def check_ended(self) -> None:
        """Raises PoolStateError if the pool has ended by itself, with the reason and what to do."""
        if self.ended is not None:
            raise PoolStateError(f"{self.ended}: %sky_pool makes it anew")

    # -- runs --------------------------------------------------------------------------------------------------------

    def run(self, spec: RunSpec, screen: Screen, limits: Limits, stop: StopSignal | None = None) -> Report:
        """Ship what the run needs, carry it out, and mend what broke; waits for its ranks first.

        Args:
            stop: ends the run from another thread.

        Raises:
            CaptureError: names that cannot travel; nothing has run.
            PoolStateError: the pool is stopped or lost.
            RunInterrupted: it was stopped before it began.
        """
        with self.turns.ask(spec.ranks):
            self.check_ended()
            self._mending.check()
            self._check_there(spec.ranks)
            self._show_notes(screen)
            with self._counted():
                manifest = self._load(spec, screen)
                report = self._carry_out(spec, manifest, screen, limits, stop or StopSignal())
            self._mend_after(report)
        if not report.good and self._mending.wait(TOLD_AT_ONCE):
            report.notes, self._notes = self._notes, []
        return report

    def _check_there(self, ranks: Sequence[int]) -> None:
        """Before a run on some ranks of a pool that has released or lost some: whether these are there."""
        if max(ranks, default=0) >= self.world_size:
            raise PoolStateError(
                f"pool {self.name!r} has {count(self.world_size, 'rank')} by now, and the cell was for "
                f"{rank_words(list(ranks))}: run it again"
            )
        if self.state is not State.DEGRADED:
            return
        lost = [rank for rank, state in self.agents.ranks.items() if not state.ready]
        if {*ranks} & {*lost}:
            reasons = "; ".join(self.agents.gone.values()) or "they did not come back"
            raise PoolStateError(f"{rank_words(lost)} are gone ({reasons}): {without(lost, self.world_size)}")

    def tell(self, note: str) -> None:
        """Let the user hear this before the next run; the same twice is told once."""
        if note not in self._notes:
            self._notes.append(note)

    def _show_notes(self, screen: Screen) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            screen.note(f"[{note}]\n")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """The pool is running while there is a run: the first one says so, and the last one."""
        with self._news:
            if self.state is not State.RUNNING:
                self.move(Event.RUN)
            self._running += 1
            self.runs += 1
        try:
            yield
        finally:
            with self._news:
                self._running -= 1
                if not self._running:
                    self.move(Event.DONE)
                    if self.agents.gone:
                        self.move(Event.DEGRADE)

    def _load(self, spec: RunSpec, screen: Screen, *, dry_run: bool = False) -> Manifest:
        """What the run needs on its ranks, written into the store; says so when it takes long."""
        progress = Progress(screen.note)
        manifest = self.shipper.prepare(
            spec.source_without_magics, spec.ranks, push=spec.push, no_push=spec.no_push, fresh=spec.fresh,
            extra=spec.extra, dry_run=dry_run, progress=progress, warn=lambda said: screen.note(f"[{said}]\n"),
        )  # fmt: skip
        progress.finish()
        return manifest

    def preview(self, spec: RunSpec) -> Manifest:
        """What a run would ship; nothing is written or sent."""
        return self._load(spec, NullScreen(), dry_run=True)

    def _carry_out(
        self, spec: RunSpec, manifest: Manifest, screen: Screen, limits: Limits, stop: StopSignal
    ) -> Report:
        order = RunCell(
            run=next(self._numbers),
            ranks=spec.ranks,
            visible_ranks=spec.visible_ranks,
            screen_limit=self.defaults.screen_limit,
            execution_count=spec.execution_count,
            manifest=manifest.orders,
            gather=spec.gather,
            gather_ranks=spec.gather_ranks,
            value_ranks=spec.value_ranks,
        )
        if stop.sent:
            raise RunInterrupted("stopped before it began")
        submission = Submission(spec.ranks)
        stop.attach(submission)
        with interrupt.deferred() as interrupts, interrupts.sent_to(submission):
            report = self.send(submission, order, spec.source, screen, limits)
        for number, rank in report.ranks.items():
            if rank.outcome is not None and rank.outcome.get("bound"):
                self.shipper.bound(manifest, number)
                self.shipper.missing(number, rank.outcome.get("missing", ()))
        return report

    def send(
        self, submission: Submission, order: Order, source: str, screen: Screen, limits: Limits
    ) -> Report:
        """Have an order carried out by ranks whose turn it is; waits for them."""
        assert self._engine is not None
        try:
            self._lifetime.begin(id(submission))
            with self.agents.busy(submission.ranks):
                self._submit(submission, order, source)
                report = Run(submission, self.agents, screen, limits).wait()
        finally:
            self._lifetime.end(id(submission), time.time())
            with self._news:
                self._under_way.discard(submission)
        for event in submission.unread("died"):  # after its outcome
            self._died_between_runs(event.content["exited"])
        self._engine.purge(submission)
        return report

    def _submit(self, submission: Submission, order: Order, source: str) -> None:
        """Send an order; from now on a rank's death is news for whoever waits for it, also if it died just before."""
        assert self._engine is not None
        with self._news:
            self.check_ended()
            self._under_way.add(submission)
        for rank in submission.ranks:
            exited = self.agents.ranks[rank].exited
            if exited is not None:
                submission.put("died", rank, {"exited": exited})
        try:
            self._engine.submit(submission, order, source)
        except BaseException:
            self._under_way.discard(submission)
            raise

    # -- mending --------------------------------------------------------------------------------------------------------

    def _mend_after(self, report: Report) -> None:
        dead = [number for number, rank in report.ranks.items() if rank.died is not None]
        left = [
            n
            for n, rank in report.ranks.items()
            if rank.outcome is not None and not rank.outcome.get("joined", True)
        ]
        if self.state in (State.READY, State.RUNNING) and (
            dead or left or report.freed or report.out_of_step
        ):
            self._mend(dead)

    def _mend(self, dead: Iterable[int]) -> None:
        states.move(self.state, Event.MEND, self.name)  # refuses where it is not allowed
        self._mending.begin(dead)

    def replace(self, ranks: Sequence[int], generation: int) -> None:
        """End what is left of these ranks and begin to start them anew; what they held is forgotten."""
        assert self._engine is not None
        self._engine.forget(ranks)
        self.shipper.forget(ranks)
        self.agents.respawn(ranks, generation)

    def take_up(self, ranks: Sequence[int]) -> None:
        """Wait for ranks that are starting, and bind them."""
        self.agents.wait_ready(START_TIMEOUT, ranks)
        self._bind(ranks)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Start ranks anew (all of them): their variables are gone. Legal in every state but the end.

        Raises:
            PoolError: they did not come back.
        """
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if wrong:
            raise RequestError(
                f"pool {self.name!r} has ranks 0 to {self.world_size - 1}, not {rank_words(wrong)}"
            )
        back = self.agents.revive(START_TIMEOUT)
        for node in {self.agents.specs[rank][0] for rank in back}:
            self._far_store(lambda store, node=node: store.regain(node))  # type: ignore[misc]
        chosen = sorted({*chosen, *back})
        self.agents.signal(chosen, signal.SIGKILL)
        self._mending.wait()
        self._mending.forgive()
        self._mend(chosen)
        self._mending.wait()
        if (problem := self._mending.forgive()) is not None:
            raise PoolError(f"the ranks did not come back: {problem}") from problem

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
        states.move(self.state, Event.MEND, self.name)
        before, after = self.world_size, plan.topology.world_size
        turn = self.turns.ask(range(max(before, after)))
        turn.__enter__()  # may be given up; what follows may not, and so goes on by itself when the user does not wait for it
        problems: list[Exception] = []

        def work() -> None:
            try:
                self._resize(plan)
            except Exception as problem:
                problems.append(problem)
            finally:
                turn.__exit__()

        thread = threading.Thread(target=work, name="skymagic-resize", daemon=True)
        thread.start()
        thread.join()
        if problems:
            raise problems[0]
        return variables_then(
            before, after, [plugin.name for plugin in self.plugins if plugin.rejoin is None]
        )

    def _resize(self, plan: Plan) -> None:
        """Change the ranks; called with the turn of all of them."""
        assert self._engine is not None
        self._mending.check()
        before, after = self.world_size, plan.topology.world_size
        self.plan = plan
        self.agents.signal(range(after, before), signal.SIGKILL)
        ranks = specs.of_ranks(self.plan, self.plugins, self.job_id, self.agents.nodes)
        self.agents.reshape(ranks, START_TIMEOUT)
        self._engine.forget(range(after, before))
        self.shipper.forget(range(after, before))
        infos = {rank: ranks[rank][1].info for rank in range(min(before, after))}
        self._mending.resize(after, infos, range(before, after))

    # -- looking -----------------------------------------------------------------------------------------------------

    def log_path(self, rank: int) -> str:
        """Where a rank's complete output is, on its node."""
        return str(Path(self.agents.started[0].directory) / f"rank-{rank}.log")

    def files(self) -> Files:
        """What copies between the notebook and the machines of the pool; all nodes of this machine are one."""
        from skymagic.files import Files

        return Files(self.agents.nodes, lambda node: node.run(processes.FILES, self._folder))

    def machines(self, chosen: Selection) -> tuple[int, ...]:
        """The numbers of the machines of these nodes, as `files` knows them. Raises RequestError for nodes that there are not."""
        nodes = chosen.ranks(self.plan.topology.nodes, "node")
        last = len(self.agents.nodes) - 1
        return tuple(sorted({min(node, last) for node in nodes}))

    def status(self) -> list[tuple[object, ...]]:
        """A row for each rank: rank, node, host, process id, state."""
        return rows(self.plan.topology, self._agents, self.state) if self._agents is not None else []

    def __repr__(self) -> str:
        shape = self.plan.topology
        names = ", ".join(spec.name for spec in self.plan.request.plugins) or "none"
        nodes = count(shape.nodes, "node")
        return (
            f"<Pool {self.name!r}: {nodes} × {count(shape.procs_per_node, 'rank')} on {', '.join(self.plan.hosts)}, "
            f"plugins: {names}, {self.state.value}>"
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
