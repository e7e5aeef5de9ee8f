"""``%%sky_sh``: a shell script on every node of a pool, from a request to how it ended there, node by node.

A script is a run on the first rank of each node, whose code runs it beside the rank (`skymagic.kernels.script.script`): it shares with
cells how they are shown, limited, stopped, and ended when another one has failed. Its folder is the notebook's own on this machine; on other
machines it is a copy, which is brought up to date first.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

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
    noted_in,
)
from skymagic.files.changes import summary
from skymagic.jobs import cell as broadcast
from skymagic.jobs import failures
from skymagic.jobs.cell import ended
from skymagic.plan.requests import RunRequest, ShellRequest, missing_secrets
from skymagic.plan.units import Selection, count, rank_words
from skymagic.pool import Pool
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.report import Limits, RankRun, Report, RunSpec
from skymagic.wire import processes
from skymagic.wire.order import LAST_VALUE
from skymagic.wire.processes import status_words

REMOTE_ROOT = "~/.skymagic/work"
"""Where such folders are on a node."""


def folder_here(text: str) -> Path:
    """The folder that a user names. Raises RequestError when there is none."""
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        raise RequestError(f"--workdir: there is no folder {text!r} here ({folder})")
    return folder


def folder_on_nodes(pool: Pool, folder: Path, nodes: Sequence[int]) -> str:
    """Copy what differs of a folder to these nodes, and return its path there.

    Raises:
        FilesError: what cannot be copied, for all nodes at once.
    """
    if not pool.plan.remote:
        return str(folder)
    destination = remote_folder(folder)
    image = pool.plan.image
    includes = [str(Path(text).expanduser().absolute()) for text in image.includes]
    machines = pool.machines(Selection.of(nodes))
    with Copying() as progress:
        copied = pool.files().sync(
            folder, destination, image.excludes, includes, machines, progress
        )
    if any(one.files or one.removed or one.notes for one in copied):
        progress.end(f"[{folder.name}: {summary(copied, progress.seconds)}]")
    return destination


def remote_folder(folder: Path) -> str:
    """The copy of a folder on a node: one path for each folder and machine."""
    mark = hashlib.sha256(
        f"{platform.node()}\0{folder}".encode(errors="surrogateescape")
    ).hexdigest()[:8]
    return f"{REMOTE_ROOT}/{folder.name or 'root'}-{mark}"


SCRIPT_VARIABLE = "_sky_script"
SOURCE = f'__import__("importlib").import_module("{processes.SCRIPT}").run({SCRIPT_VARIABLE});'
NNODES_OPTION = re.compile(r"--nnodes[= ]+[\"']?(\d+)")


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended on one node.

    Attributes:
        node: its number in the pool. hostname: the machine.
        status: the exit code; negative for the signal that ended it; None when it did not begin or nobody could tell.
        tail: the last lines that it wrote, standard output and error alike.
        stopped: it was ended because of another node's failure, the time limit or the stop button.
    """

    node: int
    hostname: str
    status: int | None
    tail: str = field(default="", repr=False)
    stopped: bool = False
    words: str = field(default="", repr=False)
    cause: Mapping[str, Any] | None = field(default=None, repr=False)
    left: tuple[str, ...] = field(default=(), repr=False)
    problem: str = field(default="", repr=False)

    @property
    def follows(self) -> bool:
        """Whether it only failed because another node did."""
        return self.stopped or bool(self.cause and self.cause["follows"])

    @property
    def how(self) -> str:
        """How it ended, in a line."""
        if self.problem:
            return f"could not run: {self.problem}" if self.status is None else self.problem
        return f"{'ended with' if (self.status or 0) >= 0 else 'was ended by'} {status_words(self.status)}"


@dataclass(frozen=True)
class Outcome:
    """How a script ended on all nodes that ran it; `error` is what is to be raised."""

    value: list[ScriptEnd]
    error: RunError | None = None


class NodeScreen(NotebookScreen):
    """Shows output by node instead of by rank."""

    def __init__(
        self, nodes: Sequence[int], node_of: Callable[[int], int], view: RunView | None
    ) -> None:
        super().__init__(nodes, view)
        self._node_of = node_of

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a node's script."""
        super().text(self._node_of(rank), name, text)

    def progress(self, state: Callable[[], RunState]) -> None:
        """How the run is."""
        super().progress(lambda: by_node(state(), self._node_of))


Told = TypeVar("Told", RunState, RunSummary)


def by_node(told: Told, node_of: Callable[[int], int]) -> Told:
    """What is told of ranks, of their nodes."""
    return replace(told, unit="node", failed=tuple(map(node_of, told.failed)))


def spec_of(request: ShellRequest, pool: Pool, cell: broadcast.Cell) -> RunSpec:
    """The run of a script; its folder is on the nodes when this returns.

    Raises:
        RequestError: nodes, a folder or variables that are not there; all mistakes.
        FilesError: the folder cannot be copied.
    """
    mistakes = missing_secrets(request.secrets, os.environ)
    topology = pool.plan.topology
    ranks: tuple[int, ...] = ()
    visible: tuple[int, ...] = ()
    folder: Path | None = None
    if request.rank is not None:
        with noted_in(mistakes, "--targets: "):
            ranks = visible = (single_rank(request.rank, pool.world_size),)
    else:
        chosen = RunRequest(targets=request.nodes, only=request.only)
        with noted_in(mistakes):
            part, shown = chosen.who(topology.nodes, "node", "--nodes")
            ranks = tuple(topology.ranks_on(node)[0] for node in part)
            visible = tuple(topology.ranks_on(node)[0] for node in shown)
    with noted_in(mistakes):
        folder = folder_here(request.workdir) if request.workdir is not None else None
    if mistakes:
        raise RequestError(mistakes)
    asked = {
        "text": cell.source,
        "workdir": folder_on_nodes(pool, folder, [topology.node_of(rank) for rank in ranks])
        if folder
        else "",
        "as_rank": request.rank is not None,
        "env": {**dict(request.env), **{name: os.environ[name] for name in request.secrets}},
        "without": ours(pool),
        "grace": pool.defaults.grace,
    }
    return RunSpec(
        source=SOURCE,
        source_without_magics=SOURCE,
        ranks=ranks,
        value_ranks=ranks,
        visible_ranks=visible,
        execution_count=cell.execution_count,
        extra={SCRIPT_VARIABLE: asked},
        waits=request.busy == "wait",
        job="script",
        output=request.output or "",
    )


def single_rank(selection: Selection, world_size: int) -> int:
    """Return the rank that ``-t`` names. Raises RequestError if it names several, or one that does not exist."""
    ranks = selection.ranks(world_size)
    if len(ranks) > 1:
        raise RequestError(
            f"one rank at a time, not {len(ranks)}; --nodes {selection} runs the script on nodes"
        )
    return ranks[0]


def ours(pool: Pool) -> list[str]:
    """Variables that the pool has set for its ranks, and nobody has asked for."""
    given = {*os.environ, *pool.plan.image.env, *dict(pool.plan.request.env)}
    return [name for name in ("OMP_NUM_THREADS",) if name not in given]


def too_many_nodes(text: str, nodes: int) -> str:
    """A line for a script that waits for more nodes than run it; else ""."""
    asked = max((int(found) for found in NNODES_OPTION.findall(text)), default=0)
    if asked <= nodes:
        return ""
    return (
        f"[--nnodes={asked}, and {count(nodes, 'node')} will run the script: torchrun waits for the others. "
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
    """Run a script to its end on all nodes; what went wrong is in the outcome.

    Args:
        stop: ends the run from another thread.
        view: the line of the run, where it has one already.

    Raises:
        PoolStateError, CaptureError: nothing has run.
        RunInterrupted: it was stopped before it began.
    """
    stop = stop or StopSignal()

    def carry_out(shown: Screen, unstalled: Limits) -> Report:
        if note := too_many_nodes(spec.extra[SCRIPT_VARIABLE]["text"], len(spec.ranks)):
            shown.note(note)
        return pool.runs.run(spec, shown, unstalled, stop)

    return _carried_out(pool, spec, limits, carry_out, stop, view)


def follow(pool: Pool, spec: RunSpec, run: int, limits: Limits) -> Outcome:
    """Show the rest of a script that another notebook began, and how it ended."""
    stop = StopSignal()

    def carry_out(shown: Screen, unstalled: Limits) -> Report:
        return pool.runs.follow(spec, run, shown, unstalled, stop)

    return _carried_out(pool, spec, limits, carry_out, stop)


def _carried_out(
    pool: Pool,
    spec: RunSpec,
    limits: Limits,
    run: Callable[[Screen, Limits], Report],
    stop: StopSignal,
    view: RunView | None = None,
) -> Outcome:
    node_of = pool.plan.topology.node_of
    if view is None and limits.view_after < math.inf:
        actions = Actions(interrupt.pressing(stop))
        view = RunView(limits.view_after, actions if pool.defaults.buttons else None)
    screen = NodeScreen([node_of(rank) for rank in spec.visible_ranks], node_of, view)
    with ended(
        view, [spec.output] if spec.output else [], lambda end: by_node(end, node_of)
    ) as ending:
        # what a script does is none of our business: its processes are not ours to look into, also when it says nothing for a while
        report = ending.report = run(screen, replace(limits, stall_after=math.inf))
        screen.finish()
    pool.shown.deliver(report.run, spec.ranks)
    ends = [end_of(rank, report.ranks[rank], pool) for rank in spec.ranks]
    for end in ends:
        if end.left:
            screen.note(
                f"[node {end.node}: the script left running, and this was ended: {'; '.join(end.left)}]\n"
            )
    return Outcome(ends, None if report.good else failure(report, ends, pool, limits))


def end_of(rank: int, ran: RankRun, pool: Pool) -> ScriptEnd:
    """How the script ended on a rank's node."""
    outcome = ran.outcome or {}
    told: Mapping[str, Any] = {}
    ref = outcome.get("values", {}).get(LAST_VALUE)
    if ref is not None and "error" not in ref:
        told = pool.shipper.unpack(ref)
    elif (problem := failures.exception_of(outcome, pool)) is not None and problem.args:
        told = problem.args[0] if isinstance(problem.args[0], dict) else {}
    if ran.died is not None:
        told = {"tail": ran.died.tail, "problem": "the rank that started it died"}
    elif not told and ran.failed and not ran.stopped:
        told = {"problem": f"{outcome['ename']}: {outcome['evalue']}"}
    return ScriptEnd(
        pool.plan.topology.node_of(rank), pool.agents.ranks[rank].hostname, told.get("status"), told.get("tail", ""),
        ran.stopped and bool(outcome.get("interrupted") or ran.died), told.get("words", told.get("tail", "")), told.get("cause"), tuple(told.get("left", ())), told.get("problem", ""),
    )  # fmt: skip


# -- failures --------------------------------------------------------------------------------------------------------


def failure(report: Report, ends: Sequence[ScriptEnd], pool: Pool, limits: Limits) -> RunError:
    """The one error of a script that did not end well."""
    notes = [*failures.lost_notes(report, pool), *report.notes]
    stopped = [end.node for end in ends if end.stopped]
    if report.interrupted:
        where = f"interrupted on {node_words(stopped)}" if stopped else "interrupted"
        return RunInterrupted("\n".join([where, *notes]))
    if report.timed_out:
        lines = [
            f"the script took longer than {limits.timeout:g} s and was stopped on {node_words(stopped)}"
        ]
        lines += [
            line
            for end in ends
            if end.stopped
            for line in last_words(end, f"node {end.node}'s last lines:")
        ]
        return RunTimeout("\n".join([*lines, *notes]))
    if any(rank.died is not None and not rank.killed for rank in report.ranks.values()):
        return failures.failure(report, pool, limits)
    has_torch = any(plugin.name == "torch" for plugin in pool.plugins)
    return script_error(ends, pool.plan.topology.nodes, notes, has_torch=has_torch)


def script_error(
    ends: Sequence[ScriptEnd], nodes: int, notes: Sequence[str] = (), *, has_torch: bool = False
) -> ScriptError:
    """The error of a script that failed: where, how, and why as far as something tells; pure."""
    failed = [end for end in ends if end.status != 0]
    # what a stopped node knew may tell more than a failed one, which only saw another process go away
    knew = [end for end in failed if end.stopped and end.cause and not end.cause["follows"]]
    first = next((end for end in failed if not end.follows), (knew or failed)[0])
    lines = [f"node {first.node} of {nodes} on {first.hostname} {first.how}"]
    if first.cause:
        worker = first.cause["worker"]
        lines += [
            first.cause["text"],
            *([f"[{worker}]"] if worker and worker not in first.cause["text"] else []),
        ]
    if not first.cause or (
        "\n" not in first.cause["text"] and "SIGKILL" not in first.cause["text"]
    ):
        lines += last_words(first, "its last lines:")  # where native code says why it gives up
    others = [end for end in failed if end is not first]
    same = [end.node for end in others if not end.stopped and end.status == first.status]
    lines += [f"the same on {node_words(same)}"] if same else []
    lines += [
        f"node {end.node} {end.how}" for end in others if not end.stopped and end.node not in same
    ]
    stopped = [end.node for end in others if end.stopped]
    lines += [f"{node_words(stopped)} had to be stopped"] if stopped else []
    error = ScriptError(
        "\n".join([*lines, *hints(first, has_torch=has_torch), *notes]),
        node=first.node,
        hostname=first.hostname,
        status=first.status,
    )
    error.failures = tuple(failed)
    return error


def last_words(end: ScriptEnd, title: str) -> list[str]:
    """The last lines of a node's output under a title."""
    lines = [display.last_state(line) for line in end.words.splitlines() if line.strip()]
    return [title, *(f"  {line}" for line in lines)] if lines else []


def hints(end: ScriptEnd, *, has_torch: bool = False) -> list[str]:
    """What to try."""
    said = f"{end.tail}\n{(end.cause or {}).get('text', '')}"
    found = []
    if re.search(r"torchrun: (command )?not found", said):
        found.append(
            "torchrun is not on the PATH that the script has set: python -m torch.distributed.run is the same"
            if has_torch
            else "torchrun comes with PyTorch: make the pool with --plugin torch, or install torch for its Python"
        )
    if re.search(r"EADDRINUSE|address already in use", said, re.IGNORECASE):
        found.append(
            "a port is in use on that node: $MASTER_PORT is one that was free when the script began"
        )
    if "terminate called without an active exception" in f"{said}\n{end.words}":
        found.append(
            "a gloo thread was still running when Python exited: delete the DDP model (del model; gc.collect()) before "
            "dist.destroy_process_group()"
        )
    return found


def node_words(nodes: Sequence[int]) -> str:
    """ "node 3", "nodes 0, 2", "nodes 0–3"."""
    return rank_words(nodes, "node") if nodes else "no node"
