"""A cell that goes on beside the notebook (``--noblock``): its handle, which waits for it, stops it, and says how it is."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from skymagic.cluster import telemetry
from skymagic.display.controls import Actions
from skymagic.display.live import in_notebook, watched
from skymagic.display.run_line import SEPARATOR, BesideView, LiveLine
from skymagic.errors import PoolError, RequestError, RunInterrupted
from skymagic.jobs import inspection
from skymagic.plan.units import duration_text, rank_words
from skymagic.pool import Pool
from skymagic.pool.status import State
from skymagic.run.interrupt import StopSignal
from skymagic.run.metrics import table

TICK = 1.0
"""Seconds between two texts of a cell that goes on."""


class RunHandle:
    """The handle of a cell that goes on beside the notebook: what ``%%sky_broadcast -a`` gives. ``await run`` is its result.

    Args:
        call: what is to be done, on a thread of its own; it is given this handle, to say on which ranks.
        number: of the notebook's cell.
        buttons: whether its line has some.

    Attributes:
        stop: ends the run, once it has been given to it.
        pool: where it runs; None until that is known.
        ranks: those that take part, as soon as they are known.
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
        """How long it took, when it has ended."""
        self._ended = Future[None]()
        self._ended.set_running_or_notify_cancel()  # so that whoever cancels a wait does not cancel the run
        self.taken = threading.Event()
        """Set once the run has all that it needs of the notebook's variables, which may change then; or it waits for others, or has ended."""
        self.view = BesideView()
        """What its ranks report; the run draws it."""
        self._line: LiveLine | None = None
        """What is shown of it, in a notebook."""
        self._drawing = threading.Lock()
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
        self.taken.set()
        self._seconds = time.monotonic() - self._begun  # before waiters wake, who may print it
        self._ended.set_result(None)
        self._refresh()

    def wait_taken(self) -> None:
        """Wait until the notebook's variables may change; an interrupt stops the run."""
        try:
            while not self.taken.wait(
                TICK
            ):  # an interrupt that comes just before a wait does not end it
                pass
        except KeyboardInterrupt:
            self.cancel()
            raise

    @property
    def given(self) -> dict[str, Any]:
        """What a run is given of it: the signal that stops it, and what shows how it is."""
        return {"stop": self.stop, "view": self.view}

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, however it ends, `timeout` seconds at most; whether it has ended."""
        self._thread.join(timeout)
        return self.done()

    def cancel(self) -> bool:
        """Stop it, as the stop button does: once interrupts its ranks, twice kills what still runs. False if it has ended."""
        if self.done():
            return False
        self.stop.send()
        self._refresh()
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it, and return its values by rank; raises what the cell raised. Raises TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"the cell is still running after {timeout} s")
        if self._problem is not None:
            raise self._problem
        return None if self._value is None else self._value.value

    def __await__(self) -> Generator[Any, None, Any]:
        """The run's result, without holding up the event loop; cancelling the wait leaves the run as it is."""
        yield from asyncio.wrap_future(self._ended)
        return self.result()

    def output(self, rank: int | None = None) -> str:
        """What a rank has written so far, complete, whether it was shown or not; of the first of its ranks unless said.

        Raises:
            RequestError: the rank takes no part.
            PoolError: the pool has ended (%sky_logs has the last lines), its node does not answer, or its log is gone.
        """
        rank = rank if rank is not None else min(self.ranks, default=0)
        if self.ranks and rank not in self.ranks:
            raise RequestError(
                f"rank {rank} does not take part in it: {rank_words(self.ranks)} {'do' if len(self.ranks) > 1 else 'does'}"
            )
        if self.pool is None or not self.stop.run:
            return ""
        if self.pool.state is State.STOPPED:
            raise self.pool.missing()
        text = telemetry.of_run(self.pool.agents, rank, self.stop.run)
        if text is None and not self.done():  # the rank has not begun
            return ""
        if text is None:
            raise PoolError(
                f"no output of rank {rank} in cell {self.number} is left: its node was restarted, or had many runs since"
            )
        return text

    @property
    def metrics(self) -> Any:
        """What its ranks have reported with ``sky.report``, while it goes on too: a table as ``pool.metrics``, of this cell alone.

        ``run.metrics.loss.unstack().plot()`` draws a line for each rank.
        """
        return table([] if self.stop.metrics is None else [self.stop.metrics])

    @property
    def status(self) -> str:
        """``waiting`` for ranks that others use, ``running``, ``stopping``, ``stopped``, ``failed`` or ``done``."""
        if not self.done():
            return "stopping" if self.stop.sent else "running" if self.stop.attached else "waiting"
        with_pool = isinstance(self._problem, PoolError) and self.pool and self.pool.closed
        if with_pool or isinstance(self._problem, RunInterrupted):
            return "stopped"
        return "failed" if self._problem else "done"

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._begun if self._seconds is None else self._seconds
        took = f"{seconds:.1f} s" if seconds < 60 else duration_text(int(seconds))
        where = f" on {rank_words(self.ranks)}" if self.ranks else ""
        hint = "" if self.done() or self.stop.sent else f"; Out[{self.number}].cancel() stops it"
        return f"<cell {self.number}{where}: {self.status} {'after' if self.done() else 'for'} {took}{hint}>"

    # -- as the notebook shows it --------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """How it is, with what its ranks report."""
        return SEPARATOR.join(filter(None, [repr(self), self.view.words]))

    def _ipython_display_(self) -> None:
        """Show the text in a place that is written again when something has changed, with buttons where there are some."""
        if not in_notebook():
            print(repr(self))
            return
        actions = Actions(self.cancel, self._where, self._picture)
        self._line = self.view.line = LiveLine(actions if self._buttons and watched() else None)
        self._line.say(repr(self))
        if self.done():
            self._refresh()
        else:  # where widgets are imported too, which takes a while
            threading.Thread(target=self._tick, name="skymagic-tick", daemon=True).start()

    def _where(self) -> str:
        if self.pool is None or not self.stop.run:
            return f"it has not begun: {self!r}"
        return inspection.stacks(self.pool, self.ranks)

    def _picture(self) -> str:
        return "" if self.pool is None else self.pool.picture()

    def _tick(self) -> None:
        """Keep true what is shown: whether it waits or runs, for how long, and what its ranks report."""
        while not self.done():
            self._refresh()
            self._thread.join(TICK)

    def _refresh(self) -> None:
        if self._line is not None:
            with contextlib.suppress(Exception), self._drawing:  # the notebook has gone
                draw = self._line.end if self.done() else self._line.draw
                self._context.copy().run(draw, self.text)
