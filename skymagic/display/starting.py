"""A pool's start on the screen: lines as it goes on; in a notebook one display that is drawn again and ends as one line."""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator

from skymagic.display import panel
from skymagic.display.live import show, watched
from skymagic.display.panel import PoolView

INTERVAL = 0.4
"""Seconds between two looks at the start."""

UNNAMED = ""
"""In the place of a node's name: all nodes, which have no names yet."""

Say = Callable[[str], None]


class StartStep(str):
    """A step of a start as a line of text, which knows its nodes.

    Args:
        text: the line.
        phase: of the nodes' start: ``requested``, ``booting``, ``connecting``, ``environment`` or ``starting``.
        nodes: their names; none for all nodes, which have no names yet.
        share: how much of the step is done, between 0 and 1; None where nobody knows.
        step: what is being done, where the line says more than that.
    """

    phase: str
    nodes: tuple[str, ...]
    step: str
    share: float | None

    def __new__(
        cls, text: str, phase: str, nodes: Iterable[str] = (), share: float | None = None, step: str = ""
    ) -> StartStep:
        line = super().__new__(cls, text)
        line.phase, line.nodes, line.share, line.step = phase, tuple(nodes), share, step or text
        return line


def environment_step(node: str, step: str, share: float | None = None) -> StartStep:
    """A step of one node's environment, which may know its share; its line begins with the node's name."""
    return StartStep(f"{node}: {step}", "environment", (node,), getattr(step, "share", share), step)


class StartPanel:
    """One display of a pool's start; its text is all lines that were said, its HTML what is so now.

    Args:
        look: the pool as it is now, given the last step of each node; called on a thread of its own.
    """

    def __init__(self, look: Callable[[dict[str, StartStep]], PoolView]) -> None:
        self._look = look
        self._lines: list[str] = []
        self._steps: dict[str, StartStep] = {}
        self._id = f"skymagic-{secrets.token_hex(8)}"
        self._drawn: dict[str, str] | None = None
        self._over = threading.Event()
        self._context = contextvars.copy_context()  # what its thread draws belongs to this cell
        self._thread = threading.Thread(target=self._watch, name="skymagic-panel", daemon=True)

    def say(self, line: str) -> None:
        """Take a line; safe on any thread but for the first, with which it appears."""
        self._lines.append(line)
        if isinstance(line, StartStep):
            self._steps |= dict.fromkeys(line.nodes or [UNNAMED], line)
        if self._drawn is None:
            self._draw()
            self._thread.start()

    def end(self) -> None:
        """Draw it for the last time."""
        if self._drawn is None:
            return
        self._over.set()
        self._thread.join()
        self._draw()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(Exception):  # ranks come and go while it looks; the next time it sees them
                self._context.copy().run(self._draw)

    def _draw(self) -> None:
        data = {"text/plain": "\n".join(self._lines), "text/html": panel.html(self._look(dict(self._steps)))}
        if data != self._drawn:
            show({"data": data, "transient": {"display_id": self._id}}, update=self._drawn is not None)
            self._drawn = data


@contextlib.contextmanager
def shown(say: Say, look: Callable[[dict[str, StartStep]], PoolView], *, drawn: bool) -> Iterator[Say]:
    """Show a start; gives what takes its lines.

    Args:
        say: takes them as they come where nothing can be drawn again, or nobody looks: papermill logs lines, and no change of them.
        look: see `StartPanel`.
        drawn: whether a display is wanted at all.
    """
    if not (drawn and watched()):
        yield say
        return
    display = StartPanel(look)
    try:
        yield display.say
    finally:
        display.end()
