"""The line of a running cell on the screen: it moves where somebody looks, and ends as one line that is saved.

It is a display that is written again, as text and HTML: no widget, whose model a saved notebook would lack.

::

    somebody looks (JupyterLab)       line, twice a second ──▶ the line that stays, in its place
    nobody does (nbconvert, papermill, SKYMAGIC_NONINTERACTIVE=1), a terminal ──▶ the line that stays, at the end
"""

from __future__ import annotations

import time

from skymagic.display.live import Area, in_notebook, own_stream, watched
from skymagic.display.run_line import RunEnd, RunState, as_html, end_line, line

INTERVAL = 0.5
"""Seconds between two states of the line."""


class RunView:
    """The line of one run.

    Args:
        after: seconds after which it appears; a run that is over sooner has none.
    """

    def __init__(self, after: float) -> None:
        self._after = self._next = after
        self._begun = time.monotonic()
        self._live = watched()
        self.area: Area | None = None
        """Where it stands; the place of the line on shipping, if there was one."""
        self.shown = False
        """Whether it stands there in a state that must not stay."""

    @property
    def seconds(self) -> float:
        """Since the run was asked for."""
        return time.monotonic() - self._begun

    @property
    def moves(self) -> bool:
        """Whether it is drawn while the run goes on."""
        return self._live

    @property
    def due(self) -> bool:
        """Whether a new state is to be drawn."""
        return self._live and self.seconds >= self._next

    def draw(self, state: RunState) -> None:
        """Show this state."""
        self._next = self.seconds + INTERVAL
        self.area = self.area or Area()
        self.shown = True
        share = state.progress.share if state.progress is not None else None
        text = line(state)
        self.area.draw(text, as_html(text, share))

    def end(self, end: RunEnd) -> None:
        """Put the line that stays in its place; none for a run that was short."""
        if not self.shown and end.seconds < self._after:
            return
        text = end_line(end)
        if in_notebook():
            self.area = self.area or Area()
            self.area.draw(text, as_html(text))
        elif (stream := own_stream()) is not None:
            print(text, file=stream, flush=True)
        self.shown, self._live = False, False
