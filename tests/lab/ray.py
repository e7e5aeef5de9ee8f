"""A real Ray cluster on this machine, a head without CPUs and nodes, by Ray's own `cluster_utils`, in a process of its own.

::

    with lent() as ray:
        ray.address                          # for --address
        ray("groups"), ray("actors")         # what there is in it
        ray("lose", 1)                       # the node of a pool's second rank leaves, with all that runs there

It starts in 10 to 60 seconds and takes about 1 GB: all tests on Ray borrow one (`lent`), in one process (`tests.conftest.place_of`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = "SKYMAGIC_GUARD"
RUN = "SKYMAGIC_TEST_RUN"
"""As `tests.conftest.MARK`, which this file, a program of its own, does not import."""
DEADLINE = 60.0
SETTINGS = {
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
"""Ray's own: a busy machine may take its time, a node or a head that is gone is known as such soon, and no process starts without need. The last
one is gRPC's, without which Ray Client's server loses some clients (ray-project/ray#63202)."""


class Cluster:
    """A cluster that runs; called with the name of what is asked of it (`Commands`)."""

    def __init__(self, count: int, client: bool = False) -> None:
        # nodes of clusters have no Jupyter: this part of it takes 1.2 s of each process of Ray's, of which each node has some
        self._without = tempfile.TemporaryDirectory()
        Path(self._without.name, "rfc3987_syntax.py").write_text("raise ImportError\n")
        # -P: this file's folder would be the first place where Python looks for `ray`
        self._program = subprocess.Popen(
            [sys.executable, "-P", __file__, str(count), "client" * client], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **SETTINGS, "PYTHONPATH": self._without.name}, text=True, start_new_session=True,
        )  # fmt: skip
        self.address = str(self._answer())

    def __call__(self, name: str, *arguments: object) -> Any:
        """What it answers."""
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._program.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, "the process of the Ray cluster has ended"
        return json.loads(line)

    def left(self) -> list[str]:
        """What is left of pools, once there is nothing or the time is over: actors, groups, and processes on nodes."""
        deadline = time.monotonic() + DEADLINE
        while (
            found := [*self("actors"), *self("groups"), *processes()]
        ) and time.monotonic() < deadline:
            time.sleep(0.2)  # Ray tells of nothing by itself
        return found

    def close(self) -> None:
        """End it."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        try:
            self._program.wait(DEADLINE)
        finally:
            with contextlib.suppress(
                ProcessLookupError
            ):  # also what a head that did not start has left
                os.killpg(self._program.pid, signal.SIGKILL)
            self._program.wait()
            assert self._program.stdout is not None
            self._program.stdout.close()
            self._without.cleanup()


def processes() -> list[str]:
    """What runs on nodes of pools, by the mark in its environment."""
    import psutil

    found = []
    for one in psutil.process_iter():
        try:
            environ = one.environ()
            # other processes that share the tests may have a cluster as well
            ours = environ.get(RUN, os.environ.get(RUN, "")).startswith(os.environ.get(RUN, ""))
            if MARK in environ and ours:
                found.append(" ".join(one.cmdline()))
        except psutil.Error:
            continue
    return found


_lent: list[Cluster] = []
"""The cluster that goes from test to test of this process, once there is one."""


@contextmanager
def lent() -> Iterator[Cluster]:
    """A cluster of two nodes of 4 CPUs each, the first with 2 GPUs of the kind A100 that nobody can use, and Ray Client's server.

    It stays for the next borrower, until `end_lent`; at the end of each loan nothing of any pool is left.
    """
    try:
        if not _lent:
            _lent.append(Cluster(2, client=True))
        while _lent[0]("count") < 2:  # a borrower has lost one
            _lent[0]("add")
        yield _lent[0]
        assert _lent[0].left() == []
    except BaseException:
        end_lent()
        raise


def end_lent() -> None:
    """End the cluster that is lent. Safe to call twice."""
    while _lent:
        _lent.pop().close()


@contextmanager
def cluster() -> Iterator[Cluster]:
    """The same for a program that runs no tests: the cluster ends with the block."""
    try:
        with lent() as made:
            yield made
    finally:
        end_lent()


# ------------------------------------------------------------------------------------ in the cluster's process


class Commands:
    """What is asked of a cluster."""

    def __init__(self, count: int, client: bool) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        with socket.create_server(("", 0)) as free:
            self._client_port = free.getsockname()[1]
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
        head |= {"ray_client_server_port": self._client_port} if client else {}
        self.cluster = again(lambda: RayCluster(True, head_node_args=head))
        self._with_gpus = ""
        for _ in range(count):
            self.add()

    def add(self) -> str:
        """One more node, with GPUs if no other has some: its Ray id."""
        if not any(one.node_id == self._with_gpus for one in self.cluster.worker_nodes):
            self._with_gpus = self._add(2)
            return self._with_gpus
        return self._add(0)

    def _add(self, gpus: int) -> str:
        kind = {"accelerator_type:A100": 1} if gpus else {}
        return str(
            again(lambda: self.cluster.add_node(num_cpus=4, num_gpus=gpus, resources=kind)).node_id
        )

    def actors(self) -> list[str]:
        """Names of pools' actors that are not dead; Ray Data and Train have some of their own."""
        named = self._ray().util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in named if each["namespace"] == "skymagic"]

    def groups(self) -> list[str]:
        """Names of pools' placement groups that are not removed."""
        rows = self._ray().util.placement_group_table().values()
        return [
            each["name"]
            for each in rows
            if each["state"] != "REMOVED" and each["name"].startswith("skymagic-")
        ]

    def count(self) -> int:
        """How many nodes there are, besides the head."""
        return len(self.cluster.worker_nodes)

    def lose(self, index: int) -> str:
        """Kill the node that holds a pool's node of this number, and with it what runs there: its Ray id; "" where no pool has nodes."""
        rows = self._ray().util.placement_group_table().values()
        given = [
            each["bundles_to_node_id"].get(index) for each in rows if each["state"] != "REMOVED"
        ]
        for node in [one for one in self.cluster.worker_nodes if one.node_id in given]:
            self.cluster.remove_node(node, allow_graceful=False)
            return str(node.node_id)
        return ""

    def client(self) -> str:
        """The address for Ray Client."""
        return f"ray://{self.cluster.address.rpartition(':')[0]}:{self._client_port}"

    def behead(self) -> None:
        """Kill all of the head's processes; this process has not been connected to it, or Ray would end it too."""
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

    def version(self, text: str) -> str:
        """What the cluster says of its Ray's version from now on; what it said."""
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        self._ray()
        key, namespace = b"CLUSTER_METADATA", b"cluster"
        told = json.loads(_internal_kv_get(key, namespace=namespace))
        _internal_kv_put(
            key,
            json.dumps({**told, "ray_version": text}).encode(),
            overwrite=True,
            namespace=namespace,
        )
        return str(told["ray_version"])

    def _ray(self) -> Any:
        import ray

        if not ray.is_initialized():
            ray.init(self.cluster.address, log_to_driver=False)
        return ray


def again(start: Any) -> Any:
    """A start that a busy machine may make too slow for Ray: a raylet gives up after 15 s without its agents."""
    for _ in range(4):
        try:
            return start()
        except Exception as problem:
            print(problem, file=sys.stderr)
    return start()


def main(count: int, client: bool) -> None:
    """Start a cluster, and answer a line of JSON for each that comes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    commands = Commands(count, client)
    print(json.dumps(commands.cluster.address), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), file=answers, flush=True)
    import ray

    ray.shutdown()
    commands.cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), client=sys.argv[2] != "")
