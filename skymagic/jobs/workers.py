"""A worker pool over ranks: tasks run side by side, each on a rank that is free."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from skymagic.display.screen import NotebookScreen
from skymagic.errors import RunInterrupted
from skymagic.jobs.task import Task, run
from skymagic.pool import Pool
from skymagic.run.interrupt import StopSignal
from skymagic.run.run import Screen


class LockedScreen(NotebookScreen):
    """One screen for runs on several threads; `finish` is called when all of them are over."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self._lock = threading.Lock()

    def text(self, rank: int, name: str, text: str) -> None:
        with self._lock:
            super().text(rank, name, text)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        with self._lock:
            super().rich(rank, kind, content)

    def note(self, text: str) -> None:
        with self._lock:
            super().note(text)

    def status(self, text: str, *, last: bool = False) -> None:
        with self._lock:
            super().status(text, last=last)

    def refresh(self) -> None:
        with self._lock:
            super().refresh()


class RankWorkers:
    """A worker pool: as many threads as ranks; each task takes the next rank that is free.

    Args:
        ranks: one task at a time on each.
        screen: where output goes; the notebook unless said.

    Attributes:
        failures: what tasks raised, in the order of time.
    """

    def __init__(self, pool: Pool, ranks: Sequence[int], screen: Screen | None = None) -> None:
        self._pool, self._screen = pool, screen
        self._threads = ThreadPoolExecutor(len(ranks), thread_name_prefix="skymagic-worker")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank in ranks:
            self._free.put(rank)
        self._stops: set[StopSignal] = set()
        self._stopped = False
        self.failures: list[BaseException] = []

    def submit(self, task: Task) -> Future[Any]:
        """The task's value, later."""
        context = contextvars.copy_context()  # output of the thread belongs to this cell
        return self._threads.submit(context.run, self._run, task)

    def _run(self, task: Task) -> Any:
        rank, stop = self._free.get(), StopSignal()
        # before the look at `_stopped`: `stop` sets that first, so that one of the two sees the other
        self._stops.add(stop)
        try:
            if self._stopped:
                raise RunInterrupted("stopped before it began")
            try:
                return run(task, self._pool, (rank,), self._screen, stop)[0]
            except BaseException as problem:
                self.failures.append(problem)
                raise
        finally:
            self._stops.discard(stop)
            self._free.put(rank)

    def stop(self) -> None:
        """Interrupt what runs, and begin nothing more; the second time kills."""
        self._stopped = True
        for one in list(self._stops):
            one.send()

    def close(self, *, stop: bool) -> None:
        """No more tasks; with `stop` those that run are interrupted."""
        if stop:
            self.stop()
        self._threads.shutdown(wait=True, cancel_futures=stop)


def side_by_side(tasks: Sequence[Task], pool: Pool) -> list[Any]:
    """Each task on one rank, as many at a time as there are ranks; the values in the order of the tasks.

    Raises:
        RunError: of the first that failed; the others are stopped.
    """
    if not tasks:
        return []
    ranks = sorted(pool.scheduler.least_loaded(pool.world_size, min(len(tasks), pool.world_size)))
    screen = LockedScreen(ranks)
    workers = RankWorkers(pool, ranks, screen)
    under_way, stopped = True, False
    try:
        futures = [workers.submit(task) for task in tasks]
        while under_way:
            try:
                under_way = bool(wait(futures, None, ALL_COMPLETED if stopped else FIRST_EXCEPTION).not_done)
                if not under_way or stopped:
                    continue
            except KeyboardInterrupt:
                pass
            stopped = True
            workers.stop()
    finally:
        workers.close(stop=under_way)
    screen.finish()
    causes = [problem for problem in workers.failures if not isinstance(problem, RunInterrupted)]
    for problem in causes or workers.failures:
        raise problem
    if stopped:
        raise RunInterrupted("interrupted")
    return [future.result() for future in futures]
