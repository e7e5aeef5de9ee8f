"""The line of a running cell: its text, a pure function of how the run is, and its view, which moves and ends as one line that is saved.

It is a display that is written again, as text and HTML; while it moves, a widget with buttons is added, which a saved notebook would
lack: it is closed when the line that stays is in its place.

::

    somebody looks (JupyterLab)       line and buttons, twice a second ──▶ the line that stays, in its place
    nobody does (nbconvert, papermill, SKYMAGIC_NONINTERACTIVE=1), a terminal ──▶ the line that stays, at the end
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymagic.display import controls
from skymagic.display.controls import Actions, Controls
from skymagic.display.live import Area, in_notebook, own_stream, page, watched
from skymagic.plan.units import count, rank_words, size

BARS = "▁▂▃▄▅▆▇█"
QUIET = "color: #777; font-family: monospace"
SEPARATOR = " · "
SHOWN_BYTES, SHOWN_SECONDS = 1_000_000, 0.5
"""From so much on, the last line says what has travelled."""


@dataclass(frozen=True)
class Progress:
    """How far a loop is: steps done, of how many (None: nobody knows), and steps in a second (0: nobody knows)."""

    done: float
    total: float | None = None
    rate: float = 0.0

    @property
    def share(self) -> float | None:
        """Between 0 and 1."""
        return None if not self.total else min(1.0, self.done / self.total)

    @property
    def left(self) -> float | None:
        """Seconds until it is over, at this rate."""
        if self.total is None or not self.rate > 0:
            return 0.0 if self.share == 1 else None
        return max(0.0, self.total - self.done) / self.rate


@dataclass(frozen=True)
class Number:
    """What is reported under one name: the mean over ranks, the least, the most, and values of one rank over time."""

    name: str
    value: float
    low: float
    high: float
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunState:
    """How a run is now. Ranks that are in none of the lists are running."""

    ranks: int
    seconds: float
    done: int = 0
    failed: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    """In a collective to which others have not come."""
    progress: Progress | None = None
    numbers: Sequence[Number] = ()
    lagging: str = ""
    """Which rank is behind, in words."""
    importing: str = ""
    """What ranks import, in words."""
    activity: str = ""
    """What goes on instead of the cell: its values come back."""
    unit: str = "rank"
    """What is counted: of a script, nodes."""


@dataclass(frozen=True)
class RunSummary:
    """How a run has ended."""

    ranks: int
    seconds: float
    failed: tuple[int, ...] = ()
    interrupted: bool = False
    timed_out: bool = False
    pool_ended: bool = False
    """The pool was ended meanwhile."""
    shipped: int = 0
    """Bytes."""
    ship_seconds: float = 0.0
    gathered: int = 0
    gather_seconds: float = 0.0
    names: tuple[str, ...] = ()
    """The notebook's variables that hold what came back."""
    progress: Progress | None = None
    """How far it was when it ended before its time; None where it ended well, or nobody knows."""
    numbers: Sequence[Number] = ()
    lagged: str = ""
    unit: str = "rank"
    cell: int = 0
    """The cell's number in the notebook; 0 outside one."""
    incomplete: bool = False
    """The notebook does not show all that its ranks wrote."""


def line(state: RunState) -> str:
    """The line of a run that goes on: "4 ranks · 0:45 · 45% · 0:55 left · 12.5 steps/s · loss 0.203 ▇▅▃▂"."""
    return SEPARATOR.join(
        [count(state.ranks, state.unit), clock(state.seconds), *state_parts(state)]
    )


def state_parts(state: RunState) -> list[str]:
    """What that line says besides how many ranks there are, and since when."""
    if state.activity:
        return [state.activity]
    parts = [state.importing] if state.importing else []
    parts += progress_parts(state.progress) if state.progress is not None else []
    parts += [number_text(number) for number in state.numbers]
    if state.failed:
        parts.append(f"{rank_words(list(state.failed), state.unit)} failed")
    if state.done:
        parts.append(f"{state.done} done")
    if state.waiting:
        parts.append(f"{rank_words(list(state.waiting))} waiting")
    return [*parts, *([state.lagging] if state.lagging else [])]


def end_line(end: RunSummary) -> str:
    """The line that stays: "4 ranks · 12.3 s · shipped 400 MB in 0.2 s · results → `results`"."""
    ranks = [count(end.ranks, end.unit)] if end.ranks else []
    seconds = clock(end.seconds) if end.seconds >= 60 else f"{end.seconds:.1f} s"
    return SEPARATOR.join([*ranks, seconds, *end_parts(end)])


def end_parts(end: RunSummary) -> list[str]:
    """What that line says besides how many ranks there were, and how long it took."""
    parts = [f"{rank_words(list(end.failed), end.unit)} failed"] if end.failed else []
    parts += (
        ["interrupted"]
        if end.interrupted
        else ["stopped: time limit reached"]
        if end.timed_out
        else ["ended with its pool"]
        if end.pool_ended
        else []
    )
    if end.progress is not None:
        parts.append(progress_reached(end.progress))
    # where nothing was shipped the seconds went elsewhere, as into an installation that has its own line
    if end.shipped >= SHOWN_BYTES or (end.shipped and end.ship_seconds >= SHOWN_SECONDS):
        parts.append(f"shipped {size(end.shipped)} in {end.ship_seconds:.1f} s")
    if end.gathered >= SHOWN_BYTES or end.gather_seconds >= SHOWN_SECONDS:
        parts.append(f"gathered {size(end.gathered)} in {end.gather_seconds:.1f} s")
    parts += [number_text(number) for number in end.numbers]
    parts += [f"results → {', '.join(f'`{name}`' for name in end.names)}"] if end.names else []
    parts += [end.lagged] if end.lagged else []
    return (
        [*parts, f"not all output is shown: %sky_logs --cell {end.cell}"]
        if end.incomplete and end.cell
        else parts
    )


def progress_parts(progress: Progress) -> list[str]:
    """Percent, time left and throughput, as far as they are known."""
    share, left = progress.share, progress.left
    parts = [f"step {progress.done:g}"] if share is None else [f"{math.floor(100 * share)}%"]
    parts += [f"{clock(left)} left"] if left is not None and share != 1 else []
    parts += [f"{short(progress.rate)} steps/s"] if progress.rate > 0 else []
    return parts


def progress_reached(progress: Progress) -> str:
    """How far a run was when it was stopped: "45%, step 450 of 1000"."""
    if progress.total is None or progress.share is None:
        return f"step {progress.done:g}"
    return f"{math.floor(100 * progress.share)}%, step {progress.done:g} of {progress.total:g}"


def number_text(number: Number) -> str:
    """A number with its range over ranks, where they differ, and how it went: "loss 0.203 (0.19–0.21) ▇▅▃▂"."""
    low, high = short(number.low), short(number.high)
    words = [
        number.name,
        short(number.value),
        f"({low}–{high})" if low != high else "",
        sparkline(number.history),
    ]
    return " ".join(filter(None, words))


def sparkline(values: Sequence[float]) -> str:
    """Values as bars between their least and their most, a blank for what is not finite.

    Nothing for fewer than three, and for values that are all the same: these would be a long line that says nothing.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return ""
    low, high = min(finite), max(finite)
    if low == high:
        return ""
    scale = (len(BARS) - 1) / (high - low)
    return "".join(
        BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def short(value: float) -> str:
    """A number in three digits or so."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """A time as a clock shows it: "0:07", "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_html(text: str, share: float | None = None) -> str:
    """A line as HTML: in a quiet colour, with a bar where it is known how far the run is; a long one breaks between its parts."""
    if share is None:
        return f'<div style="{QUIET}">{html.escape(text)}</div>'
    bar = f'<progress value="{share:.3f}" max="1" style="flex: none; width: 8em"></progress>'
    parts = [
        f'<span style="white-space: nowrap">{html.escape(part)}</span>'
        for part in text.split(SEPARATOR)
    ]
    return f'<div style="{QUIET}; display: flex; align-items: baseline; gap: .6em">{bar} <span>{SEPARATOR.join(parts)}</span></div>'


WITHDRAWN = "<span hidden></span>"
"""HTML in the place of a note that is withdrawn; without any, a front end would show the text."""


def folded(summary: str, details: str) -> str:
    """A quiet line as HTML, which opens to show details."""
    return (
        f'<details style="{QUIET}"><summary style="cursor: pointer">{html.escape(summary)}</summary>'
        f'<pre style="margin: .2em 0 0 1.2em; color: inherit">{html.escape(details)}</pre></details>'
    )


INTERVAL = 0.5
"""Seconds between two states of the line."""
MAX_HELD = 1.0
"""Seconds for which a cell's first output waits for the line, so that it stands below it and is not split by it."""
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
        self._dated = False
        """Whether the text behind the widget says when it was written."""
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
            self._controls, self._actions = (
                controls.controls(as_html(text, share), self._actions),
                None,
            )
            self._said = "" if self._controls is not None else self._hint
        html = as_html(text + self._said, share)
        if self._controls is not None:
            self._controls.say(html, deaf=deaf)
            if self._controls.ignored:
                self._withdraw()
                self._said = self._hint
        if self._controls is None:
            self.area.draw(text + self._said, html)
        elif not self._controls.answered:
            self.area.draw(text + self._said, html, self._controls.bundle())
        elif not self._dated:
            # from now on the widget alone moves: drawn anew it would flicker. This is what is saved amid the run
            self._dated = True
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
        self._progress: Progress | None = None
        self._live = watched()
        self._page = page()
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

    @property
    def holds_output(self) -> bool:
        """Whether output has to wait, because the line is about to come and belongs above it."""
        soon = self._after <= MAX_HELD and self.seconds < self._after + INTERVAL
        return self._live and soon and not self.placed

    def replaces(self, area: Area) -> None:
        """Take over this place: that of the line on shipping."""
        self._line.area = area

    def cleared(self) -> None:
        """Bring the line back, with its buttons: the cell was cleared."""
        if self._line.area is not None:
            self._line.area.again()

    def draw(self, state: RunState) -> None:
        """Show this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        self._progress = state.progress
        share = state.progress.share if state.progress is not None else None
        self._line.draw(line(state), share, deaf=bool(state.activity))

    def poll(self) -> None:
        """Take what was pressed, also of other runs' buttons; called often while the run goes on."""
        if (channel := controls.opened) is not None:
            channel.pump()

    def end(self, end: RunSummary) -> None:
        """Put the line that stays in its place; none for a run that was short."""
        if not self.shown and end.seconds < self._after:
            return
        end = self._judged(end)
        if in_notebook():
            self._line.end(end_line(end))
        elif (stream := own_stream()) is not None:
            print(end_line(end), file=stream, flush=True)
        self.shown, self._live = False, False

    def _judged(self, end: RunSummary) -> RunSummary:
        """The end of a run whose page was opened again: what came while it was closed, no page has."""
        again = controls.opened is not None and controls.opened.heard_from_others(
            self._page, self._begun
        )
        stopped = end.failed or end.interrupted or end.timed_out
        progress = end.progress or (self._progress if stopped else None)  # a bar's, else
        return replace(end, incomplete=end.incomplete or again, progress=progress)


class BesideView(RunView):
    """For a run whose handle has a line: what is to stand in that.

    Attributes:
        words: how the run is, or how it has ended. line: the handle's, as soon as it is shown.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.words = ""
        self.line: LiveLine | None = None

    @property
    def placed(self) -> bool:
        """Always: the handle's line is above all that the ranks print."""
        return True

    def cleared(self) -> None:
        """Bring the handle's line back: it was cleared with the cell."""
        if self.line is not None and self.line.area is not None:
            self.line.area.again()

    def draw(self, state: RunState) -> None:
        """Keep what is to be said of this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        self._progress = state.progress
        self.words = SEPARATOR.join(state_parts(state))

    def end(self, end: RunSummary) -> None:
        """Keep what stays to be said; that it was stopped, the handle says."""
        self.words = SEPARATOR.join(
            end_parts(replace(self._judged(end), interrupted=False, failed=(), names=()))
        )
