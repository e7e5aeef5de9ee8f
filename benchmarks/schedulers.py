"""Pools on a real Ray cluster and on an imitation of Kubernetes' API, both on this machine, beside pools of the machine itself: their start with
torch, and an empty cell. As root, for pods are namespaces.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, alternate, median, say
from benchmarks.slurm import RANKS, ROUNDS, cells, environment, once_given, pool, started
from tests.lab import ray
from tests.lab.kube import kube


def figures() -> Iterator[Figure]:
    """One node of two ranks, against two ranks here."""
    with tempfile.TemporaryDirectory() as name:
        with environment({"XDG_STATE_HOME": name}), ray.cluster() as made:
            yield from compared("on a Ray cluster", "ray", address=made.address)
        with kube(Path(name) / "kube") as cluster, environment({**cluster.env, "XDG_STATE_HOME": name}):
            yield from compared("on Kubernetes' imitation", "kubernetes")


def compared(where: str, kind: str, **known: Any) -> Iterator[Figure]:
    """A provider's pools, and those of this machine."""
    say(f"{RANKS} ranks with torch, from the request to ready: {where}, here")
    waited: list[float] = []
    ours, local = alternate(ROUNDS, lambda: started(kind, waited, **known), lambda: started("local", []))
    yield Figure(f"start {where}, with torch", median(ours), "s", median(local), "local", 1.3, True)
    yield Figure("the same, once its node is given", once_given(ours, waited), "s", median(local), "local", 1.3, True)
    with closing(pool(kind, [], **known)) as other, closing(pool("local", [])) as own:
        ours, local = alternate(3, lambda: cells(other), lambda: cells(own))
        yield Figure(f"empty cell {where}", median(ours), "ms", median(local), "local", 1.5, True)
