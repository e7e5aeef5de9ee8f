"""The process that is connected to a Ray cluster for a notebook, and the actors by which it holds a pool's nodes there; run as a file.

It is a process of its own because Ray ends the one that it is connected from when the cluster's head is gone, and because the notebook may use
Ray itself::

    notebook ──requests with sockets for their answers──▶ this process ──calls, and shells in pieces──▶ RayHolder: one per node, detached
                                                                                                         └──▶ guard ──▶ holder ──▶ daemons

A pool is a detached placement group and a detached actor in each of its bundles, made at once. With the group Ray ends the actors. They remove it
themselves when none of them is needed: all daemons have ended, or none has run and nobody has called for `FORGOTTEN` seconds.
Standard library and Ray only: nodes have nothing else, and Ray copies the classes of ``__main__``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Jupyter's environments have it for jsonschema, which Ray imports and which can do without: 1.2 of the 1.6 s for which Ray's import takes
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NAMESPACE = PREFIX = "skymagic"
FORGOTTEN = 30.0
"""Seconds after which a node that has not been used and that nobody calls, or a shell that nobody reads, is not needed."""
POLL, LOOK = 10.0, 2.0
"""Seconds for which a holder waits for output before it answers without any, and between its looks at whether it is needed."""
PIECE = 96_000
"""Bytes of one call: below 100 KB Ray passes values with the call itself, and others through object stores, where some take a second more."""
Answers = Iterator[dict[str, Any]]
WAITING: dict[str, Any] = {}
"""Job id → the group of a pool whose nodes are not there yet."""
RAYS_OWN = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "SPT_NOENV")
"""Variables that Ray sets for its workers, besides RAY_*."""
GUARD = r"""umask 077
marked() { grep -lF "SKYMAGIC_GUARD=$0" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
exec 4<&0 </dev/null >/dev/null 2>&1
(
    SKYMAGIC_GUARD=$0 /bin/sh -c "$1" 4<&- &
    cat <&4
    kill -TERM $(marked)
    n=0
    while [ -n "$(marked)" ] && [ $n -lt 50 ]; do n=$((n + 1)); sleep 0.2; done
    kill -KILL $(marked)
    rm -rf "$0"
) &
"""
"""What outlives an actor on its node, by a double fork, for Ray ends an actor's children but not theirs: it starts the holder, and when the
actor is gone, however it went, it ends all that carries its mark."""


# ------------------------------------------------------------------------------------ on the nodes


class RayHolder:
    """An actor on one node: starts what holds the pool's daemons there, and passes the streams of shells, in a thread for each call.

    Args:
        group: the pool's. names: of its holders.
        folder: of the holder. script: sh of the holder, which starts the daemons whose names come.
    """

    def __init__(self, group: Any, names: Sequence[str], folder: str, script: str) -> None:
        self._called = time.monotonic()
        self._folder, self._shells, self._asked = (
            folder,
            dict[str, subprocess.Popen[bytes]](),
            dict[str, float](),
        )
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") and key not in RAYS_OWN
        }
        # Ray used in a cell finds its own cluster
        self._env = {**kept, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        command = ["/bin/sh", "-c", GUARD, folder, script]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=self._env, start_new_session=True
        )
        self._guard.wait()
        while not Path(folder, "start").exists():
            time.sleep(0.01)
        threading.Thread(target=self._watch, args=(group, names), daemon=True).start()

    def about(self) -> dict[str, str]:
        """What the node is called, by its system and by Ray, and where Ray's nodes reach it: who calls needs it."""
        self._called = time.monotonic()
        number, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return {"host": socket.gethostname(), "ray": number, "address": address}

    def needed(self) -> bool:
        """Whether daemons run here, or may be started soon."""
        files = list(Path(self._folder).glob("*"))  # the FIFO, and one for each daemon
        return len(files) > 1 or bool(files) and time.monotonic() - self._called < FORGOTTEN

    def _watch(self, group: Any, names: Sequence[str]) -> None:
        """End shells that nobody reads any more, the pool once no node is needed, and this process once Ray's own on this node is gone."""
        raylet = os.getppid()
        while self.needed() or any(is_needed(name) for name in names):
            time.sleep(LOOK)
            if (
                os.getppid() != raylet
            ):  # without a head it ends, and may leave an actor whose threads wait
                os._exit(1)
            for key in [
                key for key, asked in self._asked.items() if time.monotonic() - asked > FORGOTTEN
            ]:
                self.close(key)
        remove_placement_group(group)  # upon which Ray ends this process

    def start(self, key: str, command: str) -> None:
        """Start a shell with a command line."""
        env, pipe = (
            {**self._env, "SKYMAGIC_HOLDER": self._folder, "SKYMAGIC_GUARD": self._folder},
            subprocess.PIPE,
        )
        self._asked[key] = time.monotonic()
        self._shells[key] = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd="/tmp", start_new_session=True
        )  # fmt: skip

    def write(self, key: str, data: bytes) -> bool:
        """Write to its standard input, b"" to end it; whether it took that."""
        try:
            stream = self._shells[key].stdin
            assert stream is not None
            stream.write(data)
            stream.flush()
            if not data:
                stream.close()
        except (KeyError, ValueError, OSError):  # it has ended
            return False
        return True

    def read(self, key: str) -> tuple[int, bytes] | None:
        """The next of a shell's output (1) or standard error (2), b"" at their ends, then its exit status (0); None for nothing in a while."""
        if (shell := self._shells.get(key)) is None:
            return 0, b"-1"
        self._asked[key] = time.monotonic()
        streams = {
            each: number
            for number, each in enumerate((shell.stdout, shell.stderr), 1)
            if each and not each.closed
        }
        if not streams:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return 0, str(max(-1, shell.wait(POLL))).encode()
            return None
        if not (ready := select.select(streams, [], [], POLL)[0]):
            return None
        if not (data := os.read(ready[-1].fileno(), PIECE)):
            ready[-1].close()
        return streams[ready[-1]], data

    def close(self, key: str) -> None:
        """End a shell with its process group; twice is safe."""
        self._asked.pop(key, None)
        if (shell := self._shells.pop(key, None)) is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(2.0)


def is_needed(name: str) -> bool:
    """Whether a node is, as its holder says; one that does not answer may be."""
    try:
        return bool(ray.get(ray.get_actor(name, NAMESPACE).needed.remote(), timeout=10))
    except (ActorUnavailableError, GetTimeoutError):
        return True
    except (RayActorError, ValueError):  # it is gone
        return False


def waits(
    group: Mapping[str, Any],
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[Mapping[str, Any]],
) -> str:
    """What a group waits for, with Ray's own word; pure.

    Args:
        group: its row of `placement_group_table`. nodes: those that are alive, as `ray.nodes` lists them.
    """
    able = sum(
        all(each["Resources"].get(key, 0) >= amount for key, amount in bundles[0].items())
        for each in nodes
    )
    wanted = ", ".join(
        f"{key} {amount:g}" if amount >= 1 else key for key, amount in bundles[0].items()
    )
    said = ", ".join(
        filter(None, (group.get("state"), group.get("stats", {}).get("scheduling_state")))
    )
    why = "which others use"
    if able < len(bundles):
        why = f"and {able} of the cluster's {len(nodes)} nodes are such: an autoscaler may add some, else stop it and ask for less"
    return f"{len(bundles)} × ({wanted}), {why} (Ray: {said})"


# ------------------------------------------------------------------------------------ beside the notebook


def serve(control: socket.socket) -> None:
    """Answer each request on a thread of its own, until the notebook closes its end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 3)
        if not data:
            return
        request, sockets = json.loads(data), [socket.socket(fileno=each) for each in descriptors]
        if (
            request["do"] == "place"
        ):  # before anything else is read: a later "end" must find what there is to end
            request["made"] = made(**request)
        threading.Thread(target=answer, args=(request, sockets), daemon=True).start()


def answer(request: dict[str, Any], sockets: Sequence[socket.socket]) -> None:
    """Carry a request out: a line of JSON for each answer."""
    named = {each.__name__: each for each in ANSWERS}
    with (
        contextlib.ExitStack() as closing,
        contextlib.suppress(OSError),
    ):  # nobody may wait for it any more
        for each in sockets:
            closing.enter_context(each)
        try:
            for line in named[request.pop("do")](sockets, **request):
                sockets[0].sendall(json.dumps(line).encode() + b"\n")
        except (
            Exception
        ) as problem:  # Ray's own asserts among them: who asked would take silence for an answer
            words = str(problem) if isinstance(problem, (RayError, ValueError)) else repr(problem)
            sockets[0].sendall(json.dumps({"error": words}).encode() + b"\n")


def nodes(_: object) -> Answers:
    """The resources of each of the cluster's nodes."""
    yield {"nodes": [each["Resources"] for each in alive_nodes()]}


def alive_nodes() -> list[dict[str, Any]]:
    """Nodes that are alive, as `ray.nodes` lists them."""
    return [each for each in ray.nodes() if each["Alive"]]


def made(
    do: str, job: str, bundles: Sequence[Mapping[str, float]], folder: str, script: str
) -> Any:
    """The holders of a new pool, or why there are none."""
    name = f"{PREFIX}-{job}"
    names = [f"{name}-{index}" for index in range(len(bundles))]
    try:
        WAITING[job] = group = placement_group(bundles, "STRICT_SPREAD", name, "detached")
        return [
            ray.remote(RayHolder).options(
                name=names[index], lifetime="detached", max_concurrency=100, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), memory=bundle.get("memory"),
                resources={key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU", "memory")},
            ).remote(group, names, *(text.replace("@NODE@", str(index)) for text in (folder, script)))
            for index, bundle in enumerate(bundles)
        ]  # fmt: skip
    except (RayError, ValueError) as problem:
        return problem


def place(
    _: object, job: str, bundles: Sequence[Mapping[str, float]], made: Any, **_more: str
) -> Answers:
    """What a pool waits for, until its nodes are there; then call them while this process is there."""
    if isinstance(made, Exception):
        raise made
    told, asked = "", [each.about.remote() for each in made]
    while len(ray.wait(asked, num_returns=len(asked), timeout=1.0)[0]) < len(asked):
        row = placement_group_table(WAITING[job])
        if row.get("state") != "CREATED" and (said := waits(row, bundles, alive_nodes())) != told:
            yield {"waits": (told := said)}
    yield {"nodes": ray.get(asked)}
    del WAITING[job]
    while True:
        time.sleep(FORGOTTEN / 4)
        ray.get([each.about.remote() for each in made])


def fate(_: object, job: str, index: int) -> Answers:
    """Why a node is gone; "" where it is not. For a while Ray may not know of a dead actor, nor that the head is gone: then it ends this process."""
    words, deadline = None, time.monotonic() + POLL
    while words is None:
        try:
            ray.get(holder_of(job, index).needed.remote(), timeout=POLL)
            words = ""
        except (ActorUnavailableError, GetTimeoutError):
            time.sleep(0.2)
            words = "" if time.monotonic() > deadline else None
        except RayActorError as problem:
            said = " ".join(str(problem).split())
            words = f"Ray says: {said[said.rfind('The actor ') :]}"
        except ValueError:
            words = (
                "Ray has ended what held it: the pool has ended, or the node has left the cluster"
            )
    yield {"fate": words}


@functools.cache
def holder_of(job: str, index: int) -> Any:
    """Raises ValueError where there is none. What is known here tells its fate, for Ray forgets the names of the dead."""
    return ray.get_actor(f"{PREFIX}-{job}-{index}", NAMESPACE)


def end(_: object, job: str) -> Answers:
    """Remove a pool; what is left of it after a while."""
    deadline = time.monotonic() + 30.0
    while (left := remove(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield {"left": left}


def remove(job: str) -> list[str]:
    """Remove a pool's group, and its holders, for Ray ends only those that run: what there was of them."""
    name = f"{PREFIX}-{job}"
    found = [each for each in everything() if each.startswith(name)]
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(name))
    for each in found:
        # AssertionError: Ray's nodes have forgotten the class, with the last of its actors
        with contextlib.suppress(ValueError, AssertionError):
            ray.kill(ray.get_actor(each, NAMESPACE))
    return found


def everything() -> dict[str, str]:
    """Names of actors and placement groups of pools, with the groups' states in Ray's words."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    named = {each["name"]: "PENDING" for each in actors if each["namespace"] == NAMESPACE}
    groups = placement_group_table().values()
    return named | {each["name"]: each["state"] for each in groups if each["state"] != "REMOVED"}


def pools(_: object) -> Answers:
    """Job ids of pools, with the states of their groups."""
    states = everything()
    named = (re.fullmatch(rf"{PREFIX}-(.+-[0-9a-f]{{8}})", name) for name in states)
    yield {"pools": [(match[1], states[match[0]]) for match in named if match]}


def pass_on(ends: Sequence[socket.socket], job: str, index: int, command: str) -> Answers:
    """A shell on a node with its streams, its standard error and its exit status, until it has ended or the notebook has closed them."""
    streams, errors, status = ends
    try:
        holder, key = holder_of(job, index), os.urandom(8).hex()
        ray.get(holder.start.remote(key, command))
        feeding = threading.Thread(target=feed, args=(holder, key, streams, status), daemon=True)
        feeding.start()
        try:
            which = -1
            while which:
                which, data = ray.get(holder.read.remote(key)) or (-1, b"")
                if data:
                    (status, streams, errors)[which].sendall(data)
                elif which > 0:
                    (status, streams, errors)[which].shutdown(socket.SHUT_WR)
        finally:
            with contextlib.suppress(OSError):
                status.shutdown(socket.SHUT_RDWR)
            feeding.join()
    except (RayError, ValueError) as problem:  # what comes of the shell is no place for it
        errors.sendall(f"Ray: {problem}".encode())
    yield from ()


def feed(holder: Any, key: str, streams: socket.socket, status: socket.socket) -> None:
    """What the notebook sends, as long as the shell takes it; closes the shell when the notebook closes its sockets."""
    heard = [streams, status]
    with contextlib.suppress(OSError, RayError):
        while status not in select.select(heard, [], [])[0]:
            data = streams.recv(PIECE)
            if not (ray.get(holder.write.remote(key, data)) and data):
                streams.shutdown(socket.SHUT_RD)  # upon which the notebook's writes fail
                heard = [status]
        ray.get(holder.close.remote(key))


ANSWERS: Sequence[Callable[..., Answers]] = (nodes, place, fate, end, pass_on, pools)


def connect(address: str) -> None:
    """Connect to Ray; once more where Ray Client's proxy has lost the process that it starts for a client (ray-project/ray#63202)."""
    settings = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address, **settings)
    except ConnectionAbortedError:  # after 40 s
        ray.init(address, **settings)


def main(descriptor: str, address: str) -> None:
    """Connect to Ray, tell the notebook, and serve it."""
    control = socket.socket(fileno=int(descriptor))
    try:
        connect(address)
    except Exception as problem:
        control.send(json.dumps({"error": str(problem)}).encode())
        return
    found = address if address.startswith("ray://") else ray.get_runtime_context().gcs_address
    control.send(json.dumps({"address": found}).encode())
    serve(control)
    for job in WAITING:  # the notebook was killed
        remove(job)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
