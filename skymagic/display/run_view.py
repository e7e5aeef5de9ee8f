"""The line of a running cell on the screen: it moves where somebody looks, and ends as one line that is saved.

It is a display that is written again, as text and HTML; while it moves, a widget with buttons besides, which a saved notebook would
lack: it is closed when the line that stays is in its place.

::

    somebody looks (JupyterLab)       line and buttons, twice a second ──▶ the line that stays, in its place
    nobody does (nbconvert, papermill, SKYMAGIC_NONINTERACTIVE=1), a terminal ──▶ the line that stays, at the end
"""

from __future__ import annotations

import time
from dataclasses import replace

from skymagic.display import shell_channel
from skymagic.display.controls import Actions, Controls, controls
from skymagic.display.live import Area, in_notebook, own_stream, watched
from skymagic.display.run_line import SEPARATOR, RunEnd, RunState, as_html, end_line, end_parts, line, state_parts

INTERVAL = 0.5
"""Seconds between two states of the line."""
HINT = " · press ■ to stop"
"""What stands in the line where it might have buttons, and has none."""


class LiveLine:
    """A line in a display: with buttons while it moves, as text and HTML for good.

    Args:
        actions: what its buttons do; None for no buttons.
        hint: what stands in the line where nobody shows the buttons.
    """

    def __init__(self, actions: Actions | None, hint: str = "") -> None:
        self._actions, self._hint = actions, hint
        self._controls: Controls | None = None
        self._said = hint if actions is None else ""
        self.area: Area | None = None
        """Where it stands."""

    def say(self, text: str) -> None:
        """Show this, without buttons as yet: at once."""
        self.area = self.area or Area()
        self.area.draw(text, as_html(text))

    def draw(self, text: str, share: float | None = None, *, deaf: bool = False) -> None:
        """Show this; `share` is a bar's, `deaf` while this thread is busy with something else than the run."""
        self.area = self.area or Area()
        if self._actions is not None:
            self._controls, self._actions = controls(as_html(text, share), self._actions), None
            self._said = "" if self._controls is not None else self._hint
        html = as_html(text + self._said, share)
        if self._controls is not None:
            self._controls.say(html, deaf=deaf)
            if self._controls.ignored:
                self._withdraw()
                self._said = self._hint
        if self._controls is None:
            self.area.draw(text + self._said, html)
        elif not self._controls.answered:  # else the widget alone moves: drawn anew it would flicker
            # this is what is saved amid the run, and it does not move any more
            dated = f"{text}{SEPARATOR}as of {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
            self.area.draw(dated, as_html(dated, share), self._controls.bundle())

    def end(self, text: str) -> None:
        """Put this in its place, for good."""
        self._actions = None
        self.say(text)
        if self._controls is not None and self._controls.answered:
            self._controls.end(as_html(text))
            self._controls = None
        self._withdraw()

    def _withdraw(self) -> None:
        if self._controls is not None:
            self._controls.close()
            self._controls = None


class RunView:
    """The line of one run.

    Args:
        after: seconds after which it appears; a run that is over sooner has none.
        actions: what its buttons do; None for no buttons.
    """

    def __init__(self, after: float, actions: Actions | None = None) -> None:
        self._after = self._next = after
        self._begun = time.monotonic()
        self._live = watched()
        self._line = LiveLine(actions, HINT)
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

    @property
    def placed(self) -> bool:
        """Whether it has a place, above all that ranks print from now on."""
        return self._line.area is not None

    def replaces(self, area: Area) -> None:
        """It will stand here: in the place of the line on shipping."""
        self._line.area = area

    def draw(self, state: RunState) -> None:
        """Show this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        share = state.progress.share if state.progress is not None else None
        self._line.draw(line(state), share, deaf=bool(state.activity))

    def poll(self) -> None:
        """Take what was pressed; called often while the run goes on."""
        shell_channel.pump()

    def end(self, end: RunEnd) -> None:
        """Put the line that stays in its place; none for a run that was short."""
        if not self.shown and end.seconds < self._after:
            return
        if in_notebook():
            self._line.end(end_line(end))
        elif (stream := own_stream()) is not None:
            print(end_line(end), file=stream, flush=True)
        self.shown, self._live = False, False


class BesideView(RunView):
    """For a run whose handle has a line: what is to stand in that.

    Attributes:
        words: how the run is, or how it has ended.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.words = ""

    @property
    def placed(self) -> bool:
        """Its handle's line is above all that the ranks print."""
        return True

    def draw(self, state: RunState) -> None:
        """Keep what is to be said of this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        self.words = SEPARATOR.join(state_parts(state))

    def end(self, end: RunEnd) -> None:
        """Keep what stays to be said; that it was stopped, the handle says."""
        self.words = SEPARATOR.join(end_parts(replace(end, interrupted=False, failed=(), names=())))
