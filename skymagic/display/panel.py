"""A pool as HTML: a title, and its ranks as cells coloured by state, node by node, with what each rank uses; and its start, redrawn in place.

Colours never stand alone: each cell has its state as a tooltip, and trouble is said in words, because a saved notebook may be shown without
styles. A start is shown as lines; in a notebook it is one display, which is redrawn and ends as one line.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from skymagic.display.live import Area, watched
from skymagic.plan.units import count, size
from skymagic.wire.untrusted import sanitized


@dataclass(frozen=True)
class RankUse:
    """What one rank uses.

    Attributes:
        cpu: processors in use, 1.0 for one of them; NaN while there was one measurement only.
        memory: bytes of its process. node_memory: bytes that its node has.
        gpu: share of the time in which its GPU computes. gpu_memory, gpu_total: bytes in use on it by all, and there. NaN for no GPU.
    """

    cpu: float = math.nan
    memory: float = math.nan
    node_memory: float = math.nan
    gpu: float = math.nan
    gpu_memory: float = math.nan
    gpu_total: float = math.nan


def use_short(use: RankUse) -> str:
    """In a cell: ``97% 31G`` of its GPU where it has one, else of processors and memory."""
    share, held = (
        (use.gpu, use.gpu_memory) if use.gpu_total == use.gpu_total else (use.cpu, use.memory)
    )
    return " ".join(filter(None, (_percent(share), _letters(held))))


def use_words(use: RankUse) -> str:
    """In full: ``GPU 97%, 31 of 80 GB; CPU 110%, memory 2.1 GB of 64.0 GB``."""
    gpu = [f"GPU {_percent(use.gpu)}", f"{_bytes(use.gpu_memory)} of {_bytes(use.gpu_total)}"]
    cpu = [
        f"CPU {_percent(use.cpu)}" if use.cpu == use.cpu else "",
        f"memory {_bytes(use.memory)}{_of(use)}",
    ]
    parts = [gpu if use.gpu_total == use.gpu_total else [], cpu if use.memory == use.memory else []]
    return "; ".join(", ".join(filter(None, part)) for part in parts if part)


def use_together(uses: Sequence[RankUse], nodes: int = 1) -> str:
    """What several ranks use, in few words: ``GPU 93–99%, 248.0 GB of 320.0 GB`` or ``CPU 797%, 12.0 GB of 64.0 GB``.

    Args:
        nodes: how many nodes have them; of more than one the memory is not told.
    """
    gpus = [use for use in uses if use.gpu_total == use.gpu_total]
    if gpus:
        low, high = _percent(min(use.gpu for use in gpus)), _percent(max(use.gpu for use in gpus))
        held, there = sum(use.gpu_memory for use in gpus), sum(use.gpu_total for use in gpus)
        return (
            f"GPU {low if low == high else f'{low[:-1]}–{high}'}, {_bytes(held)} of {_bytes(there)}"
        )
    known = [use for use in uses if use.memory == use.memory]
    if not known:
        return ""
    cpu = sum(use.cpu for use in known)
    memory = _bytes(sum(use.memory for use in known)) + (_of(known[0]) if nodes == 1 else "")
    return ", ".join(filter(None, (f"CPU {_percent(cpu)}" if cpu == cpu else "", memory)))


def _of(use: RankUse) -> str:
    return f" of {_bytes(use.node_memory)}" if use.node_memory > 0 else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == share else ""


def _letters(nbytes: float) -> str:
    """Bytes where there is little room: ``31G``, ``2.1G``, ``45M``."""
    if nbytes != nbytes:
        return ""
    amount, letter = (nbytes / 1e9, "G") if nbytes >= 1e9 else (nbytes / 1e6, "M")
    return f"{amount:.{1 if amount < 10 else 0}f}{letter}"


def _bytes(nbytes: float) -> str:
    return size(int(nbytes)) if nbytes == nbytes else ""


MAX_RANK_CELLS = 64
"""Ranks that have a cell of their own; of more on several nodes, each node has one."""
MAX_NODE_ROWS = 16
"""Nodes that have a row of their own; the cells of more stand side by side."""
MAX_TROUBLES = 8
"""Nodes in trouble that are named, of those without a row."""

GREEN, BLUE, GREY, AMBER, RED = "#2e7d32", "#1565c0", "#757575", "#b26a00", "#c62828"
COLOURS = {
    "ready": GREEN,
    "running": BLUE,
    "starting": GREY,
    "recovering": AMBER,
    "reconnecting": AMBER,
}
"""By a rank's state; what is not here has gone."""
CELL = (
    "display:inline-block;min-width:1.5em;padding:0 .3em;margin:1px;border-radius:3px;text-align:center;"
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
        ranks: (number, state in a word) of each.
        phase: of its start, while it starts: ``environment``.
        step: what is being done there: ``Downloading torch (175.0MiB)``.
        share: how much of that is done, between 0 and 1; None where nobody knows.
        use: by rank what it uses, of those where it is known.
    """

    name: str
    ranks: tuple[tuple[int, str], ...] = ()
    phase: str = ""
    step: str = ""
    share: float | None = None
    use: Mapping[int, RankUse] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolView:
    """What is shown of a pool.

    Attributes:
        name: of the pool.
        about: what it consists of: provider, size, plugins.
        state: in a word, or how its start went.
        ended: whether there is nothing to be seen of its nodes any more.
    """

    name: str
    about: tuple[str, ...]
    state: str
    nodes: tuple[NodeView, ...] = ()
    ended: bool = False


def pool_html(view: PoolView, *, titled: bool = True) -> str:
    """Return the pool in a few lines; one line when it has ended, or all of it is ready and nothing is said of its nodes.

    Args:
        titled: whether its title comes first; a display just above may have shown it.
    """
    words = " · ".join(
        [f"<b>{escape(view.name)}</b>", *map(escape, view.about), escape(view.state)]
    )
    rows = [] if view.ended else _rows(view.nodes)
    title = f"<div>{words}</div>" if titled or not rows else ""
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
        f"<span>{_node_cell(node, count(len(node.ranks), 'rank')) if folded else ' '.join(_rank_cell(node, *rank) for rank in node.ranks)} "
        f'{_bar(node.share)}<span style="{DIM}">{escape(_doing(node, folded))}</span></span></div>'
        for node in nodes
    ]


def _doing(node: NodeView, folded: bool) -> str:
    used = use_together(list(node.use.values())) if folded else ""
    return " · ".join(filter(None, (node.phase, node.step, trouble(node.ranks), used)))


def _bar(share: float | None) -> str:
    return (
        ""
        if share is None
        else f'<progress value="{share:.3f}" max="1" style="width:8em"></progress> '
    )


def _summary(nodes: Sequence[NodeView]) -> list[str]:
    """What nodes without a row of their own do, and which are not well."""
    phases = Counter(node.phase for node in nodes if node.phase)
    doing = [f"{phase} on {count(number, 'node')}" for phase, number in phases.items()]
    shares = (
        [node.share or 0.0 for node in nodes]
        if any(node.share is not None for node in nodes)
        else []
    )
    bad = [f"{node.name}: {words}" for node in nodes if (words := trouble(node.ranks))]
    more = [f"and {len(bad) - MAX_TROUBLES} more"] if len(bad) > MAX_TROUBLES else []
    used = use_together([use for node in nodes for use in node.use.values()], len(nodes))
    said = [
        escape("; ".join(one))
        for one in (doing, [*bad[:MAX_TROUBLES], *more], [used] if used else [])
        if one
    ]
    return [_bar(sum(shares) / len(shares)) + said[0], *said[1:]] if shares else said


def _rank_cell(node: NodeView, number: int, state: str) -> str:
    title, use = f"rank {number} on {node.name}: {state}", node.use.get(number)
    if not node.use:
        return cell(str(number), title, state)
    shown = cell(str(number), f"{title}; {use_words(use)}" if use else title, state)
    return f'<span style="white-space:nowrap">{shown}<span style="{USE}">{escape(use_short(use)) if use else ""}</span></span>'


def _node_cell(node: NodeView, label: str) -> str:
    """A node's ranks in one cell, coloured as the one that is worst off."""
    states = Counter(state for _, state in node.ranks)
    worst = max(states, key=severity, default="starting")
    words = ", ".join(f"{number} {state}" for state, number in states.items())
    used = use_together(list(node.use.values()))
    title = f"{node.name}: {count(len(node.ranks), 'rank')}: {words}{f'; {used}' if used else ''}"
    return cell(label, title, worst)


def cell(text: str, tooltip: str, state: str) -> str:
    """A small cell, coloured by a state."""
    return f'<span title="{escape(tooltip)}" style="{CELL}{COLOURS.get(state, RED)}">{escape(text)}</span>'


def folded(title: str, text: str, *, opened: bool = False) -> str:
    """Lines that are shown when their title is clicked, or `opened` at once."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def severity(state: str) -> int:
    """How bad a state is."""
    order = [GREEN, BLUE, GREY, AMBER, RED]
    return order.index(COLOURS.get(state, RED))


def trouble(ranks: Iterable[tuple[int, str]]) -> str:
    """What is not well, in words: "1 ended, 2 reconnecting"; empty when all is."""
    states = Counter(state for _, state in ranks)
    return ", ".join(
        f"{number} {state}"
        for state, number in states.items()
        if severity(state) > severity("starting")
    )


INTERVAL = 0.4
"""Seconds between two looks at the start."""

UNNAMED = ""
"""Sentinel for a node's name: all nodes, which have no names yet."""

Say = Callable[[str], None]


class StartStep(str):
    """A step of a start as a line of text, which knows its nodes.

    Args:
        text: the line.
        phase: of the nodes' start: ``requested``, ``booting``, ``connecting``, ``environment`` or ``starting``.
        nodes: their names; none for all nodes, which have no names yet.
        share: how much of the step is done, between 0 and 1; None where nobody knows.
        step: what is being done, where the line says more than that.
        passing: whether only a display that is redrawn shows it.
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
    """A step of one node's environment, which may know its share; its line begins with the node's name."""
    return StartStep(f"{node}: {step}", "environment", (node,), getattr(step, "share", share), step)


def passing_step(step: str) -> StartStep:
    """A step of all nodes that takes a second or so, for a display that is redrawn."""
    return StartStep(step, "starting", passing=True)


def is_passing(line: str) -> bool:
    """Whether a line is for a display that is redrawn alone."""
    return isinstance(line, StartStep) and line.passing


class StartPanel:
    """One display of a pool's start; its text is all lines that were said, its HTML what is so now.

    Args:
        look: the pool as it is now, given the last step of each node; called on a thread of its own.
    """

    def __init__(self, look: Callable[[dict[str, StartStep]], PoolView]) -> None:
        self._look = look
        self._lines: list[str] = []
        self._steps: dict[str, StartStep] = {}
        self._area = Area()
        self._over = threading.Event()
        self._context = contextvars.copy_context()  # what its thread draws belongs to this cell
        self._thread = threading.Thread(target=self._watch, name="skymagic-panel", daemon=True)

    def say(self, line: str) -> None:
        """Take a line; safe on any thread but for the first, with which it appears."""
        if not is_passing(line):
            self._lines.append(sanitized(line))
        if isinstance(line, StartStep):
            self._steps |= dict.fromkeys(line.nodes or [UNNAMED], line)
        if self._thread.ident is None:
            self._draw()
            self._thread.start()

    def end(self) -> None:
        """Draw it for the last time."""
        if self._thread.ident is None:
            return
        self._over.set()
        self._thread.join()
        self._draw()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(
                Exception
            ):  # ranks come and go while it looks; the next time it sees them
                self._context.copy().run(self._draw)

    def _draw(self) -> None:
        self._area.draw("\n".join(self._lines), pool_html(self._look(dict(self._steps))))


@contextlib.contextmanager
def shown_start(
    say: Say, look: Callable[[dict[str, StartStep]], PoolView], *, drawn: bool
) -> Iterator[Say]:
    """Show a start; gives what takes its lines.

    Args:
        say: takes them as they come where nothing can be drawn again, or nobody looks: papermill logs lines, and no change of them.
        look: see `StartPanel`.
        drawn: whether a display is wanted at all.
    """
    if not (drawn and watched()):
        yield lambda line: None if is_passing(line) else say(line)
        return
    display = StartPanel(look)
    try:
        yield display.say
    finally:
        display.end()
