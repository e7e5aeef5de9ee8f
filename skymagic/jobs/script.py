"""``%%sky_sh``: shell scripts on every node of a pool, and their exit status on each node.

A script is a run on the first rank of each node. The code of the run starts the script next to the
rank (`skymagic.kernels.script.script`), so that scripts and cells share their display, limits,
stopping, and failing fast. The script's working folder is the notebook's own folder on this
machine; on other machines it is a copy, which is synchronized first.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from skymagic.content.files.changes import summary
from skymagic.display import text as display
from skymagic.display.controls import Actions
from skymagic.display.run_line import RunState, RunSummary, RunView
from skymagic.display.screen import Copying, NotebookScreen, Screen
from skymagic.errors import (
    RequestError,
    RunError,
    RunInterrupted,
    RunTimeout,
    ScriptError,
    collect_mistakes,
)
from skymagic.jobs import cell as broadcast
from skymagic.jobs import failures
from skymagic.jobs.cell import showing_end
from skymagic.plan.requests import RunRequest, ShellRequest, missing_secrets
from skymagic.plan.units import Selection, count, rank_words, verb_form
from skymagic.pool import Pool
from skymagic.pool.runs import UnfinishedRun
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.state import Limits, RankRun, Report, RunSpec
from skymagic.wire import processes
from skymagic.wire.order import LAST_VALUE, RunCell
from skymagic.wire.processes import status_words
from skymagic.wire.script import ScriptCause, ScriptOrder, ScriptResult

REMOTE_ROOT = "~/.skymagic/work"
"""Parent folder of these copies on a node."""


def local_folder(text: str) -> Path:
    """Return the folder that a user names. Raises RequestError if it does not exist."""
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        raise RequestError(f"--workdir: there is no folder {text!r} here ({folder})")
    return folder


def sync_folder(pool: Pool, folder: Path, nodes: Sequence[int]) -> str:
    """Synchronize a folder with these nodes, and return its path there.

    Raises:
        FilesError: some files cannot be copied; lists the problems of all nodes.
    """
    if not pool.plan.remote:
        return str(folder)
    destination = remote_folder(folder)
    image = pool.plan.image
    includes = [str(Path(text).expanduser().absolute()) for text in image.includes]
    machines = pool.machines(Selection.of(nodes))
    with Copying() as progress:
        results = pool.files().sync(
            folder, destination, image.excludes, includes, machines, progress
        )
    if any(result.files or result.removed or result.notes for result in results):
        progress.end(f"[{folder.name}: {summary(results, progress.seconds)}]")
    return destination


def remote_folder(folder: Path) -> str:
    """Return the path of a folder's copy on a node: a distinct path for each folder and machine."""
    mark = hashlib.sha256(
        f"{platform.node()}\0{folder}".encode(errors="surrogateescape")
    ).hexdigest()[:8]
    return f"{REMOTE_ROOT}/{folder.name or 'root'}-{mark}"


SCRIPT_VARIABLE = "_sky_script"
SOURCE = f'__import__("importlib").import_module("{processes.SCRIPT}").run({SCRIPT_VARIABLE});'
NNODES_OPTION = re.compile(r"--nnodes[= ]+[\"']?(\d+)")


@dataclass(frozen=True)
class ScriptEnd:
    """Result of a script on one node.

    Attributes:
        node: index of the node in the pool.
        hostname: name of the machine.
        status: the exit code; negative for the signal that ended it; None if it did not start or
            the status is unknown.
        tail: the last lines of its standard output and error.
        stopped: True if it was ended because of another node's failure, the time limit or the stop
            button.
    """

    node: int
    hostname: str
    status: int | None
    tail: str = field(default="", repr=False)
    stopped: bool = False
    message: str = field(default="", repr=False)
    cause: ScriptCause | None = field(default=None, repr=False)
    survivors: tuple[str, ...] = field(default=(), repr=False)
    problem: str = field(default="", repr=False)

    def with_result(self, result: ScriptResult) -> ScriptEnd:
        """Return this end with the result that the rank's process sent."""
        return replace(
            self,
            status=result.status,
            tail=result.tail,
            message=result.message,
            cause=result.cause,
            survivors=result.survivors,
            problem=result.problem,
        )

    @property
    def follows(self) -> bool:
        """True if it only failed because another node did."""
        return self.stopped or bool(self.cause and self.cause.follows)

    @property
    def result_text(self) -> str:
        """Description of the result, in a line."""
        if self.problem:
            return f"could not run: {self.problem}" if self.status is None else self.problem
        return (
            f"{'ended with' if (self.status or 0) >= 0 else 'was ended by'} "
            f"{status_words(self.status)}"
        )


@dataclass(frozen=True)
class Outcome:
    """Result of a script on all of its nodes; `error` is the error to raise."""

    value: list[ScriptEnd]
    error: RunError | None = None


class NodeScreen(NotebookScreen):
    """Screen that shows output by node instead of by rank."""

    def __init__(
        self, nodes: Sequence[int], node_of: Callable[[int], int], view: RunView | None
    ) -> None:
        super().__init__(nodes, view)
        self._node_of = node_of

    def text(self, rank: int, name: str, text: str) -> None:
        """Show text of a node's script."""
        super().text(self._node_of(rank), name, text)

    def progress(self, state: Callable[[], RunState]) -> None:
        """Show the state of the run."""
        super().progress(lambda: ranks_as_nodes(state(), self._node_of))


RunText = TypeVar("RunText", RunState, RunSummary)


def ranks_as_nodes(by_rank: RunText, node_of: Callable[[int], int]) -> RunText:
    """Convert a state or summary from ranks to nodes."""
    return replace(by_rank, unit="node", failed=tuple(map(node_of, by_rank.failed)))


def spec_of(request: ShellRequest, pool: Pool, cell: broadcast.Cell) -> RunSpec:
    """Build the specification of a script's run, and copy its folder to the nodes.

    Raises:
        RequestError: nodes, a folder or variables do not exist; lists all mistakes.
        FilesError: the folder cannot be copied.
    """
    mistakes = missing_secrets(request.secrets, os.environ)
    topology = pool.plan.topology
    ranks: tuple[int, ...] = ()
    visible: tuple[int, ...] = ()
    folder: Path | None = None
    if request.rank is not None:
        with collect_mistakes(mistakes, "--targets: "):
            ranks = visible = (single_rank(request.rank, pool.world_size),)
    else:
        selection = RunRequest(targets=request.nodes, only=request.only)
        with collect_mistakes(mistakes):
            part, shown = selection.participants(topology.nodes, "node", "--nodes")
            ranks = tuple(topology.ranks_on(node)[0] for node in part)
            visible = tuple(topology.ranks_on(node)[0] for node in shown)
    with collect_mistakes(mistakes):
        folder = local_folder(request.workdir) if request.workdir is not None else None
    if mistakes:
        raise RequestError(mistakes)
    nodes = [topology.node_of(rank) for rank in ranks]
    script = ScriptOrder(
        text=cell.source,
        workdir=sync_folder(pool, folder, nodes) if folder else "",
        as_rank=request.rank is not None,
        env={**dict(request.env), **{name: os.environ[name] for name in request.secrets}},
        without=pool_variables(pool),
        grace=pool.defaults.grace,
    )
    order = RunCell(
        ranks=ranks,
        value_ranks=ranks,
        visible_ranks=visible,
        execution_count=cell.execution_count,
        job="script",
        output=request.output or "",
    )
    return RunSpec(
        order,
        SOURCE,
        SOURCE,
        extra={SCRIPT_VARIABLE: script},
        waits=request.busy == "wait",
    )


def single_rank(selection: Selection, world_size: int) -> int:
    """Return the rank that ``-t`` names.

    Raises RequestError if it names several ranks, or one that does not exist.
    """
    ranks = selection.ranks(world_size)
    if len(ranks) > 1:
        raise RequestError(
            f"one rank at a time, not {len(ranks)}; --nodes {selection} runs the script on nodes"
        )
    return ranks[0]


def pool_variables(pool: Pool) -> tuple[str, ...]:
    """Return the variables that the pool has set for its ranks and that the user has not."""
    user_variables = {*os.environ, *pool.plan.image.env, *dict(pool.plan.request.env)}
    return tuple(name for name in ("OMP_NUM_THREADS",) if name not in user_variables)


def too_many_nodes_warning(text: str, nodes: int) -> str:
    """Warn about a script that waits for more nodes than run it; "" for others."""
    requested = max((int(number) for number in NNODES_OPTION.findall(text)), default=0)
    if requested <= nodes:
        return ""
    return (
        f"[--nnodes={requested}, and {count(nodes, 'node')} will run the script: torchrun waits "
        "for the others. "
        "Write --nnodes=$SKYPILOT_NUM_NODES]\n"
    )


def run(
    pool: Pool,
    spec: RunSpec,
    limits: Limits,
    *,
    stop: StopSignal | None = None,
    view: RunView | None = None,
) -> Outcome:
    """Run a script to its end on all nodes. A failure is returned in the outcome, not raised.

    Args:
        stop: ends the run from another thread.
        view: the run's progress line, if it already has one.

    Raises:
        PoolStateError, CaptureError: nothing has run.
        RunInterrupted: the run was stopped before it began.
    """
    stop = stop or StopSignal()

    def carry_out(shown: Screen, unstalled: Limits) -> Report:
        script = spec.extra[SCRIPT_VARIABLE]
        assert isinstance(script, ScriptOrder)
        if note := too_many_nodes_warning(script.text, len(spec.ranks)):
            shown.note(note)
        return pool.runs.run(spec, shown, unstalled, stop)

    return _run_and_summarize(pool, spec, limits, carry_out, stop, view)


def follow(pool: Pool, unfinished: UnfinishedRun, limits: Limits) -> Outcome:
    """Show the rest of a script that another notebook started, and return its result."""
    spec, stop = unfinished.spec, StopSignal()

    def carry_out(shown: Screen, unstalled: Limits) -> Report:
        return pool.runs.follow(spec, unfinished.run, shown, unstalled, stop)

    return _run_and_summarize(pool, spec, limits, carry_out, stop, elapsed=unfinished.seconds)


def _run_and_summarize(
    pool: Pool,
    spec: RunSpec,
    limits: Limits,
    run: Callable[[Screen, Limits], Report],
    stop: StopSignal,
    view: RunView | None = None,
    elapsed: float = 0.0,
) -> Outcome:
    node_of = pool.plan.topology.node_of
    if view is None and limits.view_after < math.inf:
        actions = Actions(interrupt.stop_from_any_thread(stop))
        view = RunView(limits.view_after, actions if pool.defaults.buttons else None, elapsed)
    screen = NodeScreen([node_of(rank) for rank in spec.order.visible_ranks], node_of, view)
    with showing_end(
        view,
        [spec.order.output] if spec.order.output else [],
        lambda end: ranks_as_nodes(end, node_of),
    ) as ending:
        # A script's processes are not ours to inspect, so do not report stalls, however long it is
        # silent.
        report = ending.report = run(screen, replace(limits, stall_after=math.inf))
        screen.finish()
    pool.runs.deliver(report.run, spec.ranks)
    ends = [end_of(rank, report.ranks[rank], pool) for rank in spec.ranks]
    for end in ends:
        if end.survivors:
            screen.note(
                f"[node {end.node}: the script left running, and this was ended: "
                f"{'; '.join(end.survivors)}]\n"
            )
    return Outcome(ends, None if report.succeeded else failure(report, ends, pool, limits))


def end_of(rank: int, ran: RankRun, pool: Pool) -> ScriptEnd:
    """Return the result of the script on a rank's node."""
    end = ScriptEnd(
        node=pool.plan.topology.node_of(rank),
        hostname=pool.agents.ranks[rank].hostname,
        status=None,
        stopped=ran.stopped and bool(ran.interrupted or ran.died),
    )
    if ran.died is not None:
        tail = ran.died.tail
        return replace(end, tail=tail, message=tail, problem="the rank that started it died")
    result: object = None
    ref, failure = ran.values.get(LAST_VALUE), ran.failure
    problem = failures.exception_of(failure, pool) if failure is not None else None
    if ref is not None and not ref.error:
        result = pool.shipper.unpack(ref)
    elif problem is not None and problem.args:
        result = problem.args[0]
    if isinstance(result, ScriptResult):
        return end.with_result(result)
    if failure is not None and not ran.stopped:
        return replace(end, problem=f"{failure.ename}: {failure.evalue}")
    return end


# -- failures -------------------------------------------------------------------------------------


def failure(report: Report, ends: Sequence[ScriptEnd], pool: Pool, limits: Limits) -> RunError:
    """Create the single error of a failed script."""
    notes = [*failures.lost_notes(report, pool), *report.notes]
    stopped = [end.node for end in ends if end.stopped]
    if report.interrupted:
        heading = f"interrupted on {node_words(stopped)}" if stopped else "interrupted"
        return RunInterrupted("\n".join([heading, *notes]))
    if report.timed_out:
        lines = [
            f"the script took longer than {limits.timeout:g} s and was stopped on "
            f"{node_words(stopped)}"
        ]
        lines += [
            line
            for end in ends
            if end.stopped
            for line in last_lines(end, f"node {end.node}'s last lines:")
        ]
        return RunTimeout("\n".join([*lines, *notes]))
    if any(rank.died is not None and not rank.killed for rank in report.ranks.values()):
        return failures.failure(report, pool, limits)
    has_torch = any(plugin.name == "torch" for plugin in pool.plugins)
    return script_error(ends, pool.plan.topology.nodes, notes, has_torch=has_torch)


def script_error(
    ends: Sequence[ScriptEnd], nodes: int, notes: Sequence[str] = (), *, has_torch: bool = False
) -> ScriptError:
    """Create the error of a failed script: the node, the status, and the cause if known; pure."""
    failed = [end for end in ends if end.status != 0]
    # A stopped node may know the cause, when a failed node only noticed that another process ended.
    informed = [end for end in failed if end.stopped and end.cause and not end.cause.follows]
    root = next((end for end in failed if not end.follows), (informed or failed)[0])
    lines = [f"node {root.node} of {nodes} on {root.hostname} {root.result_text}"]
    if root.cause:
        lines.append(root.cause.text)
        if root.cause.worker and root.cause.worker not in root.cause.text:
            lines.append(f"[{root.cause.worker}]")
    if not root.cause or ("\n" not in root.cause.text and "SIGKILL" not in root.cause.text):
        # native code explains its abort there
        lines += last_lines(root, "its last lines:")
    other_ends = [end for end in failed if end is not root]
    same_nodes = [end.node for end in other_ends if not end.stopped and end.status == root.status]
    lines += [f"the same on {node_words(same_nodes)}"] if same_nodes else []
    lines += [
        f"node {end.node} {end.result_text}"
        for end in other_ends
        if not end.stopped and end.node not in same_nodes
    ]
    stopped = [end.node for end in other_ends if end.stopped]
    if stopped:
        lines.append(
            f"{node_words(stopped)} {verb_form(len(stopped), 'was', 'were')} stopped "
            f"because node {root.node} failed"
        )
    error = ScriptError(
        "\n".join([*lines, *hints(root, has_torch=has_torch), *notes]),
        node=root.node,
        hostname=root.hostname,
        status=root.status,
    )
    error.failures = tuple(failed)
    return error


def last_lines(end: ScriptEnd, title: str) -> list[str]:
    """Return the last lines of a node's output under a title."""
    lines = [display.last_state(line) for line in end.message.splitlines() if line.strip()]
    return [title, *(f"  {line}" for line in lines)] if lines else []


def hints(end: ScriptEnd, *, has_torch: bool = False) -> list[str]:
    """Suggest remedies for known failures."""
    output = f"{end.tail}\n{end.cause.text if end.cause else ''}"
    suggestions = []
    if re.search(r"torchrun: (command )?not found", output):
        suggestions.append(
            "torchrun is not on the PATH that the script has set: python -m torch.distributed.run "
            "is the same"
            if has_torch
            else "torchrun comes with PyTorch: make the pool with --plugin torch, or install torch "
            "for its Python"
        )
    if re.search(r"EADDRINUSE|address already in use", output, re.IGNORECASE):
        suggestions.append(
            "a port is in use on that node: $MASTER_PORT is one that was free when the script began"
        )
    if "terminate called without an active exception" in f"{output}\n{end.message}":
        suggestions.append(
            "a gloo thread was still running when Python exited: delete the DDP model (del model; "
            "gc.collect()) before "
            "dist.destroy_process_group()"
        )
    return suggestions


def node_words(nodes: Sequence[int]) -> str:
    """Name nodes: "node 3", "nodes 0, 2", "nodes 0–3"."""
    return rank_words(nodes, "node") if nodes else "no node"
