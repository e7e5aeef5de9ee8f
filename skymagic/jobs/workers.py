"""A worker pool over ranks: tasks run side by side, each on a free rank; and joblib's backend, which makes each batch a task here.

ipyparallel has a backend for joblib, which sends tasks through the controller as pickles that know nothing of the notebook's functions, and
cannot stop them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

from skymagic.display.screen import NotebookScreen, Screen
from skymagic.errors import RunInterrupted
from skymagic.jobs.task import Task, run
from skymagic.plugins import _joblib
from skymagic.pool import Pool
from skymagic.run.interrupt import StopSignal


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


class Results(Iterator[Any]):
    """Values of tasks that run side by side, each on one rank, as many at a time as there are ranks.

    They begin at once. The first that fails stops the others, and its error is raised by the next ``next``.

    Args:
        ordered: values come in the order of the tasks, else in that in which the tasks end.
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
        """The next task that has finished; None where one has failed."""
        while True:
            candidates = self._pending[:1] if self._ordered else self._pending
            done = next((future for future in candidates if future.done()), None)
            if (
                self._workers.failures
            ):  # looked at after the futures: a task fails before its future does
                return None
            if done is not None:
                return done
            wait([future for future in self._pending if not future.done()], None, FIRST_COMPLETED)

    def _fail(self) -> NoReturn:
        """Stop what runs, and raise what failed first."""
        self.close()
        causes = [
            problem for problem in self._workers.failures if not isinstance(problem, RunInterrupted)
        ]
        for problem in () if self._stopped and not causes else causes or self._workers.failures:
            raise problem
        raise RunInterrupted("interrupted")

    def close(self) -> None:
        """Stop what runs, begin nothing more, and wait for the ranks; a second interrupt kills. Twice is safe."""
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


def side_by_side(tasks: Sequence[Task], pool: Pool) -> list[Any]:
    """Each task on one rank, as many at a time as there are ranks; the values in the order of the tasks. Raises RunError."""
    return list(Results(tasks, pool))


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
            # where it is told 1, joblib runs the tasks in the notebook
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
