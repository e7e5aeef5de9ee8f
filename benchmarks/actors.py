"""Ray beside a pool on the same machine: 4 workers ready, a call on all of them, a new array for each, and a worker that raises."""

from __future__ import annotations

import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import skymagic as sky
from benchmarks import cluster, failures, peers
from benchmarks.figures import RANKS, Figure, alternate, median, say, timed
from skymagic.errors import RankError
from skymagic.pool import Pool

STARTS = 3
CALLS = 50
ARRAYS = 5
MEGABYTES = 100
FAILURES = 10
RAYS_FAILURES = 3
"""Fewer: each takes Ray as long as a start of four processes with torch."""
TRIES = 4
"""On a busy machine some of Ray's starts come to no end within its own limits; those are not counted."""
LIMIT = 240.0
"""Seconds that a start may take."""

SETTINGS = {"RAY_worker_register_timeout_seconds": "180", "RAY_raylet_start_wait_time_s": "120"}
"""Ray's own limits for a start, which a busy machine goes over."""
REDUCE = """\
import torch, torch.distributed as dist
total = torch.full((1,), dist.get_rank() + 1.0); dist.all_reduce(total)
"""
OURS = f"""\
import time
begun = time.perf_counter()
from benchmarks import cluster
pool = cluster.start({RANKS}, "torch")
cluster.run(pool, {REDUCE!r})
print("seconds", time.perf_counter() - begun)
pool.close()
"""
THEIRS = """\
import time
from benchmarks import actors
begun = time.perf_counter()
with actors.started(tries=1):
    print("seconds", time.perf_counter() - begun)
"""
"""Each from the import to the end of a first all_reduce."""


@sky.function
def nothing() -> None:
    """The shortest call."""


@sky.function
def first(array: Any) -> Any:
    """A call that needs an array."""
    return array[0]


class Worker:
    """A rank as a Ray actor: it joins a process group, as Ray Train's workers do, and runs text and functions."""

    def __init__(self, rank: int, store: str) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)

    def run(self, source: str) -> None:
        """Run the text of a cell."""
        exec(source, {})

    def nothing(self) -> None:
        """The shortest call."""

    def first(self, array: Any) -> Any:
        """A call that needs an array."""
        return array[0]


class Actors:
    """Ray on this machine: an actor for each rank, and a process group of torch's over them."""

    def __init__(self, ray: Any, folder: str) -> None:
        self.ray = ray
        self._stores = (f"{folder}/{number}" for number in itertools.count())
        """Files in which a group's members find each other: a new one for each group."""
        self._start()

    def _start(self) -> None:
        actor, store = self.ray.remote(num_cpus=1)(Worker), next(self._stores)
        self.workers = [actor.remote(rank, store) for rank in range(RANKS)]
        self.run(REDUCE)

    def run(self, source: str) -> None:
        """Run a text on all of them. Raises what one raises."""
        self.call("run", source)

    def call(self, method: str, *arguments: object) -> Any:
        """The values of a method, by rank."""
        return self.ray.get(
            [getattr(worker, method).remote(*arguments) for worker in self.workers], timeout=LIMIT
        )

    def restart(self) -> None:
        """New actors for those that wait for the one that raised; they have reduced at the end."""
        for worker in self.workers:
            self.ray.kill(worker)
        self._start()


@contextmanager
def started(tries: int = TRIES) -> Iterator[Actors]:
    """Ray with as many CPUs as there are ranks, without its dashboard."""
    os.environ |= SETTINGS
    import ray

    start = partial(
        ray.init,
        "local",
        num_cpus=RANKS,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    for _ in range(tries):
        if (problem := cluster.problem_of(start)) is None:
            break
        say(f"  Ray did not start: {problem}")
        ray.shutdown()
    else:
        raise RuntimeError("Ray does not start here")
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield Actors(ray, folder)
    finally:
        ray.shutdown()


def figures() -> Iterator[Figure]:
    """Starts in fresh processes, then one pool and one set of actors that are up throughout, and measured in turn."""
    say(f"{RANKS} ranks and a first all_reduce: ours, Ray's actors")
    ours, theirs = alternate(STARTS, lambda: seconds(OURS), lambda: seconds(THEIRS))
    yield Figure(
        "pool with torch, first all_reduce done", median(ours), peer=median(theirs), who="Ray"
    )
    with cluster.started(RANKS, "torch") as pool, started() as actors:
        yield from of_calls(pool, actors)
        yield from of_failures(pool, actors)


def seconds(script: str) -> float:
    """What a script measures in a fresh process."""
    for _ in range(TRIES - 1):
        ran = peers.python(script, limit=LIMIT)
        if ran.status == 0:
            return ran.number("seconds")
    return peers.python(script, limit=LIMIT).number("seconds")


def of_calls(pool: Pool, actors: Actors) -> Iterator[Figure]:
    """A call that does nothing on all ranks, and one with an array that nobody has seen."""
    say("a call of nothing on all: ours, Ray's actors")

    def block(one: Any) -> float:
        return 1000 * median([timed(one) for _ in range(CALLS // 5)])

    ours, theirs = alternate(
        5, lambda: block(lambda: nothing() @ pool), lambda: block(lambda: actors.call("nothing"))
    )
    yield Figure(
        f"a function that does nothing, on {RANKS} ranks", median(ours), "ms", median(theirs), "Ray"
    )

    say(f"a new array of {MEGABYTES} MB: ours, Ray's actors")

    def send(one: Any) -> float:
        array = np.random.default_rng().random(MEGABYTES * 250_000, dtype="f4")
        return timed(lambda: one(array))

    ours, theirs = alternate(
        ARRAYS,
        lambda: send(lambda array: first(array) @ pool),
        lambda: send(lambda array: actors.call("first", actors.ray.put(array))),
    )
    yield Figure(
        f"a new array of {MEGABYTES} MB, on {RANKS} ranks", median(ours), "s", median(theirs), "Ray"
    )


def of_failures(pool: Pool, actors: Actors) -> Iterator[Figure]:
    """A rank raises while the others wait in a collective. Ray's other actors stay there: new ones are made."""
    what = f"rank {failures.VICTIM} raises"
    try:
        say(f"{what}: ours")
        ours = failures.rounds(
            pool, FAILURES, failures.stamped(failures.RAISE), RankError, dies=False
        )
        say(f"{what}: Ray's actors")
        ended, after = [], []
        for _ in range(RAYS_FAILURES):
            problem = cluster.problem_of(lambda: actors.run(failures.RAISE))
            error_at = time.time()
            planted = "planted" in str(problem)
            ended.append(error_at - failures.stamp() if planted else math.inf)
            actors.restart()
            after.append(time.time() - error_at)
            say(f"  error after {ended[-1]:.3f} s, next all_reduce {after[-1]:.2f} s")
    finally:
        failures.STAMP.unlink(missing_ok=True)
    yield Figure(f"{what}: to the error, median", median(ours.ended), "s", median(ended), "Ray")
    yield Figure(f"{what}: next all_reduce, median", median(ours.after), "s", median(after), "Ray")
