"""The data plane's figures (see data_plane.py) for the one table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks import data_plane
from benchmarks.figures import Figure, say

MEGABYTES = 400


def figures() -> Iterator[Figure]:
    """Four forked ranks, without a pool; then ipyparallel's engines."""
    bench = data_plane.Bench()
    try:
        say("shipping")
        peak, private = data_plane.memory(bench, MEGABYTES)
        times = data_plane.ship(bench, MEGABYTES)
        first, unchanged = data_plane.small(bench)
        arrays = data_plane.parts(bench, lambda n: np.full(10, n / 2))
        import torch  # here, for it starts threads, and the ranks were forked before

        tensors = data_plane.parts(bench, lambda n: torch.full((10,), n / 2))
        pull = data_plane.gather(bench)
    finally:
        bench.close()
    say("ipyparallel's push and pull")
    push, theirs = data_plane.ipyparallel(MEGABYTES)
    what = f"{MEGABYTES} MB to {data_plane.RANKS} ranks"
    yield beside(f"{what}, first time", times["first"], times["floor"], "write + map", 1.4)
    yield beside(f"{what}, first time", times["first"], push, "ipyparallel", 0.2)
    yield beside(f"{what}, unchanged", times["unchanged"], times["first"], "first time", 0.25)
    yield beside(
        f"{what}, one element changed", times["changed"], times["first"], "first time", 1.3
    )
    yield beside("change detection", times["detection"], times["memcpy"], "memcpy", 80 / 30)
    yield beside("50 MB from each of 4 ranks", pull, theirs, "ipyparallel", 0.5)
    yield Figure("the notebook's peak memory while it ships / value", peak, "×", limit=1.1)
    yield Figure("a rank's private memory / value", private, "×", limit=0.2)
    yield Figure("1,000 small variables, more than an empty cell", first, "ms", limit=30.0)
    yield Figure("1,000 small variables, unchanged", unchanged, "ms", limit=5.0)
    for what, (unchanged, changed) in (("tensors", tensors), ("arrays", arrays)):
        yield Figure(
            f"10,000 small {what} in a dict, unchanged: processor", unchanged, "ms", limit=50.0
        )
        yield Figure(
            f"10,000 small {what} in a dict, one changed: processor", changed, "ms", limit=120.0
        )


def beside(name: str, ours: float, peer: float, who: str, limit: float) -> Figure:
    """A figure whose ratio is promised."""
    return Figure(name, ours, "s", peer, who, round(limit, 2), relative=True)
