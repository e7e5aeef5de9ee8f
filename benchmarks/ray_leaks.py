"""Random histories of pools on a real Ray cluster (`benchmarks.leaks`): whatever goes wrong, no actor, placement group or process is left.

    HISTORIES=100 SEED=1 SECONDS=600 python benchmarks/ray_leaks.py

Besides what users do, a node is killed.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import leaks
from tests.lab.ray import cluster, processes


class RayLife(leaks.Life):
    """Histories of Ray's pools."""

    PROVIDER = "ray"
    EVENTS = (*leaks.Life.EVENTS, "lose_node", "lose_node")

    def lose_node(self) -> None:
        self.cluster("lose", 1)

    def recover(self) -> None:
        while self.cluster("count") < 2:
            self.cluster("add")

    def pools(self) -> list[str]:
        return list(self.cluster("groups"))

    def left(self) -> list[str]:
        return [*self.cluster("actors"), *self.cluster("groups"), *processes()]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(leaks.main(RayLife, lambda _: cluster(), lambda ray: {"RAY_ADDRESS": ray.address}))
