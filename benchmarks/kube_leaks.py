"""Random histories of pools on the imitation of Kubernetes (`benchmarks.leaks`): whatever goes wrong, no job, pod, Service or process is left.

    HISTORIES=100 SEED=1 SECONDS=600 python benchmarks/kube_leaks.py          as root: pods are namespaces

Besides what users do, a pod is evicted, loses its node or its memory, or is deleted with its job; connections of exec are cut, an answer of the
API server is lost, and the login expires until the history's end.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import leaks
from tests.lab.ending import cmdline
from tests.lab.kube import Kube, Pod, kube


class KubeLife(leaks.Life):
    """Histories of pools of pods."""

    PROVIDER = "kubernetes"
    EVENTS = (
        *leaks.Life.EVENTS, "evict", "lose_node", "run_out_of_memory", "delete_job", "cut", "lose_answer", "expire",
    )  # fmt: skip
    cluster: Kube

    def __init__(self, cluster: Kube, *known: Any) -> None:
        super().__init__(cluster, *known)
        self.token = cluster.token

    def evict(self) -> None:
        for pod in self.running():
            self.cluster.evict(pod.name)

    def lose_node(self) -> None:
        for pod in self.running():
            self.cluster.power_cut(pod.name)

    def run_out_of_memory(self) -> None:
        for pod in self.running():
            self.cluster.run_out_of_memory(pod.name)

    def delete_job(self) -> None:
        for name in self.cluster.jobs():
            self.cluster.delete_job(name)

    def cut(self) -> None:
        self.cluster.cut()

    def lose_answer(self) -> None:
        self.cluster.lost_answer = len(self.cluster.requests) + 1

    def expire(self) -> None:
        self.cluster.expire()

    def running(self) -> list[Pod]:
        """The second pod, if it runs."""
        return [pod for pod in self.cluster.made() if pod.index == 1 and pod.phase == "Running"]

    def recover(self) -> None:
        self.cluster.lost_answer = -1
        self.cluster.token = self.token

    def pools(self) -> list[str]:
        return self.cluster.jobs()

    def left(self) -> list[str]:
        return self.cluster.left() + [
            " ".join(cmdline(one))[:200] for one in self.cluster.processes()
        ]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(
            leaks.main(
                KubeLife, lambda place: kube(place / "kube", grace=5.0), lambda made: dict(made.env)
            )
        )
