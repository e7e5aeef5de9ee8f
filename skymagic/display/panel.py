"""A pool as HTML: a title, and its ranks as cells coloured by state, node by node; and its start.

Each cell may show what its rank uses. Information is never conveyed by colour alone: each cell has
its state as a tooltip, and trouble is also written as text, because a saved notebook may be
displayed without styles. A start is shown as lines; in a notebook it is one display, redrawn in
place, which ends as one line.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from skymagic.display.ipykernel6 import cell_context
from skymagic.display.live import Area, is_watched
from skymagic.plan.units import count, size
from skymagic.wire.untrusted import sanitized


@dataclass(frozen=True)
class RankUse:
    """Resource use of one rank.

    Attributes:
        cpu: CPU use, 1.0 for one core; NaN after the first measurement.
        memory: bytes used by its process.
        node_memory: total bytes of its node.
        gpu: fraction of time that its GPU is busy.
        gpu_memory, gpu_total: bytes in use by all processes, and in total, on the GPU; NaN without
            a GPU.
    """

    cpu: float = math.nan
    memory: float = math.nan
    node_memory: float = math.nan
    gpu: float = math.nan
    gpu_memory: float = math.nan
    gpu_total: float = math.nan


def short_usage_text(use: RankUse) -> str:
    """Return the use for a cell: ``97% 31G`` of the GPU, or else of CPU and memory."""
    share, memory = (
        (use.gpu, use.gpu_memory) if use.gpu_total == use.gpu_total else (use.cpu, use.memory)
    )
    return " ".join(filter(None, (_percent(share), _letters(memory))))


def usage_text(use: RankUse) -> str:
    """Return the use in full: ``GPU 97%, 31 of 80 GB; CPU 110%, memory 2.1 GB of 64.0 GB``."""
    gpu = [f"GPU {_percent(use.gpu)}", f"{_bytes(use.gpu_memory)} of {_bytes(use.gpu_total)}"]
    cpu = [
        f"CPU {_percent(use.cpu)}" if use.cpu == use.cpu else "",
        f"memory {_bytes(use.memory)}{_of(use)}",
    ]
    parts = [gpu if use.gpu_total == use.gpu_total else [], cpu if use.memory == use.memory else []]
    return "; ".join(", ".join(filter(None, part)) for part in parts if part)


def combined_usage_text(uses: Sequence[RankUse], nodes: int = 1) -> str:
    """Return the combined use of several ranks, in short.

    Examples: ``GPU 93–99%, 248.0 GB of 320.0 GB``, ``CPU 797%, 12.0 GB of 64.0 GB``.

    Args:
        nodes: number of their nodes; the total memory is omitted for more than one.
    """
    gpus = [use for use in uses if use.gpu_total == use.gpu_total]
    if gpus:
        low, high = _percent(min(use.gpu for use in gpus)), _percent(max(use.gpu for use in gpus))
        used_memory, total_memory = (
            sum(use.gpu_memory for use in gpus),
            sum(use.gpu_total for use in gpus),
        )
        return (
            f"GPU {low if low == high else f'{low[:-1]}–{high}'}, {_bytes(used_memory)} "
            f"of {_bytes(total_memory)}"
        )
    measured = [use for use in uses if use.memory == use.memory]
    if not measured:
        return ""
    cpu = sum(use.cpu for use in measured)
    memory = _bytes(sum(use.memory for use in measured)) + (_of(measured[0]) if nodes == 1 else "")
    return ", ".join(filter(None, (f"CPU {_percent(cpu)}" if cpu == cpu else "", memory)))


def _of(use: RankUse) -> str:
    return f" of {_bytes(use.node_memory)}" if use.node_memory > 0 else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == share else ""


def _letters(nbytes: float) -> str:
    """Return bytes in short form: ``31G``, ``2.1G``, ``45M``."""
    if nbytes != nbytes:
        return ""
    amount, letter = (nbytes / 1e9, "G") if nbytes >= 1e9 else (nbytes / 1e6, "M")
    return f"{amount:.{1 if amount < 10 else 0}f}{letter}"


def _bytes(nbytes: float) -> str:
    return size(int(nbytes)) if nbytes == nbytes else ""


MAX_RANK_CELLS = 64
"""Maximum number of ranks with a cell each; more on several nodes share a cell per node."""
MAX_NODE_ROWS = 16
"""Maximum number of nodes with a row each; the cells of more are placed side by side."""
MAX_TROUBLES = 8
"""Maximum number of troubled nodes that are named, of those without a row."""

GREEN, BLUE, GREY, AMBER, RED = "#2e7d32", "#1565c0", "#757575", "#b26a00", "#c62828"
COLOURS = {
    "ready": GREEN,
    "running": BLUE,
    "starting": GREY,
    "recovering": AMBER,
    "reconnecting": AMBER,
}
"""Colour by a rank's state; a state that is missing here means that the rank is gone."""
CELL = (
    "display:inline-block;min-width:1.5em;padding:0 "
    ".3em;margin:1px;border-radius:3px;text-align:center;"
    "font-size:85%;line-height:1.5em;color:#fff;background:"
)
ROW = "display:flex;align-items:baseline"
NAME = "flex:none;min-width:7em;padding-right:1em"
USE = "display:inline-block;min-width:5.5em;padding-left:.3em;font-size:85%"
DIM = "color:var(--jp-ui-font-color2,#757575)"


@dataclass(frozen=True)
class NodeView:
    """A node.

    Attributes:
        name: its host.
        ranks: (number, state in a word) of each rank.
        phase: phase of its start: ``environment``; "" once started.
        step: current step: ``Downloading torch (175.0MiB)``.
        share: completed share of the step, between 0 and 1; None if unknown.
        use: resource use by rank, if known.
    """

    name: str
    ranks: tuple[tuple[int, str], ...] = ()
    phase: str = ""
    step: str = ""
    share: float | None = None
    use: Mapping[int, RankUse] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolView:
    """Displayed state of a pool.

    Attributes:
        name: name of the pool.
        about: its composition: provider, size, plugins.
        state: its state in a word, or the outcome of its start.
        ended: True if nothing is left to show of its nodes.
    """

    name: str
    about: tuple[str, ...]
    state: str
    nodes: tuple[NodeView, ...] = ()
    ended: bool = False


def pool_html(view: PoolView, *, titled: bool = True) -> str:
    """Return the pool in a few lines of HTML.

    It is one line if the pool has ended, or if all of it is ready without details of its nodes.

    Args:
        titled: start with the title; a display just above may already show it.
    """
    heading = " · ".join(
        [f"<b>{escape(view.name)}</b>", *map(escape, view.about), escape(view.state)]
    )
    rows = [] if view.ended else _rows(view.nodes)
    title = f"<div>{heading}</div>" if titled or not rows else ""
    return (
        f'<div style="font-family:var(--jp-ui-font-family,sans-serif)">{title}{"".join(rows)}</div>'
    )


def _rows(nodes: Sequence[NodeView]) -> list[str]:
    if len(nodes) > MAX_NODE_ROWS:
        cells = " ".join(_node_cell(node, str(index)) for index, node in enumerate(nodes))
        return [
            f"<div>{cells}</div>",
            *(f'<div style="{DIM}">{text}</div>' for text in _summary(nodes)),
        ]
    folded = sum(len(node.ranks) for node in nodes) > MAX_RANK_CELLS and len(nodes) > 1
    return [
        f'<div style="{ROW}"><span style="{NAME}">{escape(node.name)}</span> '
        f"<span>{_cells(node, folded)} {_bar(node.share)}"
        f'<span style="{DIM}">{escape(_activity(node, folded))}</span></span></div>'
        for node in nodes
    ]


def _cells(node: NodeView, folded: bool) -> str:
    """Return one cell for the node if its ranks are folded, and else a cell for each rank."""
    if folded:
        return _node_cell(node, count(len(node.ranks), "rank"))
    return " ".join(_rank_cell(node, *rank) for rank in node.ranks)


def _activity(node: NodeView, folded: bool) -> str:
    used = combined_usage_text(list(node.use.values())) if folded else ""
    return " · ".join(filter(None, (node.phase, node.step, troubled_states(node.ranks), used)))


def _bar(share: float | None) -> str:
    return (
        ""
        if share is None
        else f'<progress value="{share:.3f}" max="1" style="width:8em"></progress> '
    )


def _summary(nodes: Sequence[NodeView]) -> list[str]:
    """Return lines on the activity and the trouble of nodes that have no row."""
    phases = Counter(node.phase for node in nodes if node.phase)
    activities = [f"{phase} on {count(number, 'node')}" for phase, number in phases.items()]
    shares = (
        [node.share or 0.0 for node in nodes]
        if any(node.share is not None for node in nodes)
        else []
    )
    troubled = [
        f"{node.name}: {problem}" for node in nodes if (problem := troubled_states(node.ranks))
    ]
    more = [f"and {len(troubled) - MAX_TROUBLES} more"] if len(troubled) > MAX_TROUBLES else []
    use_text = combined_usage_text([use for node in nodes for use in node.use.values()], len(nodes))
    lines = [
        escape("; ".join(parts))
        for parts in (activities, [*troubled[:MAX_TROUBLES], *more], [use_text] if use_text else [])
        if parts
    ]
    return [_bar(sum(shares) / len(shares)) + lines[0], *lines[1:]] if shares else lines


def _rank_cell(node: NodeView, number: int, state: str) -> str:
    title, use = f"rank {number} on {node.name}: {state}", node.use.get(number)
    if not node.use:
        return cell(str(number), title, state)
    rank_cell = cell(str(number), f"{title}; {usage_text(use)}" if use else title, state)
    return (
        f'<span style="white-space:nowrap">{rank_cell}<span '
        f'style="{USE}">{escape(short_usage_text(use)) if use else ""}</span></span>'
    )


def _node_cell(node: NodeView, label: str) -> str:
    """Return one cell for a node's ranks, in the colour of the worst state."""
    states = Counter(state for _, state in node.ranks)
    worst = max(states, key=severity, default="starting")
    states_text = ", ".join(f"{number} {state}" for state, number in states.items())
    used = combined_usage_text(list(node.use.values()))
    title = (
        f"{node.name}: {count(len(node.ranks), 'rank')}: {states_text}{f'; {used}' if used else ''}"
    )
    return cell(label, title, worst)


def cell(text: str, tooltip: str, state: str) -> str:
    """Return a small cell in the colour of a state."""
    return (
        f'<span title="{escape(tooltip)}" '
        f'style="{CELL}{COLOURS.get(state, RED)}">{escape(text)}</span>'
    )


def folded(title: str, text: str, *, opened: bool = False) -> str:
    """Return lines that appear when their title is clicked, or immediately if `opened`."""
    return (
        f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def severity(state: str) -> int:
    """Return the severity of a state, 0 for the best."""
    order = [GREEN, BLUE, GREY, AMBER, RED]
    return order.index(COLOURS.get(state, RED))


def troubled_states(ranks: Iterable[tuple[int, str]]) -> str:
    """Return the states that need attention: "1 ended, 2 reconnecting", or ""."""
    states = Counter(state for _, state in ranks)
    return ", ".join(
        f"{number} {state}"
        for state, number in states.items()
        if severity(state) > severity("starting")
    )


INTERVAL = 0.4
"""Seconds between two updates of the start panel."""

UNNAMED = ""
"""Sentinel for a node's name: all nodes, which have no names yet."""

Say = Callable[[str], None]


class StartStep(str):
    """A step of a pool's start: a line of text with its nodes.

    Args:
        text: the line.
        phase: phase of the nodes' start: ``requested``, ``booting``, ``connecting``,
            ``environment`` or ``starting``.
        nodes: node names; empty for all nodes, while they have no names yet.
        share: completed share of the step, between 0 and 1; None if unknown.
        step: short description of the activity, if the line is longer.
        passing: show it only in a display that is redrawn.
    """

    phase: str
    nodes: tuple[str, ...]
    step: str
    share: float | None
    passing: bool

    def __new__(
        cls,
        text: str,
        phase: str,
        nodes: Iterable[str] = (),
        share: float | None = None,
        step: str = "",
        *,
        passing: bool = False,
    ) -> StartStep:
        text, step = sanitized(text), sanitized(step)
        line = super().__new__(cls, text)
        line.passing = passing
        line.phase, line.nodes = phase, tuple(nodes)
        line.share, line.step = share, step or text
        return line


def environment_step(node: str, step: str, share: float | None = None) -> StartStep:
    """Return a step of one node's environment, as a line that starts with the node's name.

    `step` may carry its own share.
    """
    return StartStep(f"{node}: {step}", "environment", (node,), getattr(step, "share", share), step)


def passing_step(step: str) -> StartStep:
    """Return a step of all nodes that takes about a second, shown only in a redrawn display."""
    return StartStep(step, "starting", passing=True)


def is_temporary(line: str) -> bool:
    """Return True if a line is only for a display that is redrawn."""
    return isinstance(line, StartStep) and line.passing


class StartPanel:
    """Display of a pool's start: its text is the list of all lines, its HTML the current state.

    Args:
        view: returns the pool's current state, given the last step of each node; called on a
            separate thread.
    """

    def __init__(self, view: Callable[[dict[str, StartStep]], PoolView]) -> None:
        self._look = view
        self._lines: list[str] = []
        self._steps: dict[str, StartStep] = {}
        self._area = Area()
        self._over = threading.Event()
        self._context = cell_context()  # attributes the thread's drawing to this cell
        self._thread = threading.Thread(target=self._watch, name="skymagic-panel", daemon=True)

    def add_line(self, line: str) -> None:
        """Add a line. Safe on any thread, except for the first line, which creates the display."""
        if not is_temporary(line):
            self._lines.append(sanitized(line))
        if isinstance(line, StartStep):
            self._steps |= dict.fromkeys(line.nodes or [UNNAMED], line)
        if self._thread.ident is None:
            self._draw()
            self._thread.start()

    def end(self) -> None:
        """Draw the final state."""
        if self._thread.ident is None:
            return
        self._over.set()
        self._thread.join()
        self._draw()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            # ranks may come and go during a look; the next one sees them
            with contextlib.suppress(Exception):
                self._context.copy().run(self._draw)

    def _draw(self) -> None:
        self._area.draw("\n".join(self._lines), pool_html(self._look(dict(self._steps))))


@contextlib.contextmanager
def start_panel(
    say: Say, view: Callable[[dict[str, StartStep]], PoolView], *, drawn: bool
) -> Iterator[Say]:
    """Show a start; yields a function that receives its lines.

    Args:
        say: receives the lines if nothing can be redrawn, or the notebook is unattended: papermill
            logs lines, but not their updates.
        view: see `StartPanel`.
        drawn: whether a display is wanted.
    """
    if not (drawn and is_watched()):
        yield lambda line: None if is_temporary(line) else say(line)
        return
    display = StartPanel(view)
    try:
        yield display.add_line
    finally:
        display.end()
