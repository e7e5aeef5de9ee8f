"""Fork and join: jobs that run at once, each on a thread, and what became of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_all(
    jobs: Sequence[Callable[[], T]], *, timeout: float = float("inf"), name: str = "skymagic-job"
) -> list[T | BaseException]:
    """Run all jobs at once and wait for them.

    An interrupt of the caller ends the wait, not the jobs: they run on daemon threads, which nobody waits for at exit.

    Args:
        timeout: seconds to wait for all of them; a job that takes longer counts as failed, and keeps running.

    Returns:
        In the order of the jobs: what each returned, or the exception that it raised.
    """
    outcomes: list[T | BaseException] = [TimeoutError(f"no end within {timeout:g} s") for _ in jobs]

    def run(index: int) -> None:
        try:
            outcomes[index] = jobs[index]()
        except BaseException as problem:
            outcomes[index] = problem

    threads = [threading.Thread(target=run, args=(index,), name=name, daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(None if timeout == float("inf") else max(0.0, end - time.monotonic()))
    return list(outcomes)


def failures(outcomes: Iterable[object]) -> list[BaseException]:
    """The exceptions among what `run_all` returned."""
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
