"""joblib on a pool: inside, ``joblib.Parallel`` and what builds on it (scikit-learn) run their tasks on the ranks.

ipyparallel has a backend of its own, which sends tasks through the controller as pickles that know nothing of the
notebook's functions, and cannot stop them. This one makes each batch of tasks a call like any other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from skymagic.jobs.task import Task
from skymagic.jobs.workers import RankWorkers
from skymagic.plugins import _joblib
from skymagic.pool import Pool

NAME = "skymagic"
_open: list[Pool] = []
"""Pools whose plugin is active; the one that came last has the tasks."""
_lock = threading.Lock()
_unregister = contextlib.ExitStack()


@contextlib.contextmanager
def on_ranks(pool: Pool) -> Iterator[None]:
    """Inside, joblib's tasks run on this pool's ranks, unless code names another backend or one job.

    Pools may be opened and closed in any order: the one that was opened last has the tasks. After the last one joblib is
    as it was.
    """
    with _lock:
        if not _open:
            _register()
        _open.append(pool)
    try:
        yield
    finally:
        with _lock:
            _open.remove(pool)
            if not _open:
                _unregister.close()


_joblib.backend.append(on_ranks)


def _register() -> None:
    import joblib
    from joblib import parallel

    joblib.register_parallel_backend(NAME, backend_class())
    _unregister.callback(parallel.BACKENDS.pop, NAME, None)
    _unregister.callback(joblib.parallel_config(NAME, n_jobs=-1).unregister)


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

        workers: RankWorkers | None = None

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
            pool = _open[-1]
            self.workers = RankWorkers(pool, pool.scheduler.least_loaded(pool.world_size, width))
            return width

        def submit(self, func: Any, callback: Any = None) -> Future[Any]:
            assert self.workers is not None
            future = self.workers.submit(Task(func))
            if callback is not None:
                future.add_done_callback(callback)
            return future

        def retrieve_result_callback(self, out: Future[Any]) -> Any:
            return out.result()

        def terminate(self, *, stop: bool = False) -> None:
            workers, self.workers = self.workers, None
            if workers is not None:
                workers.close(stop=stop)

        def abort_everything(self, ensure_ready: bool = True) -> None:
            self.terminate(stop=True)
            if ensure_ready:
                self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    return PoolBackend
