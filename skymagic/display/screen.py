"""The notebook as a screen: text of ranks in order, rich output as Jupyter shows it, without either where there is no IPython."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from skymagic.display import text as display
from skymagic.display.labels import Labels
from skymagic.display.live import (
    Area,
    StatusLine,
    in_ipython,
    in_notebook,
    own_stream,
    send_collected,
    show,
    together,
    write,
)
from skymagic.display.run_line import WITHDRAWN, RunState, RunSummary, RunView, folded
from skymagic.display.terminal import Bars
from skymagic.plan.units import size
from skymagic.wire.untrusted import print_sanitized, sanitized

SHIPPED = "[shipped"


class Displayable(Protocol):
    """What has text (its ``repr``) and HTML of its own: logs, offers, findings, the status of pools."""

    def _repr_html_(self) -> str | None:
        """HTML, or None where there is only text."""


class Screen:
    """Where a run's output goes; called on the run's own thread, in order. This one shows nothing."""

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard stream."""

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message of Jupyter's."""

    def note(self, text: str) -> None:
        """A line of skymagic's own."""

    def standstill(self, summary: str, places: str = "") -> None:
        """Show that nothing changes on the ranks, and where they are; an empty summary withdraws it. Twice is safe."""

    def status(self, text: str, *, last: bool = False) -> None:
        """A line of skymagic's own that replaces the one before; `last` is its final state."""

    def refresh(self) -> None:
        """Called several times a second, also when nothing comes: show lines that are open."""

    def progress(self, state: Callable[[], RunState]) -> None:
        """Called with a function that tells how the run is, for a screen that shows it."""


class NotebookScreen(Screen):
    """Shows a run's output in the cell that caused it; ranks are labelled when there is more than one.

    Args:
        view: the line that says how the run is; None for none.
    """

    def __init__(self, ranks: Sequence[int], view: RunView | None = None) -> None:
        self._many = len(ranks) > 1
        self._view, self._bars = view, Bars()
        self._state: Callable[[], RunState] | None = None
        """How the run is, as soon as anybody knows."""
        self._labels = Labels(ranks, write, in_notebook())
        self._status = StatusLine()
        self._standstill: Area | None = None
        """Where it stands that nothing changes; None while something does, and where it cannot be withdrawn."""
        self._clearing = False
        """Whether a rank has asked that its next output takes the place of all that the cell shows."""
        self._held: list[Callable[[], None]] = []
        """What is to be shown once the line stands above it, in order."""

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard output or error."""
        if "\r" in text:
            self._before_bar()
        self._show(partial(self._show_text, rank, name, text))

    def _show_text(self, rank: int, name: str, text: str) -> None:
        self._clear()
        self._labels.text(rank, name, text)
        if self._view is not None:
            alone = not (self._many or self._view.shown)
            self._bars.feed(rank, name, text, time.monotonic(), all=alone)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message."""
        self._show(partial(self._show_rich, rank, kind, content))

    def _show_rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
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
        show(content, update=update)

    def _show(self, output: Callable[[], None]) -> None:
        """Show output after all that came before; keep it back while the line is about to come, which belongs above it."""
        if self._view is not None and self._view.holds_output:
            self._held.append(output)
            return
        self._release()
        output()

    def _release(self) -> None:
        """Show what was kept back."""
        held, self._held = self._held, []
        if held:
            with together():
                for output in held:
                    output()

    def _clear(self, *, wait: bool = True) -> None:
        """Clear the cell where a rank has asked for it, just before what takes the place of its output; its line stays."""
        if not self._clearing:
            return
        self._clearing = False
        from IPython.display import clear_output

        send_collected()
        clear_output(wait=wait)
        self._labels.cleared()
        if self._view is not None:
            self._view.cleared()

    def note(self, text: str) -> None:
        """A line of skymagic's own, beside the ranks' output."""
        self._show(partial(self._show_note, text))

    def _show_note(self, text: str) -> None:
        self._labels.before_note()
        write("stderr", sanitized(text))

    def standstill(self, summary: str, places: str = "") -> None:
        """Show a note that opens to tell where the ranks are; empty again once they go on. In a terminal it is printed."""
        if summary and in_notebook():
            self._labels.before_note()
            self._standstill = self._standstill or Area()
            self._standstill.draw(display.unfolded(summary, places), folded(summary, places))
        elif summary:
            self.note(f"{display.unfolded(summary, places)}\n")
        elif self._standstill is not None:
            self._standstill.draw("", WITHDRAWN)
            self._standstill = None

    def status(self, text: str, *, last: bool = False) -> None:
        """What is under way, in the place of what was said before; `last` is how it ended."""
        if not last:
            self._status.show(text)
        elif (
            (area := self._status.end(text)) is not None
            and self._view is not None
            and text.startswith(SHIPPED)
        ):
            self._view.replaces(area)  # one line says both

    def refresh(self) -> None:
        """Show lines that are open for a while, and take what was pressed; called often."""
        with together():
            self._labels.refresh()
        if self._view is not None:
            self._view.poll()

    def progress(self, state: Callable[[], RunState]) -> None:
        """How the run is; called often, and asked for when the line is to be drawn."""
        view, self._state = self._view, state
        if view is None or not view.due:
            return
        known = state()
        known = replace(
            known, seconds=view.seconds, progress=known.progress or self._bars.progress()
        )
        line = None if self._many or view.placed else self._bars.open_line()
        if line is None:
            view.draw(known)
            self._release()
            return
        # a bar that goes on below the line must not stay above it as it was
        name, open_line = line
        write(name, open_line.wiped())
        view.draw(known)
        write(name, open_line.repainted())
        self._release()

    def _before_bar(self) -> None:
        """Show the line now: a bar is redrawn below it, and what stood above it could not be taken back without a trace."""
        view = self._view
        if view is not None and view.moves and not view.shown and self._state is not None:
            view.draw(replace(self._state(), seconds=view.seconds))

    def end(self, end: RunSummary) -> None:
        """How the run has ended, in the place of its line."""
        if self._view is not None:
            self._view.end(end)

    def finish(self) -> None:
        """All output of the run has come."""
        self._release()
        with together():
            self._labels.finish()


class Settling:
    """Which contents of ranks count as shown, so that each reaches the screen at least once, even if this process is killed; pure.

    Neither ZeroMQ nor a front end acknowledges output. A content counts as shown SECONDS after it was given to the screen, which holds back
    a cell's first output until its line is there (`run_line.MAX_HELD`), and open lines for less (`labels.DELAY`); ZeroMQ and the system then
    need less than a millisecond.

    Args:
        mark: called with a rank and the number of its last content that counts as shown.
    """

    SECONDS = 4.0

    def __init__(self, mark: Callable[[int, int], None]) -> None:
        self._mark = mark
        self._given: deque[tuple[float, int, int]] = deque()
        """(When, rank, number) of contents that do not count as shown yet."""

    def add(self, rank: int, seq: int, now: float) -> None:
        """A content was given to the screen."""
        self._given.append((now, rank, seq))

    def settle(self, now: float) -> None:
        """Mark what was given long enough ago; called often."""
        last: dict[int, int] = {}
        while self._given and self._given[0][0] + self.SECONDS <= now:
            _, rank, last[rank] = self._given.popleft()
        for rank, seq in last.items():
            self._mark(rank, seq)


def print_note(text: str) -> None:
    """Print a line of skymagic's own."""
    print_sanitized(text, own_stream())


def show_object(shown: Displayable, *, apart: bool = False) -> None:
    """Something as a notebook shows it: as HTML and text; printed in a terminal, and where it has no HTML.

    Args:
        apart: in a terminal a line is left free above it.
    """
    if not in_notebook() or shown._repr_html_() is None:
        print(f"\n{shown!r}" if apart else repr(shown))
        return
    from IPython.display import display as show_rich

    show_rich(shown)


class ShippingProgress:
    """Progress of shipping: tells what is under way once that takes longer than half a second, and in its place that it is done."""

    DELAY, INTERVAL = 0.5, 0.2

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._begun = time.monotonic()
        self._next = self.DELAY
        self._what = ""

    def __call__(self, weights: Mapping[str, int], done: int) -> None:
        """`done` bytes are written of what is to be written, by name."""
        seconds = time.monotonic() - self._begun
        if seconds > self._next:
            self._next = seconds + self.INTERVAL
            self._what = display.weights(weights)
            self._screen.status(f"[shipping {self._what}: {done / sum(weights.values()):.0%}]")

    def __enter__(self) -> ShippingProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._what:
            how = SHIPPED if kind is None else "[could not ship"
            self._screen.status(
                f"{how} {self._what} in {time.monotonic() - self._begun:.1f} s]", last=True
            )


class Copying:
    """Progress of copying files, once that takes longer than half a second; then each second, over the same line.

    Attributes:
        seconds: how long it took, at the end.
    """

    DELAY, INTERVAL = 0.5, 1.0

    def __init__(self) -> None:
        self._line = StatusLine()
        self._next = self.DELAY
        self._begun = time.monotonic()
        self.seconds = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes are on their way or there; `name` is under way."""
        seconds = time.monotonic() - self._begun
        if seconds > self._next:
            self._next = seconds + self.INTERVAL
            self._line.show(f"[{name}: {size(done)} of {size(total)}, {size(done / seconds)}/s]")

    def end(self, text: str) -> None:
        """What was copied, in the place of what was under way."""
        self._line.end(text)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self._begun
