"""Tasks: ``joblib.Parallel`` on the ranks against local processes and against what is ideal; ``>>`` of a function that does nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import joblib

import skymagic as sky
from benchmarks import cluster, peers
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed

ROUNDS = 3
TASKS = 400
TASK_SECONDS = 0.05
CALLS = 50
WARM = 5


@sky.function
def nothing() -> None:
    """The shortest call."""


def figures() -> Iterator[Figure]:
    """joblib's pool of processes and ipyparallel's engines are up while the ranks work, and idle."""
    with cluster.started(RANKS, "joblib") as pool:
        yield from parallel()
        yield from one_rank(pool)


def parallel() -> Iterator[Figure]:
    """Tasks that only wait, so that what is measured is how soon a rank has its next one."""
    ideal = TASKS * TASK_SECONDS / RANKS
    work = [joblib.delayed(time.sleep)(TASK_SECONDS) for _ in range(TASKS)]

    def share(backend: str) -> float:
        """Per cent of the ideal."""
        with joblib.parallel_config(backend, n_jobs=RANKS):
            return 100 * ideal / timed(lambda: joblib.Parallel()(work))

    say(f"joblib, {TASKS} tasks of {TASK_SECONDS:g} s, % of ideal: ours, loky")
    ours, theirs = alternate(ROUNDS, lambda: share("skymagic"), lambda: share("loky"))
    yield Figure(
        f"joblib, {TASKS} tasks of {TASK_SECONDS:g} s on {RANKS} ranks, share of ideal",
        median(ours), "%", median(theirs), "loky", limit=90.0, least=True,
    )  # fmt: skip


def one_rank(pool: object) -> Iterator[Figure]:
    """A call and its value, the next rank in turn."""
    with peers.ipyparallel(RANKS) as client:
        view = client.load_balanced_view()
        say(">> of nothing: ours, apply_sync")

        def block(call: object) -> float:
            return median([timed(call) for _ in range(CALLS // 5)])  # type: ignore[arg-type]

        sides = (lambda: nothing() >> pool, lambda: view.apply_sync(nothing.local))
        for side in sides:
            for _ in range(WARM):
                side()
        ours, theirs = alternate(5, *(lambda side=side: block(side) for side in sides))
    yield Figure(
        ">> of a function that does nothing", 1000 * median(ours), "ms", 1000 * median(theirs), "apply_sync", limit=12.0
    )  # fmt: skip
