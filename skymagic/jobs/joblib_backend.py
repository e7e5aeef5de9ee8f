"""joblib on a pool: inside, ``joblib.Parallel`` and what builds on it (scikit-learn) run their tasks on the ranks.

ipyparallel has a backend of its own, which sends tasks through the controller as pickles that know nothing of the
notebook's functions, and cannot stop them. This one makes each batch of tasks a call like any other.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from skymagic.errors import RunInterrupted
from skymagic.jobs.task import Task, run
from skymagic.plugins import _joblib
from skymagic.pool import Pool
from skymagic.run.interrupt import StopSignal

NAME = "skymagic"
_open: list[Pool] = []
"""Pools whose plugin is active; the one that came last has the tasks."""
_changing = threading.Lock()
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def on_ranks(pool: Pool) -> Iterator[None]:
    """Inside, joblib's tasks run on this pool's ranks, unless code names another backend or one job.

    Pools may be opened and closed in any order: the one that was opened last has the tasks. After the last one joblib is
    as it was.
    """
    with _changing:
        if not _open:
            _register()
        _open.append(pool)
    try:
        yield
    finally:
        with _changing:
            _open.remove(pool)
            if not _open:
                _undo.close()


_joblib.backend.append(on_ranks)


def _register() -> None:
    import joblib
    from joblib import parallel

    joblib.register_parallel_backend(NAME, backend_class())
    _undo.callback(parallel.BACKENDS.pop, NAME, None)
    _undo.callback(joblib.parallel_config(NAME, n_jobs=-1).unregister)


class Crew:
    """Runs batches of one ``Parallel`` call, each on a rank that is free.

    Args:
        pool: whose ranks.
        width: how many at a time.
    """

    def __init__(self, pool: Pool, width: int) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="skymagic-joblib")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank in pool.turns.lightest(pool.world_size, width):
            self._free.put(rank)
        self._stops: set[StopSignal] = set()
        self._ended = False

    def submit(self, batch: Any) -> Future[Any]:
        """The batch's results, later."""
        context = contextvars.copy_context()  # output of the thread belongs to this cell
        return self._threads.submit(context.run, self._run, batch)

    def _run(self, batch: Any) -> Any:
        rank, stop = self._free.get(), StopSignal()
        self._stops.add(stop)
        try:
            if self._ended:
                raise RunInterrupted("stopped before it began")
            return run(Task(batch), self._pool, (rank,), stop=stop)[0]
        finally:
            self._stops.discard(stop)
            self._free.put(rank)

    def close(self, *, stop: bool) -> None:
        """No more batches; with `stop` those that run are interrupted."""
        if stop:
            self._ended = True
            for one in list(self._stops):
                one.send()
        self._threads.shutdown(wait=True, cancel_futures=stop)


@functools.cache
def backend_class() -> Any:
    """The backend for joblib's register."""
    from joblib._parallel_backends import AutoBatchingMixin, FallbackToBackend, LokyBackend
    from joblib.parallel import ParallelBackendBase

    class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
        """Sends batches to the ranks of the pool that was opened last; to local processes when it is gone.

        Tasks that use joblib themselves do so with threads of their rank, as joblib arranges it.
        """

        supports_retrieve_callback = True
        supports_sharedmem = False
        uses_threads = False

        crew: Crew | None = None

        def effective_n_jobs(self, n_jobs: int | None) -> int:
            if n_jobs == 0:
                raise ValueError("n_jobs == 0 in Parallel has no meaning")
            if n_jobs is None or not _open:
                return 1
            ranks = _open[-1].world_size
            return min(n_jobs, ranks) if n_jobs > 0 else max(ranks + 1 + n_jobs, 1)

        def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
            if not _open:
                raise FallbackToBackend(LokyBackend(nesting_level=self.nesting_level))
            self.parallel = parallel
            width = self.effective_n_jobs(n_jobs)
            self.crew = Crew(_open[-1], width)
            return width

        def submit(self, func: Any, callback: Any = None) -> Future[Any]:
            assert self.crew is not None
            future = self.crew.submit(func)
            if callback is not None:
                future.add_done_callback(callback)
            return future

        def retrieve_result_callback(self, out: Future[Any]) -> Any:
            return out.result()

        def terminate(self) -> None:
            self._close(stop=False)

        def abort_everything(self, ensure_ready: bool = True) -> None:
            self._close(stop=True)
            if ensure_ready:
                self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

        def _close(self, *, stop: bool) -> None:
            crew, self.crew = self.crew, None
            if crew is not None:
                crew.close(stop=stop)

    return PoolBackend
