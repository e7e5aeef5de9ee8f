"""The notebook as a screen: text of ranks in order, rich output as Jupyter shows it, without either where there is no IPython."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skymagic.display import text as display
from skymagic.plan.units import size


class NotebookScreen:
    """Shows a run's output in the cell that caused it; ranks are labelled when there is more than one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._many = len(ranks) > 1
        self._labels = display.Labels(ranks, display.write)

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard output or error."""
        self._labels.text(rank, name, text)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message."""
        self._labels.before_rich(rank)
        if kind == "clear_output":
            if in_ipython():
                from IPython.display import clear_output

                clear_output(wait=bool(content.get("wait")))
            return
        if self._many:
            display.write("stdout", f"[{rank}]\n")
        show(content, update=kind == "update_display_data")

    def note(self, text: str) -> None:
        """A line of skymagic's own, beside the ranks' output."""
        self._labels.finish()
        display.write("stderr", text)

    def finish(self) -> None:
        """The run is over."""
        self._labels.finish()


def in_ipython() -> bool:
    """Whether displays can be shown here; without importing IPython."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def print_note(text: str) -> None:
    """A line of skymagic's own: in a script on standard error, for its output may be data."""
    print(text, file=sys.stdout if in_ipython() else sys.stderr, flush=True)


def show(content: Mapping[str, Any], *, update: bool = False) -> None:
    """Show a bundle of representations: richly in IPython, as text elsewhere."""
    data = dict(content["data"])
    if in_ipython():
        from IPython.core.interactiveshell import InteractiveShell

        transient = dict(content.get("transient") or {})
        InteractiveShell.instance().display_pub.publish(
            data=data, metadata=dict(content.get("metadata") or {}), transient=transient, update=update
        )
    else:
        display.write("stdout", f"{data.get('text/plain', '')}\n")


class Progress:
    """Progress of shipping: tells what is under way once that takes longer than half a second, and then when it is done."""

    DELAY = 0.5

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._begun = time.monotonic()
        self._said: set[str] = set()
        self._total = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes are written; `name` is next or under way."""
        self._total = total
        if time.monotonic() - self._begun > self.DELAY and name not in self._said:
            self._said.add(name)
            self._tell(f"[shipping {name}: {size(done)} of {size(total)}]\n")

    def finish(self) -> None:
        """Shipping is over."""
        if self._said:
            self._tell(f"[shipped {size(self._total)} in {time.monotonic() - self._begun:.1f} s]\n")


class Copying:
    """Progress of copying files, once that takes longer than half a second; then each second, over the same line.

    Attributes:
        seconds: how long it took, at the end.
    """

    DELAY, INTERVAL = 0.5, 1.0

    def __init__(self, write: display.Write) -> None:
        self._write = write
        self._next = self.DELAY
        self._begun = time.monotonic()
        self._shown = 0
        self.seconds = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes are on their way or there; `name` is under way."""
        seconds = time.monotonic() - self._begun
        if seconds > self._next:
            self._next = seconds + self.INTERVAL
            line = f"[{name}: {size(done)} of {size(total)}, {size(done / seconds)}/s]"
            self._write("stderr", "\r" + line.ljust(self._shown))
            self._shown = len(line)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.monotonic() - self._begun
        if self._shown:
            self._write("stderr", "\n")


class NullScreen:
    """The null object among screens: shows nothing."""

    def text(self, rank: int, name: str, text: str) -> None:
        """Not shown."""

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """Not shown."""
