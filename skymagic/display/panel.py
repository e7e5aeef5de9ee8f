"""A pool as HTML: a title, and its ranks as cells coloured by state, node by node; pure.

Colours are never alone: each cell has its state as a tooltip, and what is not well is said in words, for a saved notebook may be
shown without styles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from skymagic.display.use import RankUse, short, together
from skymagic.display.use import words as use_words
from skymagic.plan.units import count

MAX_RANK_CELLS = 64
"""Ranks that have a cell of their own; of more on several nodes, each node has one."""
MAX_NODE_ROWS = 16
"""Nodes that have a row of their own; the cells of more stand side by side."""
MAX_TROUBLES = 8
"""Of those the nodes that are named because they are not well."""

GREEN, BLUE, GREY, AMBER, RED = "#2e7d32", "#1565c0", "#757575", "#b26a00", "#c62828"
COLOURS = {"ready": GREEN, "running": BLUE, "starting": GREY, "recovering": AMBER, "reconnecting": AMBER}
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


def html(view: PoolView) -> str:
    """The pool in a few lines; one line when it has ended, or all of it is ready and nothing is said of its nodes."""
    words = " · ".join([f"<b>{escape(view.name)}</b>", *map(escape, view.about), escape(view.state)])
    rows = [] if view.ended else _rows(view.nodes)
    return f'<div style="font-family:var(--jp-ui-font-family,sans-serif)"><div>{words}</div>{"".join(rows)}</div>'


def _rows(nodes: Sequence[NodeView]) -> list[str]:
    if len(nodes) > MAX_NODE_ROWS:
        cells = " ".join(_node_cell(node, str(index)) for index, node in enumerate(nodes))
        return [f"<div>{cells}</div>", *map(_dim, _summary(nodes))]
    folded = sum(len(node.ranks) for node in nodes) > MAX_RANK_CELLS and len(nodes) > 1
    return [
        f'<div style="{ROW}"><span style="{NAME}">{escape(node.name)}</span> '
        f"<span>{_node_cell(node, count(len(node.ranks), 'rank')) if folded else _rank_cells(node)} "
        f'{_bar(node.share)}<span style="{DIM}">{escape(_doing(node, folded))}</span></span></div>'
        for node in nodes
    ]


def _doing(node: NodeView, folded: bool) -> str:
    used = together(list(node.use.values())) if folded else ""
    return " · ".join(filter(None, (node.phase, node.step, trouble(node.ranks), used)))


def _bar(share: float | None) -> str:
    return "" if share is None else f'<progress value="{share:.3f}" max="1" style="width:8em"></progress> '


def _summary(nodes: Sequence[NodeView]) -> list[str]:
    """What nodes without a row of their own do, and which are not well."""
    phases = Counter(node.phase for node in nodes if node.phase)
    doing = [f"{phase} on {count(number, 'node')}" for phase, number in phases.items()]
    shares = [node.share or 0.0 for node in nodes] if any(node.share is not None for node in nodes) else []
    bad = [f"{node.name}: {words}" for node in nodes if (words := trouble(node.ranks))]
    more = [f"and {len(bad) - MAX_TROUBLES} more"] if len(bad) > MAX_TROUBLES else []
    used = together([use for node in nodes for use in node.use.values()], len(nodes))
    said = [
        escape("; ".join(words)) for words in (doing, [*bad[:MAX_TROUBLES], *more], [used] if used else []) if words
    ]
    return [_bar(sum(shares) / len(shares)) + said[0], *said[1:]] if shares else said


def _dim(text: str) -> str:
    return f'<div style="{DIM}">{text}</div>'


def _rank_cells(node: NodeView) -> str:
    return " ".join(_rank_cell(node, number, state) for number, state in node.ranks)


def _rank_cell(node: NodeView, number: int, state: str) -> str:
    title, use = f"rank {number} on {node.name}: {state}", node.use.get(number)
    if not node.use:
        return cell(str(number), title, state)
    shown = cell(str(number), f"{title}; {use_words(use)}" if use else title, state)
    return (
        f'<span style="white-space:nowrap">{shown}<span style="{USE}">{escape(short(use)) if use else ""}</span></span>'
    )


def _node_cell(node: NodeView, label: str) -> str:
    """A node's ranks in one cell, coloured as the one that is worst off."""
    states = Counter(state for _, state in node.ranks)
    worst = max(states, key=severity, default="starting")
    words = ", ".join(f"{number} {state}" for state, number in states.items())
    used = together(list(node.use.values()))
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
    return ", ".join(f"{number} {state}" for state, number in states.items() if severity(state) > severity("starting"))
