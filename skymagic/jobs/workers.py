"""Worker pool over ranks: parallel tasks, each on a free rank, and a joblib backend.

The backend makes each of joblib's batches a task here, so that tasks know the notebook's functions
and can be stopped.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

from skymagic.display.ipykernel6 import cell_context
from skymagic.display.screen import NotebookScreen, Screen
from skymagic.errors import RunInterrupted
from skymagic.jobs.task import Task, run
from skymagic.plugins import _joblib
from skymagic.pool import Pool
from skymagic.run.interrupt import StopSignal
from skymagic.wire.typed import JsonObject


class LockedScreen(NotebookScreen):
    """Screen shared by runs on several threads; call `finish` when all of them are over."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self._lock = threading.Lock()

    def text(self, rank: int, name: str, text: str) -> None:
        with self._lock:
            super().text(rank, name, text)

    def rich(self, rank: int, kind: str, content: JsonObject) -> None:
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
    """Worker pool with as many threads as ranks; each task takes the next free rank.

    Args:
        ranks: the ranks to use, each for one task at a time.
        screen: shows the output; the notebook by default.

    Attributes:
        failures: exceptions of tasks, the oldest first.
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
        """Queue a task and return the future of its value."""
        context = cell_context()  # the thread's output belongs to this cell
        return self._threads.submit(context.run, self._run, task)

    def _run(self, task: Task) -> Any:
        rank, stop = self._free.get(), StopSignal()
        # Add it before checking `_stopped`, which `stop` sets first: so at least one of the two
        # sees the other.
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
        """Interrupt the running tasks and start no more; the second call kills."""
        self._stopped = True
        for signal in list(self._stops):
            signal.send()

    def close(self, *, stop: bool) -> None:
        """Accept no more tasks; with `stop`, interrupt the running ones."""
        if stop:
            self.stop()
        self._threads.shutdown(wait=True, cancel_futures=stop)


class Results(Iterator[Any]):
    """Values of tasks that run in parallel, each on one rank, on all ranks of the pool at most.

    They start at once. The first failure stops the others, and the next ``next`` raises it.

    Args:
        ordered: yield values in the order of the tasks; otherwise in the order of their ends.
    """

    def __init__(self, tasks: Sequence[Task], pool: Pool, *, ordered: bool = True) -> None:
        self._pending: list[Future[Any]] = []
        self._ordered, self._stopped = ordered, False
        if tasks:
            ranks = sorted(
                pool.scheduler.least_loaded(pool.world_size, min(len(tasks), pool.world_size))
            )
            self._screen = LockedScreen(ranks)
            self._workers = RankWorkers(pool, ranks, self._screen)
            self._pending = [self._workers.submit(task) for task in tasks]

    def __next__(self) -> Any:
        if not self._pending:
            raise StopIteration
        try:
            future = self._wait()
        except KeyboardInterrupt:
            future, self._stopped = None, True
        except BaseException:
            self.close()
            raise
        if future is None:
            self._fail()
        self._pending.remove(future)
        if not self._pending:
            self._end()
        return future.result()

    def _wait(self) -> Future[Any] | None:
        """Wait for the next finished task; return None if a task has failed."""
        while True:
            candidates = self._pending[:1] if self._ordered else self._pending
            done = next((future for future in candidates if future.done()), None)
            # check after the futures: a failure is recorded before its future is done
            if self._workers.failures:
                return None
            if done is not None:
                return done
            wait([future for future in self._pending if not future.done()], None, FIRST_COMPLETED)

    def _fail(self) -> NoReturn:
        """Stop the running tasks and raise the first failure."""
        self.close()
        causes = [
            problem for problem in self._workers.failures if not isinstance(problem, RunInterrupted)
        ]
        for problem in () if self._stopped and not causes else causes or self._workers.failures:
            raise problem
        raise RunInterrupted("interrupted")

    def close(self) -> None:
        """Stop the running tasks, start no more, and wait for the ranks.

        A second interrupt kills. Safe to call twice.
        """
        while any(not future.done() for future in self._pending):
            self._workers.stop()
            try:
                wait(self._pending)
            except KeyboardInterrupt:
                self._stopped = True
        if self._pending:
            self._pending = []
            self._end()

    def _end(self) -> None:
        self._workers.close(stop=False)
        self._screen.finish()

    def __del__(self) -> None:
        self.close()


def run_in_parallel(tasks: Sequence[Task], pool: Pool) -> list[Any]:
    """Run tasks in parallel, each on one rank, and return the values in task order.

    Raises RunError.
    """
    return list(Results(tasks, pool))


NAME = "skymagic"
_open: list[Pool] = []
"""Pools whose plugin is active; the last one executes the tasks."""
_lock = threading.Lock()
_unregister = contextlib.ExitStack()


@contextlib.contextmanager
def on_ranks(pool: Pool) -> Iterator[None]:
    """Run joblib's tasks on this pool's ranks inside the block.

    Code that names another backend or a single job is not affected. Pools may be opened and closed
    in any order; the one opened last executes the tasks. After the last one is closed, joblib is as
    it was before.
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
    """Return the class of the joblib backend."""
    from joblib._parallel_backends import AutoBatchingMixin, FallbackToBackend, LokyBackend
    from joblib.parallel import ParallelBackendBase

    class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
        """Sends batches to the ranks of the pool opened last, or to local processes without a pool.

        Tasks that use joblib themselves run on threads of their rank, as joblib arranges it.
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
            # with a width of 1, joblib would run the tasks in the notebook
            return 1 if n_jobs == 1 else max(width, 2)

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
