"""Progress line of a running cell, and the final line that is saved.

The text is a pure function of the run's state. The view draws it while the run is in progress, and
replaces it at the end.

The line is a display that is updated in place, as text and HTML. While it changes, a widget with
buttons is added, which a saved notebook would lack: it is closed once the final line has replaced
it.

::

    attended notebook (JupyterLab):
        line and buttons, twice a second ──▶ final line, in the same display
    terminal:
        its last line, twice a second ──▶ final line
    front end that cannot replace what it shows (qtconsole, Emacs):
        a line now and then (`plain_lines`) ──▶ final line
    unattended (nbconvert, papermill, SKYMAGIC_NONINTERACTIVE=1):
        final line at the end
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymagic.display import controls
from skymagic.display.controls import Actions, Controls
from skymagic.display.live import (
    Area,
    in_notebook,
    is_watched,
    own_stream,
    page,
    plain_progress,
)
from skymagic.display.plain_lines import last_line
from skymagic.plan.units import count, rank_words, size

BARS = "▁▂▃▄▅▆▇█"
QUIET = "color: #777; font-family: monospace"
SEPARATOR = " · "
SHOWN_BYTES, SHOWN_SECONDS = 1_000_000, 0.5
"""Thresholds above which the final line shows transfers: bytes, seconds."""


@dataclass(frozen=True)
class Progress:
    """Progress of a loop: steps done, total (None if unknown), steps per second (0 if unknown)."""

    done: float
    total: float | None = None
    rate: float = 0.0

    @property
    def share(self) -> float | None:
        """Completed share, between 0 and 1."""
        return None if not self.total else min(1.0, self.done / self.total)

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated remaining seconds at the current rate."""
        if self.total is None or not self.rate > 0:
            return 0.0 if self.share == 1 else None
        return max(0.0, self.total - self.done) / self.rate


@dataclass(frozen=True)
class Number:
    """A number reported under one name.

    Its mean, minimum and maximum over ranks, and the history of one rank.
    """

    name: str
    value: float
    low: float
    high: float
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunState:
    """Current state of a run. Ranks that are in none of the lists are running."""

    ranks: int
    seconds: float
    done: int = 0
    failed: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    """Ranks in a collective that other ranks have not entered."""
    progress: Progress | None = None
    numbers: Sequence[Number] = ()
    lagging: str = ""
    """Text that names the slowest rank."""
    importing: str = ""
    """Text that names the modules that ranks import."""
    activity: str = ""
    """Activity after the cell itself: its values are being fetched."""
    unit: str = "rank"
    """Counted unit; nodes for a script."""


@dataclass(frozen=True)
class RunSummary:
    """Final state of a run."""

    ranks: int
    seconds: float
    failed: tuple[int, ...] = ()
    interrupted: bool = False
    timed_out: bool = False
    pool_ended: bool = False
    """True if the pool was ended during the run."""
    shipped: int = 0
    """Bytes."""
    ship_seconds: float = 0.0
    gathered: int = 0
    gather_seconds: float = 0.0
    names: tuple[str, ...] = ()
    """Variables of the notebook that received results."""
    progress: Progress | None = None
    """Progress at a premature end; None if the run succeeded, or if unknown."""
    numbers: Sequence[Number] = ()
    lagged: str = ""
    unit: str = "rank"
    cell: int = 0
    """Number of the cell in the notebook; 0 outside one."""
    incomplete: bool = False
    """True if the notebook does not show all output of the ranks."""


def line(state: RunState) -> str:
    """Return the progress line of a run.

    Example: "4 ranks · 0:45 · 45% · 0:55 left · 12.5 steps/s · loss 0.203 ▇▅▃▂".
    """
    return SEPARATOR.join(
        [count(state.ranks, state.unit), clock(state.seconds), *state_parts(state)]
    )


def state_parts(state: RunState) -> list[str]:
    """Return the parts of the progress line after the number of ranks and the elapsed time."""
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
    """Return the final line: "4 ranks · 12.3 s · shipped 400 MB in 0.2 s · results → `results`"."""
    ranks = [count(end.ranks, end.unit)] if end.ranks else []
    seconds = clock(end.seconds) if end.seconds >= 60 else f"{end.seconds:.1f} s"
    return SEPARATOR.join([*ranks, seconds, *end_parts(end)])


def end_parts(end: RunSummary) -> list[str]:
    """Return the parts of the final line after the number of ranks and the duration."""
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
        parts.append(progress_text(end.progress))
    # if nothing was shipped, the time was spent on something with its own line, such as an
    # installation
    if end.shipped >= SHOWN_BYTES or (end.shipped and end.ship_seconds >= SHOWN_SECONDS):
        parts.append(_transfer_text("shipped", end.shipped, end.ship_seconds))
    if end.gathered >= SHOWN_BYTES or end.gather_seconds >= SHOWN_SECONDS:
        parts.append(_transfer_text("gathered", end.gathered, end.gather_seconds))
    parts += [number_text(number) for number in end.numbers]
    parts += [f"results → {', '.join(f'`{name}`' for name in end.names)}"] if end.names else []
    parts += [end.lagged] if end.lagged else []
    return (
        [*parts, f"not all output is shown: %sky_logs --cell {end.cell}"]
        if end.incomplete and end.cell
        else parts
    )


def _transfer_text(verb: str, nbytes: int, seconds: float) -> str:
    """Return the text about bytes that were moved; a time that would be 0.0 s is left out."""
    text = f"{verb} {size(nbytes)}"
    return f"{text} in {seconds:.1f} s" if seconds >= 0.05 else text


def progress_parts(progress: Progress) -> list[str]:
    """Return percentage, time left and throughput, each if known."""
    share, seconds_left = progress.share, progress.remaining_seconds
    parts = [f"step {progress.done:g}"] if share is None else [f"{math.floor(100 * share)}%"]
    parts += [f"{clock(seconds_left)} left"] if seconds_left is not None and share != 1 else []
    parts += [f"{short(progress.rate)} steps/s"] if progress.rate > 0 else []
    return parts


def progress_text(progress: Progress) -> str:
    """Return the progress of a run when it was stopped: "45%, step 450 of 1000"."""
    if progress.total is None or progress.share is None:
        return f"step {progress.done:g}"
    return f"{math.floor(100 * progress.share)}%, step {progress.done:g} of {progress.total:g}"


def number_text(number: Number) -> str:
    """Return a number with its range over ranks, if they differ, and its history.

    Example: "loss 0.203 (0.19–0.21) ▇▅▃▂".
    """
    low, high = short(number.low), short(number.high)
    parts = [
        number.name,
        short(number.value),
        f"({low}–{high})" if low != high else "",
        sparkline(number.history),
    ]
    return " ".join(filter(None, parts))


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars between their minimum and maximum; blank if not finite.

    Return "" for fewer than three values, and for equal values, whose bars would carry no
    information.
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
    """Return a number with about three digits."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a duration in clock format: "0:07", "1:02:03"."""
    minutes, seconds_of_minute = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{seconds_of_minute:02}"
        if hours
        else f"{minutes}:{seconds_of_minute:02}"
    )


def as_html(text: str, share: float | None = None) -> str:
    """Return a line as HTML in a muted colour, with a bar if the progress is known.

    A long line breaks between its parts.
    """
    if share is None:
        return f'<div style="{QUIET}">{html.escape(text)}</div>'
    bar = f'<progress value="{share:.3f}" max="1" style="flex: none; width: 8em"></progress>'
    parts = [
        f'<span style="white-space: nowrap">{html.escape(part)}</span>'
        for part in text.split(SEPARATOR)
    ]
    return (
        f'<div style="{QUIET}; display: flex; align-items: baseline; gap: .6em">{bar} '
        f"<span>{SEPARATOR.join(parts)}</span></div>"
    )


WITHDRAWN = "<span hidden></span>"
"""HTML of a withdrawn note. With none at all, a front end would show the text."""


def folded(summary: str, details: str) -> str:
    """Return a muted line as HTML that opens to show details."""
    return (
        f'<details style="{QUIET}"><summary style="cursor: '
        f'pointer">{html.escape(summary)}</summary>'
        '<pre style="margin: .2em 0 0 1.2em; color: '
        f'inherit">{html.escape(details)}</pre></details>'
    )


INTERVAL = 0.5
"""Seconds between two updates of the line."""
MAX_HELD = 1.0
"""Maximum seconds that a cell's first output waits for the line.

The line then stands above the output and does not split it.
"""
HINT = " · press ■ to stop"
"""Text at the end of the line if buttons are wanted but unavailable."""


class LiveLine:
    """A line in a display: with buttons while it changes, finally as text and HTML.

    Args:
        actions: actions of its buttons; None for no buttons.
        hint: text in the line if the front end does not show the buttons.
    """

    def __init__(self, actions: Actions | None, hint: str = "") -> None:
        self._actions, self._hint = actions, hint
        self._controls: Controls | None = None
        self._said = hint if actions is None else ""
        self._dated = False
        """True if the text behind the widget includes its date."""
        self.area: Area | None = None
        """Display that shows the line."""

    def show_text(self, text: str) -> None:
        """Show this text immediately, without buttons."""
        self.area = self.area or Area()
        self.area.draw(text, as_html(text))

    def draw(self, text: str, share: float | None = None, *, accepts_clicks: bool = True) -> None:
        """Show this text.

        Args:
            share: value of the progress bar, from 0 to 1; None for no bar.
            accepts_clicks: False while this thread is busy with something else than the run.
        """
        self.area = self.area or Area()
        if self._actions is not None:
            self._controls, self._actions = (
                controls.controls(as_html(text, share), self._actions),
                None,
            )
            self._said = "" if self._controls is not None else self._hint
        html = as_html(text + self._said, share)
        if self._controls is not None:
            self._controls.update(html, accepts_clicks=accepts_clicks)
            if self._controls.ignored:
                self._withdraw()
                self._said = self._hint
        if self._controls is None:
            self.area.draw(text + self._said, html)
        elif not self._controls.answered:
            self.area.draw(text + self._said, html, self._controls.bundle())
        elif not self._dated:
            # from now on only the widget is updated: redrawing the display would flicker. This
            # text is what a notebook saved during the run contains
            self._dated = True
            dated = f"{text}{SEPARATOR}as of {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
            self.area.draw(dated, as_html(dated, share), self._controls.bundle())

    def end(self, text: str) -> None:
        """Replace the line by this final text."""
        self._actions = None
        self.show_text(text)
        if self._controls is not None and self._controls.answered:
            self._controls.end(as_html(text))
            self._controls = None
        self._withdraw()

    def _withdraw(self) -> None:
        if self._controls is not None:
            self._controls.close()
            self._controls = None


class RunView:
    """Progress line of one run.

    Args:
        after: seconds after which it appears; shorter runs have none.
        actions: actions of its buttons; None for no buttons.
        elapsed: seconds that the run has taken already, in another notebook.
    """

    def __init__(self, after: float, actions: Actions | None = None, elapsed: float = 0.0) -> None:
        self._live = is_watched()
        self._plain = plain_progress()
        self._after = after
        self._next = after if self._plain is None else max(after, self._plain.pause)
        # a terminal's cursor is at the beginning of a line when a cell starts
        last_line.begin()
        self._opened = time.monotonic()
        self._begun = self._opened - elapsed
        self._progress: Progress | None = None
        self._page = page()
        self._line = LiveLine(actions, HINT)
        self.shown = False
        """True while a state is shown that must be replaced at the end."""

    @property
    def seconds(self) -> float:
        """Seconds since the run was requested."""
        return time.monotonic() - self._begun

    @property
    def moves(self) -> bool:
        """True if the line is updated during the run."""
        return self._live

    @property
    def due(self) -> bool:
        """True if a new state is to be drawn."""
        is_shown = self._live or (self._plain is not None and self._plain.due)
        return is_shown and self.seconds >= self._next

    @property
    def is_placed(self) -> bool:
        """True if it has a place, above or below all further output of the ranks."""
        return self._line.area is not None or self._plain is last_line

    @property
    def holds_output(self) -> bool:
        """True if output must wait because the line is about to appear above it."""
        open_for = time.monotonic() - self._opened
        soon = self._after <= MAX_HELD and open_for < self._after + INTERVAL
        return self._live and soon and not self.is_placed

    def replaces(self, area: Area) -> None:
        """Take over the display of the line on shipping."""
        self._line.area = area

    def on_cleared(self) -> None:
        """Restore the line with its buttons after the cell was cleared."""
        if self._line.area is not None:
            self._line.area.show_again()

    def draw(self, state: RunState) -> None:
        """Show this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        self._progress = state.progress
        if self._plain is not None:
            self._plain.show(own_stream(), line(state))
            return
        share = state.progress.share if state.progress is not None else None
        self._line.draw(line(state), share, accepts_clicks=not state.activity)

    def poll(self) -> None:
        """Process presses of buttons, including those of other runs.

        Called often during the run.
        """
        if (channel := controls.current_channel) is not None:
            channel.pump()

    def end(self, end: RunSummary) -> None:
        """Replace the line by the final line; a short run has none."""
        if not self.shown and end.seconds < self._after:
            return
        end = self._with_completeness(end)
        if in_notebook():
            self._line.end(end_line(end))
        elif (stream := own_stream()) is not None:
            last_line.erase()
            print(end_line(end), file=stream, flush=True)
        self.shown, self._live, self._plain = False, False, None

    def _with_completeness(self, end: RunSummary) -> RunSummary:
        """Mark the summary as incomplete if the run's page was reopened.

        Output that arrived while the page was closed is on no page.
        """
        reopened = (
            controls.current_channel is not None
            and controls.current_channel.has_other_pages(self._page, self._opened)
        )
        stopped = end.failed or end.interrupted or end.timed_out
        progress = end.progress or (self._progress if stopped else None)  # else that of a bar
        return replace(end, incomplete=end.incomplete or reopened, progress=progress)


class BesideView(RunView):
    """View of a background run, which stores the text for the line of the run's handle.

    Attributes:
        words: current or final state as text.
        line: the handle's line, once it is shown.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.words = ""
        self.line: LiveLine | None = None

    @property
    def is_placed(self) -> bool:
        """Always True: the handle's line is above all output of the ranks."""
        return True

    def on_cleared(self) -> None:
        """Restore the handle's line after it was cleared with the cell."""
        if self.line is not None and self.line.area is not None:
            self.line.area.show_again()

    def draw(self, state: RunState) -> None:
        """Store the text of this state."""
        self._next = self.seconds + INTERVAL
        self.shown = True
        self._progress = state.progress
        self.words = SEPARATOR.join(state_parts(state))

    def end(self, end: RunSummary) -> None:
        """Store the final text, without the outcome, which the handle shows itself."""
        self.words = SEPARATOR.join(
            end_parts(replace(self._with_completeness(end), interrupted=False, failed=(), names=()))
        )
