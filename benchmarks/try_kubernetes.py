"""A first try on a real Kubernetes cluster (kind, k3s, any of 1.30 or newer): a pool of two pods, cells, a lost pod, and whether anything is left.

    python benchmarks/try_kubernetes.py                      in the current context and its namespace
    python benchmarks/try_kubernetes.py --context kind-lab --namespace me --image python:3.12-slim

It takes at most ten minutes, half of which it waits without a word, as proxies like to cut such connections. The cluster itself ends the pods
after a quarter of an hour. Besides the rights in docs/how-to/kubernetes.md it needs `delete` of pods, for the step that takes a pod away; that
page has a --pod-template for namespaces with the Pod Security Standard `restricted`. All of it has gone well on Kubernetes 1.36 on one
machine; what it says of other clusters is worth a report, above all where it fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import skymagic as sky
from skymagic.errors import SkyError
from skymagic.providers import kubernetes_api
from skymagic.providers.kubernetes_api import KubernetesCluster

MEGABYTES = 50


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--context", "--namespace", "--image", "--pod-template"):
        parser.add_argument(name)
    parser.add_argument("--silence", type=float, default=330.0, help="seconds without a word (330)")
    parser.add_argument(
        "--python", help=argparse.SUPPRESS
    )  # an interpreter of the pods, for an imitation of a cluster
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Do it, a step after the other; 0 where all went well, 1 where something failed or is left, 2 where it cannot be tried."""
    asked = arguments(argv)
    failed: list[str] = []
    try:
        cluster = KubernetesCluster(asked.context or "", asked.namespace or "")
        print(f"{cluster.label}, namespace {cluster.namespace}")
        if mistakes := cluster.mistakes(attaching=False):
            print("\n".join(mistakes))
            return 2
    except SkyError as problem:
        print(f"no cluster: {problem}")
        return 2
    options = {
        name: getattr(asked, name) for name in ("context", "namespace", "image", "pod_template")
    }
    pool = sky.Compute(
        provider=sky.Kubernetes(**options), nodes=2, image=sky.Image(python=asked.python), max_lifetime=900.0,
        name="try-kubernetes", console=True,
    )  # fmt: skip
    try:
        step("two pods", pool.start, failed)
        if not failed:
            step("a call on every rank", lambda: hello() @ pool, failed)
            step(
                f"{MEGABYTES} MB to every rank", lambda: size(bytes(MEGABYTES << 20)) @ pool, failed
            )
            step(
                "a call that says nothing for a while",
                lambda: silence(asked.silence) @ pool,
                failed,
            )
            step("a pod is deleted under a call", lambda: lose(cluster, pool), failed)
    finally:
        step("the end", pool.stop, failed)
        step("is anything left?", lambda: look(cluster), failed)
    print(f"failed: {', '.join(failed)}" if failed else "all of it went well")
    return 1 if failed else 0


def step(name: str, do: Callable[[], Any], failed: list[str]) -> None:
    """Do something and say how it went."""
    begun = time.monotonic()
    try:
        found = do()
    except Exception as problem:
        failed.append(name)
        print(f"✗ {name}: {type(problem).__name__}: {problem}")
    else:
        print(
            f"✓ {name}: {time.monotonic() - begun:.1f} s{f', {found}' if isinstance(found, (list, str)) else ''}"
        )


@sky.function
def hello() -> str:
    """Where a rank is, and how large its /dev/shm."""
    import shutil
    import socket

    return f"{sky.instance_info().rank}: {socket.gethostname()}, {shutil.disk_usage('/dev/shm').total >> 20} MB"


@sky.function
def size(data: bytes) -> int:
    """Bytes that came."""
    return len(data)


@sky.function
def silence(seconds: float) -> str:
    """Nothing, for so many seconds."""
    time.sleep(seconds)
    return "still here"


def lose(cluster: KubernetesCluster, pool: sky.Compute) -> str:
    """Delete the second pod while a call runs; what the call's error says. Raises RuntimeError where it says nothing of it."""
    (job,) = (
        one
        for one in cluster.jobs()
        if one["metadata"]["labels"][kubernetes_api.USER] == kubernetes_api.user()
    )
    pods, _ = cluster.pods(f"{kubernetes_api.JOB}={job['metadata']['labels'][kubernetes_api.JOB]}")
    core = kubernetes_api.official_client().client.CoreV1Api(cluster.client)
    core.delete_namespaced_pod(pods[1]["metadata"]["name"], cluster.namespace)
    try:
        silence(300.0) @ pool
    except SkyError as problem:
        if "pod" in str(problem):
            return str(problem).splitlines()[0]
        raise
    raise RuntimeError("the call came to its end without the pod")


def look(cluster: KubernetesCluster) -> None:
    """Raise RuntimeError where a pool of this user's is left."""
    left = [
        one["metadata"]["name"]
        for one in cluster.jobs()
        if one["metadata"]["labels"][kubernetes_api.USER] == kubernetes_api.user()
    ]
    if left:
        raise RuntimeError(
            f"left: {', '.join(left)}; kubectl delete job {' '.join(left)} ends them"
        )


if __name__ == "__main__":
    sys.exit(main())
