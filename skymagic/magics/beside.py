"""A cell that goes on beside the notebook (``--noblock``): its handle, which waits for it, stops it, and says how it is."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from skymagic.display.button import StopLine, stop_line
from skymagic.display.live import in_ipython
from skymagic.errors import RunInterrupted
from skymagic.plan.units import duration_text, rank_words
from skymagic.run.interrupt import StopSignal

TICK = 1.0
"""Seconds between two texts of a cell that goes on."""


class Pending:
    """The handle of a cell that goes on beside the notebook.

    Args:
        call: what is to be done, on a thread of its own; it is given this handle, to say on which ranks.
        number: of the notebook's cell.

    Attributes:
        stop: ends the run, once it has been given to it.
        ranks: those that take part, as soon as they are known.
    """

    def __init__(self, call: Callable[[Pending], Any], number: int) -> None:
        self.number = number
        self.stop = StopSignal()
        self.ranks: tuple[int, ...] = ()
        self._call = call
        self._value: Any = None
        self._problem: BaseException | None = None
        self._begun = time.monotonic()
        self._seconds: float | None = None
        """How long it took, when it has ended."""
        self._shown_as = uuid.uuid4().hex
        self._shown = threading.Event()
        self._line: StopLine | None = None
        """What is shown while it goes on, where there are widgets; its end is text."""
        self._context = contextvars.copy_context()  # output of the thread belongs to this cell
        self._thread = threading.Thread(
            target=self._context.copy().run, args=(self._work,), name="skymagic-run", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        try:
            self._value = self._call(self)
        except BaseException as problem:
            self._problem = problem
        self._seconds = time.monotonic() - self._begun
        self._refresh()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._seconds is not None

    def cancel(self) -> bool:
        """Stop it, as the stop button does: once interrupts its ranks, twice kills what still runs. False if it has ended."""
        if self.done():
            return False
        self.stop.send()
        self._refresh()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it, and return its values by rank; raises what the cell raised.

        Raises:
            TimeoutError: it goes on after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the cell goes on after {timeout} s")
        if self._problem is not None:
            raise self._problem
        return None if self._value is None else self._value.value

    @property
    def state(self) -> str:
        """``waiting`` for ranks that others use, ``running``, ``stopping``, ``stopped``, ``failed`` or ``done``."""
        if not self.done():
            return "stopping" if self.stop.sent else "running" if self.stop.attached else "waiting"
        return "stopped" if isinstance(self._problem, RunInterrupted) else "failed" if self._problem else "done"

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._begun if self._seconds is None else self._seconds
        took = f"{seconds:.1f} s" if seconds < 60 else duration_text(int(seconds))
        where = f" on {rank_words(self.ranks)}" if self.ranks else ""
        hint = "" if self.done() or self.stop.sent else f"; Out[{self.number}].cancel() stops it"
        return f"<cell {self.number}{where}: {self.state} {'after' if self.done() else 'for'} {took}{hint}>"

    # -- as the notebook shows it --------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """Show the text in a place that is written again when something has changed, and a button as soon as there is one."""
        self._publish({"text/plain": repr(self)}, update=False)
        self._shown.set()
        if (
            not self.done() and (line := stop_line(repr(self), self.cancel)) is not None
        ):  # widgets take a while to import
            self._publish(line.bundle(), update=True)
            self._line = line
            threading.Thread(target=self._tick, name="skymagic-tick", daemon=True).start()
        if self.done():  # in the meantime
            self._refresh()

    def _tick(self) -> None:
        """Keep true what stands beside the button: whether it waits or runs, and for how long."""
        while not self.done():
            self._refresh()
            self._thread.join(TICK)

    def _refresh(self) -> None:
        if not self._shown.is_set():
            return
        with contextlib.suppress(Exception):  # the notebook has gone
            if self._line is not None and not self.done():
                self._line.say(repr(self))
                return
            self._context.copy().run(self._publish, {"text/plain": repr(self)}, update=True)
            if self._line is not None:
                self._line.close()

    def _publish(self, bundle: dict[str, Any], *, update: bool) -> None:
        if in_ipython():
            from IPython.display import publish_display_data

            publish_display_data(bundle, transient={"display_id": self._shown_as}, update=update)
