"""Background cells (``--noblock``): a handle to wait for one, stop it, and show its state."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from skymagic.cluster import telemetry
from skymagic.display.controls import Actions
from skymagic.display.ipykernel6 import cell_context
from skymagic.display.live import in_notebook, is_watched
from skymagic.display.run_line import SEPARATOR, BesideView, LiveLine
from skymagic.errors import PoolError, RequestError, RunInterrupted
from skymagic.jobs import inspection
from skymagic.plan.units import duration_text, rank_words
from skymagic.pool import Pool
from skymagic.pool.status import State
from skymagic.run.interrupt import StopSignal
from skymagic.run.metrics import table

TICK = 1.0
"""Seconds between two updates of the text of a background cell."""


class RunHandle:
    """Handle to a background cell, as ``%%sky_broadcast -a`` returns it.

    ``await run`` gives the cell's result.

    Args:
        call: the work, run on a separate thread; receives this handle, to set its ranks.
        number: number of the notebook's cell.
        buttons: show buttons in its line.

    Attributes:
        stop: signal that stops the run, once the run is attached.
        pool: pool on which it runs; None until known.
        ranks: participating ranks, as soon as they are known.
    """

    def __init__(
        self, call: Callable[[RunHandle], Any], number: int, *, buttons: bool = True
    ) -> None:
        self.number = number
        self._buttons = buttons
        self.stop = StopSignal()
        self.pool: Pool | None = None
        self.ranks: tuple[int, ...] = ()
        self._call = call
        self._value: Any = None
        self._problem: BaseException | None = None
        self._begun = time.monotonic()
        self._seconds: float | None = None
        """Duration, once it has ended."""
        self._ended = Future[None]()
        self._ended.set_running_or_notify_cancel()  # cancelling a wait must not cancel the run
        self.taken = threading.Event()
        """Set once the run has read all notebook variables that it needs, so that they may change.

        Also set if it waits for other runs, or has ended.
        """
        self.view = BesideView()
        """Reports of its ranks; the run draws it."""
        self._line: LiveLine | None = None
        """Display line of the cell, in a notebook."""
        self._drawing = threading.Lock()
        self._context = cell_context()  # attributes the thread's output to this cell
        self._thread = threading.Thread(
            target=self._context.copy().run, args=(self._work,), name="skymagic-run", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        try:
            self._value = self._call(self)
        except BaseException as problem:
            self._problem = problem
        self.taken.set()
        # set before waiters wake up, which may print it
        self._seconds = time.monotonic() - self._begun
        self._ended.set_result(None)
        self._refresh()

    def wait_until_variables_taken(self) -> None:
        """Wait until the notebook's variables may change; an interrupt stops the run."""
        try:
            # an interrupt just before a wait does not end that wait
            while not self.taken.wait(TICK):
                pass
        except KeyboardInterrupt:
            self.cancel()
            raise

    def done(self) -> bool:
        """Return True if it has ended."""
        return self._ended.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for its end, and return True if it has ended.

        Never raises the cell's error.
        """
        self._thread.join(timeout)
        return self.done()

    def cancel(self) -> bool:
        """Stop it, as the stop button does. Return False if it has ended.

        The first call interrupts its ranks, the second kills those that still run.
        """
        if self.done():
            return False
        self.stop.send()
        self._refresh()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the cell and return its values in rank order.

        Raises the cell's error, or TimeoutError after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the cell is still running after {timeout} s")
        if self._problem is not None:
            raise self._problem
        return None if self._value is None else self._value.value

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the result without blocking the event loop.

        Cancelling the wait does not affect the run.
        """
        yield from asyncio.wrap_future(self._ended)
        return self.result()

    def output(self, rank: int | None = None) -> str:
        """Return everything a rank has written so far, shown or not; by default its first rank's.

        Raises:
            RequestError: the rank does not participate.
            PoolError: the pool has ended (%sky_logs has the last lines), its node does not answer,
                or its log is gone.
        """
        rank = rank if rank is not None else min(self.ranks, default=0)
        if self.ranks and rank not in self.ranks:
            raise RequestError(
                f"rank {rank} does not take part in it: {rank_words(self.ranks)} "
                f"{'do' if len(self.ranks) > 1 else 'does'}",
                code="no-rank",
                rank=rank,
            )
        if self.pool is None or not self.stop.run:
            return ""
        if self.pool.state is State.STOPPED:
            raise self.pool.missing()
        text = telemetry.output_of_run(self.pool.agents, rank, self.stop.run)
        if text is None and not self.done():  # the rank has not started
            return ""
        if text is None:
            raise PoolError(
                f"no output of rank {rank} in cell {self.number} is left: its node was "
                "restarted, or had many runs since",
                code="no-log",
                rank=rank,
            )
        return text

    @property
    def metrics(self) -> Any:
        """Values that its ranks have reported with ``sky.report``, also while it is running.

        A table like ``pool.metrics``, of this cell alone. ``run.metrics.loss.unstack().plot()``
        draws a line for each rank.
        """
        return table([] if self.stop.metrics is None else [self.stop.metrics])

    @property
    def status(self) -> str:
        """State of the cell in a word.

        One of ``waiting`` (for ranks in use by others), ``running``, ``stopping``, ``stopped``,
        ``failed`` and ``done``.
        """
        if not self.done():
            return (
                "stopping" if self.stop.sent else "running" if self.stop.is_attached else "waiting"
            )
        ended_with_pool = isinstance(self._problem, PoolError) and self.pool and self.pool.closed
        if ended_with_pool or isinstance(self._problem, RunInterrupted):
            return "stopped"
        return "failed" if self._problem else "done"

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._begun if self._seconds is None else self._seconds
        duration = f"{seconds:.1f} s" if seconds < 60 else duration_text(int(seconds))
        ranks = f" on {rank_words(self.ranks)}" if self.ranks else ""
        hint = "" if self.done() or self.stop.sent else f"; Out[{self.number}].cancel() stops it"
        return (
            f"<cell {self.number}{ranks}: {self.status} "
            f"{'after' if self.done() else 'for'} {duration}{hint}>"
        )

    # -- display -----------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """State of the cell, with the reports of its ranks."""
        return SEPARATOR.join(filter(None, [repr(self), self.view.words]))

    def _ipython_display_(self) -> None:
        """Show the text in a display that is updated on changes, with buttons if enabled."""
        if not in_notebook():
            print(repr(self))
            return
        actions = Actions(self.cancel, self._positions, self._picture)
        self._line = self.view.line = LiveLine(actions if self._buttons and is_watched() else None)
        self._line.show_text(repr(self))
        if self.done():
            self._refresh()
        else:  # importing widgets takes a while, so the thread does that too
            threading.Thread(
                target=self._refresh_until_done, name="skymagic-tick", daemon=True
            ).start()

    def _positions(self) -> str:
        if self.pool is None or not self.stop.run:
            return f"it has not begun: {self!r}"
        return inspection.stacks(self.pool, self.ranks)

    def _picture(self) -> str:
        return "" if self.pool is None else self.pool.picture()

    def _refresh_until_done(self) -> None:
        """Keep the line up to date: waiting or running, elapsed time, and reports of its ranks."""
        while not self.done():
            self._refresh()
            self._thread.join(TICK)

    def _refresh(self) -> None:
        if self._line is not None:
            with contextlib.suppress(Exception), self._drawing:  # the notebook may be gone
                draw = self._line.end if self.done() else self._line.draw
                self._context.copy().run(draw, self.text)
