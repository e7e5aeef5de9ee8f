"""An empty cell on 64 ranks of eight machines, 50 ms away."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure
from benchmarks.remote_pools import DELAY, empty_cells, lab


def figures() -> Iterator[Figure]:
    """One pool."""
    with lab(8, delay_ms=DELAY) as hosts:
        yield from empty_cells(hosts, 8, 140.0)
