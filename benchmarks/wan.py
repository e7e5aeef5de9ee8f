"""Two machines 50 ms away: an empty cell on four ranks, and how long ranks take to answer while one of them prints without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import cluster
from benchmarks.figures import Figure, median, say, timed
from benchmarks.remote_pools import DELAY, empty_cells, lab, start
from skymagic.plan.requests import Defaults
from skymagic.pool import Pool
from skymagic.wire import queries

RATE = 100.0
"""Mbit/s of each machine."""
ASKED = 60
FLOOD = """
import os
while not os.path.exists({gate!r}):
    print("x" * 200)
"""


def figures() -> Iterator[Figure]:
    """A pool for each."""
    with lab(2, delay_ms=DELAY) as hosts:
        yield from empty_cells(hosts, 2, 40.0)
    with lab(2, delay_ms=DELAY, rate_mbit=RATE) as hosts:
        pool = start(hosts, 2, defaults=Defaults(screen_limit=1 << 40))
        try:
            yield from answers_under_a_flood(pool)
        finally:
            pool.close()


def answers_under_a_flood(pool: Pool) -> Iterator[Figure]:
    """Questions to all ranks, first while they are idle."""
    say("answers of idle ranks, and of ranks of which one prints without end")
    idle = answers(pool)
    with TemporaryDirectory() as folder:
        gate = Path(folder) / "gate"
        cell = FLOOD.format(gate=str(gate))
        flood = threading.Thread(target=lambda: cluster.run(pool, cell))
        flood.start()
        time.sleep(1.0)  # the flood fills all buffers on the way
        try:
            flooded = answers(pool)
        finally:
            gate.touch()
            flood.join()
    yield Figure("answer of a rank, idle", median(idle), "ms")
    yield Figure("answer of a rank while one prints without end", median(flooded), "ms")
    yield Figure("  … slowest", max(flooded), "ms", limit=110.0)


def answers(pool: Pool) -> list[float]:
    """Milliseconds of each question to all ranks."""
    times, ranks = [], range(pool.plan.topology.world_size)
    for _ in range(ASKED):
        times.append(1000 * timed(lambda: pool.agents.ask(ranks, queries.LEAVING, 30.0)))
        time.sleep(0.05)
    return times
