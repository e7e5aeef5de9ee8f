"""The notebook as a screen: text of ranks in order, and rich output.

Without IPython it prints plain text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from skymagic.display import text as display
from skymagic.display.labels import Labels
from skymagic.display.live import (
    Area,
    DisplayData,
    StatusLine,
    batched_output,
    clear_cell,
    in_ipython,
    in_notebook,
    own_stream,
    show,
    write,
)
from skymagic.display.plain_lines import last_line
from skymagic.display.run_line import WITHDRAWN, RunState, RunSummary, RunView, folded
from skymagic.display.terminal import Bars
from skymagic.plan.units import size
from skymagic.wire.typed import JsonObject
from skymagic.wire.untrusted import print_sanitized, sanitized

SHIPPED = "[shipped"


class Displayable(Protocol):
    """An object with text (its ``repr``) and HTML: logs, offers, findings, the status of pools."""

    def _repr_html_(self) -> str | None:
        """Return HTML, or None if there is only text."""


class Screen:
    """Destination of a run's output; called on the run's own thread, in order.

    This base class shows nothing.
    """

    def text(self, rank: int, name: str, text: str) -> None:
        """Show text of a rank's standard stream."""

    def rich(self, rank: int, kind: str, content: JsonObject) -> None:
        """Show a Jupyter display message."""

    def note(self, text: str) -> None:
        """Show a line by skymagic itself."""

    def standstill(self, summary: str, positions: str = "") -> None:
        """Show that the ranks make no progress, and where they are; an empty summary withdraws it.

        Calling it twice is safe.
        """

    def status(self, text: str, *, last: bool = False) -> None:
        """Show a line by skymagic that replaces the previous one; `last` is its final state."""

    def refresh(self) -> None:
        """Show open lines. Called several times a second, also without new output."""

    def progress(self, state: Callable[[], RunState]) -> None:
        """Receive a function that returns the run's state, for screens that show it."""


class NotebookScreen(Screen):
    """Screen in the cell that started the run; ranks are labelled if there are several.

    Args:
        view: line with the state of the run; None for none.
    """

    def __init__(self, ranks: Sequence[int], view: RunView | None = None) -> None:
        self._many = len(ranks) > 1
        self._view, self._bars = view, Bars()
        self._state: Callable[[], RunState] | None = None
        """Returns the state of the run, once known."""
        self._labels = Labels(ranks, write, in_notebook())
        self._status = StatusLine()
        self._standstill: Area | None = None
        """Display with the stall note.

        None while ranks make progress, and in front ends where a note cannot be withdrawn.
        """
        self._clearing = False
        """True if a rank has requested that its next output replaces all output of the cell."""
        self._held: list[Callable[[], None]] = []
        """Output to be shown once the line is in place above it, in order."""

    def text(self, rank: int, name: str, text: str) -> None:
        """Show text of a rank's standard output or error."""
        if "\r" in text:
            self._before_bar()
        self._show(partial(self._show_text, rank, name, text))

    def _show_text(self, rank: int, name: str, text: str) -> None:
        self._clear()
        self._labels.text(rank, name, text)
        if self._view is not None:
            alone = not (self._many or self._view.shown)
            self._bars.feed(rank, name, text, time.monotonic(), all=alone)

    def rich(self, rank: int, kind: str, content: JsonObject) -> None:
        """Show a display message."""
        self._show(partial(self._show_rich, rank, kind, content))

    def _show_rich(self, rank: int, kind: str, content: JsonObject) -> None:
        update = kind == "update_display_data"
        if not update:
            self._labels.before_rich(rank)
        if kind == "clear_output":
            self._clearing = in_ipython()
            if not content.get("wait"):
                self._clear(wait=False)
            return
        if not update:
            self._clear()
        if self._many and not update:
            write("stdout", f"[{rank}]\n")
        show(DisplayData.of(content), update=update)

    def _show(self, output: Callable[[], None]) -> None:
        """Show output after all earlier output.

        Output is held back while the progress line is about to appear, which belongs above it.
        """
        if self._view is not None and self._view.holds_output:
            self._held.append(output)
            return
        self._release()
        output()

    def _release(self) -> None:
        """Show the output that was held back."""
        outputs, self._held = self._held, []
        if outputs:
            with batched_output():
                for output in outputs:
                    output()

    def _clear(self, *, wait: bool = True) -> None:
        """Clear the cell if a rank has requested it, just before the output that replaces the rest.

        The progress line is kept.
        """
        if not self._clearing:
            return
        self._clearing = False
        clear_cell(wait=wait)
        self._labels.on_cleared()
        if self._view is not None:
            self._view.on_cleared()

    def note(self, text: str) -> None:
        """Show a line by skymagic itself among the ranks' output."""
        self._show(partial(self._show_note, text))

    def _show_note(self, text: str) -> None:
        self._labels.before_note()
        write("stderr", sanitized(text))

    def standstill(self, summary: str, positions: str = "") -> None:
        """Show a note that opens to list where the ranks are; clear it once they continue.

        In a terminal the note is printed.
        """
        if summary and in_notebook():
            self._labels.before_note()
            self._standstill = self._standstill or Area()
            self._standstill.draw(display.unfolded(summary, positions), folded(summary, positions))
        elif summary:
            self.note(f"{display.unfolded(summary, positions)}\n")
        elif self._standstill is not None:
            self._standstill.draw("", WITHDRAWN)
            self._standstill = None

    def status(self, text: str, *, last: bool = False) -> None:
        """Show the current activity in place of the previous one; `last` is its result."""
        if not last:
            self._status.show(text)
        elif (
            (area := self._status.end(text)) is not None
            and self._view is not None
            and text.startswith(SHIPPED)
        ):
            self._view.replaces(area)  # one line shows both

    def refresh(self) -> None:
        """Show lines that have been open for a while, and process button presses. Called often."""
        with batched_output():
            self._labels.refresh()
        if self._view is not None:
            self._view.poll()

    def progress(self, state: Callable[[], RunState]) -> None:
        """Draw the line if it is due, with the run's state. Called often."""
        view, self._state = self._view, state
        if view is None or not view.due:
            return
        current = state()
        current = replace(
            current, seconds=view.seconds, progress=current.progress or self._bars.progress()
        )
        line = None if self._many or view.is_placed else self._bars.open_line()
        if line is None:
            view.draw(current)
            self._release()
            return
        # the bar continues below the line: its old state above the line must be erased
        name, open_line = line
        write(name, open_line.erasing_text())
        view.draw(current)
        write(name, open_line.redrawing_text())
        self._release()

    def _before_bar(self) -> None:
        """Show the line immediately, before a bar appears.

        The bar is redrawn below the line; text that a bar left above it could not be removed
        cleanly.
        """
        view = self._view
        if view is not None and view.moves and not view.shown and self._state is not None:
            view.draw(replace(self._state(), seconds=view.seconds))

    def end(self, end: RunSummary) -> None:
        """Replace the line by the summary of the run."""
        if self._view is not None:
            self._view.end(end)

    def finish(self) -> None:
        """Show remaining output once the run is over."""
        self._release()
        with batched_output():
            self._labels.finish()


def print_note(text: str) -> None:
    """Print a line by skymagic itself."""
    last_line.erase()
    print_sanitized(text, own_stream())


def show_object(shown: Displayable, *, apart: bool = False) -> None:
    """Show an object as HTML and text, or print it in a terminal or if it has no HTML.

    Args:
        apart: print a blank line above it in a terminal.
    """
    if not in_notebook() or shown._repr_html_() is None:
        print(f"\n{shown!r}" if apart else repr(shown))
        return
    from IPython.display import display as show_rich

    show_rich(shown)


class ShippingProgress:
    """Progress of shipping, shown once it takes longer than half a second.

    The line is replaced by the result at the end.
    """

    DELAY, INTERVAL = 0.5, 0.2

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._begun = time.monotonic()
        self._next = self.DELAY
        self._what = ""

    def __call__(self, weights: Mapping[str, int], done: int) -> None:
        """Report that `done` bytes of `weights`, the bytes by name, are written."""
        seconds = time.monotonic() - self._begun
        if seconds > self._next:
            self._next = seconds + self.INTERVAL
            self._what = display.weights(weights)
            self._screen.status(f"[shipping {self._what}: {done / sum(weights.values()):.0%}]")

    def __enter__(self) -> ShippingProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._what:
            outcome = SHIPPED if kind is None else "[could not ship"
            self._screen.status(
                f"{outcome} {self._what} in {time.monotonic() - self._begun:.1f} s]", last=True
            )


class Copying:
    """Progress of copying files, shown after half a second and updated each second in one line.

    Attributes:
        seconds: total duration, set at the end.
    """

    DELAY, INTERVAL = 0.5, 1.0

    def __init__(self) -> None:
        self._line = StatusLine()
        self._next = self.DELAY
        self._begun = time.monotonic()
        self.seconds = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are sent; `name` is being copied."""
        seconds = time.monotonic() - self._begun
        if seconds > self._next:
            self._next = seconds + self.INTERVAL
            self._line.show(f"[{name}: {size(done)} of {size(total)}, {size(done / seconds)}/s]")

    def end(self, text: str) -> None:
        """Replace the progress by a summary of the copy."""
        self._line.end(text)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self._begun
