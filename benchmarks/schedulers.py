"""Pools on a real Ray cluster and on an imitation of Kubernetes' API, both on this machine, beside pools of the machine itself: their start with
torch, and an empty cell. As root, for pods are namespaces.
"""

from __future__ import annotations

import subprocess
import sys
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
            say("a process that imports Ray, to the first answer of an actor that does nothing")
            own = median([floor(made.address) for _ in range(ROUNDS)])
            yield Figure("Ray's own part of a start", own)
            yield from compared("on a Ray cluster", "ray", own, address=made.address)
        with (
            kube(Path(name) / "kube") as cluster,
            environment({**cluster.env, "XDG_STATE_HOME": name}),
        ):
            yield from compared("on Kubernetes' imitation", "kubernetes")


FLOOR = """
import sys, time
begun = time.perf_counter()
sys.modules["rfc3987_syntax"] = None  # as in skymagic/providers/ray_driver.py
import ray
class Empty:
    def reply(self):
        return True
ray.init(sys.argv[1], log_to_driver=False)
ray.get(ray.remote(Empty).remote().reply.remote())
print(time.perf_counter() - begun)
"""


def floor(address: str) -> float:
    """Seconds for which Ray itself takes until something runs on a node."""
    done = subprocess.run(
        [sys.executable, "-c", FLOOR, address], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def compared(where: str, kind: str, alone: float = 0.0, **known: Any) -> Iterator[Figure]:
    """A provider's pools, and those of this machine.

    Args:
        alone: seconds that the scheduler takes by itself.
    """
    say(f"{RANKS} ranks with torch, from the request to ready: {where}, here")
    waited: list[float] = []
    ours, local = alternate(
        ROUNDS, lambda: started(kind, waited, **known), lambda: started("local", [])
    )
    yield Figure(f"start {where}, with torch", median(ours), "s", median(local), "local", 1.3, True)
    if alone:
        yield Figure(
            "the same, without its own part",
            median(ours) - alone,
            "s",
            median(local),
            "local",
            1.3,
            True,
        )
    yield Figure(
        "the same, once its node is given",
        once_given(ours, waited),
        "s",
        median(local),
        "local",
        1.3,
        True,
    )
    with closing(pool(kind, [], **known)) as other, closing(pool("local", [])) as own:
        ours, local = alternate(3, lambda: cells(other), lambda: cells(own))
        yield Figure(f"empty cell {where}", median(ours), "ms", median(local), "local", 1.5, True)
