"""Run jobs concurrently, each on a thread, and collect their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def start_all(
    jobs: Sequence[Callable[[], T]], *, name: str = "skymagic-job", daemon: bool = True
) -> list[Future[T]]:
    """Start all jobs at once, each on a thread.

    Args:
        daemon: True if the process may end before the jobs do.

    Returns:
        A future for each job, in order.
    """

    def run(job: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(job())
        # Whatever the job raised belongs to whoever asks for its result.
        except BaseException as problem:
            future.set_exception(problem)

    # Not a ThreadPoolExecutor: Python waits for its threads at exit, even for one that hangs.
    futures: list[Future[T]] = [Future() for _ in jobs]
    for job, future in zip(jobs, futures, strict=True):
        threading.Thread(target=run, args=(job, future), name=name, daemon=daemon).start()
    return futures


def run_all(
    jobs: Sequence[Callable[[], T]], *, timeout: float | None = None, name: str = "skymagic-job"
) -> list[T | BaseException]:
    """Run all jobs at once and wait for them.

    An interrupt of the caller ends the wait, not the jobs.

    Args:
        timeout: seconds to wait for all of them; a job that takes longer counts as failed, and
            keeps running.

    Returns:
        The result of each job, or the exception that it raised, in the order of the jobs.
    """
    futures = start_all(jobs, name=name)
    wait(futures, timeout)
    # A single error for all jobs that are still running.
    late = TimeoutError(f"no end within {timeout} s")
    return [
        (future.exception() or future.result()) if future.done() else late for future in futures
    ]


def failures(outcomes: Iterable[object]) -> list[BaseException]:
    """Return the exceptions among the results of `run_all`."""
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
