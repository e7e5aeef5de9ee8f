"""The process connected to a Ray cluster, and the actors that hold a pool's nodes. Run as a file.

It is a separate process because Ray ends the process it is connected from when the cluster's head
is gone, and because the notebook may use Ray itself::

    notebook ──requests, with sockets for their answers──▶ this process
    this process ──calls, shells in pieces──▶ RayHolder: one per node, detached
    RayHolder ──▶ guard ──▶ holder ──▶ daemons

Every client of the cluster can call the actors. Each call therefore carries a *ticket*: proof that
the caller knows the pool's channel key, valid for this call only. A node receives the key in its
first session with the notebook, whose fingerprint it knows from the start (`RayHolder.introduce`).
Shells are separate sessions (`wire.sealed`), so everything passing through here and Ray is
encrypted.

A pool is a detached placement group and a detached actor in each of its bundles, created together.
When the group is removed, Ray ends the actors. The actors remove the group themselves when none of
them is needed: all daemons have ended, or none ever ran and no call arrived for `FORGOTTEN`
seconds.

Uses only the standard library and Ray: nodes have nothing else, and Ray copies the classes of
``__main__``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import logging
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Jupyter's environments have it for jsonschema, which Ray imports and which works without it:
# it takes 1.2 of the 1.6 s that importing Ray takes
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NAMESPACE = PREFIX = "skymagic"
# below our own logger, whose entries the debug log has: this file runs as `__main__`
logger = logging.getLogger(f"{PREFIX}.providers.{Path(__file__).stem}")

FORGOTTEN = 30.0
"""Idle time in seconds after which an unused node, or a shell that no client reads, is dropped."""
POLL, LOOK = 10.0, 2.0
"""Waits of a holder in seconds: for output before it answers without any, and between its checks.

The checks find out if the holder is still needed.
"""
PIECE = 96_000
"""Maximum size of one call in bytes.

Below 100 KB Ray sends values with the call itself. Larger ones go through object stores, where some
take another second.
"""
Answers = Iterator[dict[str, object]]
"""Lines of JSON; `providers.ray.DriverAnswer` has their fields."""
KEY_NAME = "channel.key"
"""File in a holder's folder that `wire.sealed` writes. This file runs without our packages."""
NO_DAEMONS = {"start", "python", KEY_NAME}
"""Files in a holder's folder that do not belong to a daemon."""
MAX_INTRODUCTIONS = 8
WINDOW = 1000
"""Number of calls of a session that may overtake one another."""
Ticket = tuple[str, int, str]
"""A caller's session, the number of the call in it, and the proof."""
WAITING: dict[str, PlacementGroup] = {}
"""Placement groups of pools whose nodes are not ready yet, by job ID."""
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
    rm -rf "$0" "$0+"*
) &
"""
"""Script that outlives the actor on its node, by a double fork.

Ray ends an actor's children but not their children. The guard starts the holder and, once the actor
is gone for any reason, ends all processes that carry its mark.
"""


# ----------------------------------------------------------------------------------- authentication


def ticket_proof(
    key: str, session: str, number: int, name: str, method: str, *arguments: str | bytes
) -> str:
    """Return the HMAC of a call of this method of the named actor. Pure."""
    mac = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (session, str(number), name, method, *arguments):
        data = part if isinstance(part, bytes) else part.encode()
        mac.update(len(data).to_bytes(8, "big"))
        mac.update(data)
    return mac.hexdigest()


class Caller:
    """Makes tickets for calls.

    Args:
        key: channel key of the pool.
    """

    def __init__(self, key: str) -> None:
        self._key, self._session = key, os.urandom(16).hex()
        self._numbers = itertools.count(1)

    def ticket(self, name: str, method: str, *arguments: str | bytes) -> Ticket:
        """Return the ticket for one call of this method of the named actor."""
        number = next(self._numbers)
        proof = ticket_proof(self._key, self._session, number, name, method, *arguments)
        return self._session, number, proof


class TicketCheck:
    """Accepts each ticket once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, set[int]] = {}
        """Numbers of the latest calls, by session."""

    def accept(
        self, key: str, ticket: object, name: str, method: str, *arguments: str | bytes
    ) -> None:
        """Raise PermissionError for a ticket with a wrong key, for another call, or used before."""
        session, number, proof = _read(ticket)
        expected = ticket_proof(key, session, number, name, method, *arguments)
        if not key or not hmac.compare_digest(proof.encode(), expected.encode()):
            raise PermissionError(f"{name} answers only to its pool's notebook")
        with self._lock:
            used = self._used.setdefault(session, set())
            if number in used or number <= max(used, default=0) - WINDOW:
                raise PermissionError(f"this call of {name} was made before")
            used.add(number)
            if len(used) > 2 * WINDOW:
                self._used[session] = {old for old in used if old > max(used) - WINDOW}


def _read(ticket: object) -> Ticket:
    """Return the ticket, or one that proves nothing if a stranger sent something malformed."""
    if isinstance(ticket, tuple) and tuple(map(type, ticket)) == (str, int, str):
        session, number, proof = ticket
        return session, number, proof
    return "", 0, ""


# ------------------------------------------------------------------------------------ on the nodes


def own_folder(usual: str) -> str | None:
    """Return the folder of this user's waiting holder, or None if it does not exist yet.

    It has its usual name, or a random one if another user has taken the usual name. Duplicates
    `skymagic.kernels.fork.holder`, which is not available here.
    """
    first = Path(usual)
    for folder in [first, *first.parent.glob(f"{first.name}+*")]:
        with contextlib.suppress(OSError):
            status = folder.lstat()
            private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            if private and status.st_uid == os.getuid() and (folder / "start").exists():
                return str(folder)
    return None


class HeldNode:
    """A node of a pool. Starts the holder of the pool's daemons and forwards the streams of shells.

    Args:
        group: placement group of the pool.
        names: names of the pool's holders.
        name: name of this holder.
        folder: folder of the holder.
        script: sh of the holder, which starts the daemons named on its pipe.
        introduction: sh of the session that gives this node the channel key, run with the notebook
            that created the pool.
    """

    def __init__(
        self,
        group: Any,
        names: Sequence[str],
        name: str,
        folder: str,
        script: str,
        introduction: str,
    ) -> None:
        self.called = time.monotonic()
        self._name, self._introduction = name, introduction
        self._introductions = set[str]()
        """Shells that need no ticket: their contents authenticate the caller."""
        self._tickets = TicketCheck()
        self._usual = folder
        self._shells, self._asked = dict[str, subprocess.Popen[bytes]](), dict[str, float]()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") and key not in RAYS_OWN
        }
        # Ray used in a cell finds its own cluster
        self._env = {**inherited, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        command = ["/bin/sh", "-c", GUARD, folder, script]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=self._env, start_new_session=True
        )
        self._guard.wait()
        while (own := own_folder(folder)) is None:
            time.sleep(0.01)
        self._folder = own
        threading.Thread(target=self._watch, args=(group, names), daemon=True).start()

    def accept(self, ticket: object, method: str, *arguments: str | bytes) -> None:
        """Raise PermissionError if the caller may not make this call."""
        # a session of introduction needs no ticket: nobody has the key before it
        shell = arguments[0] if arguments else ""
        if ticket is not None or method == "start" or shell not in self._introductions:
            self._tickets.accept(self._key(), ticket, self._name, method, *arguments)

    def introduce(self, shell: str) -> None:
        """See `RayHolder.introduce`."""
        if self._key() or len(self._introductions) >= MAX_INTRODUCTIONS or shell in self._shells:
            raise PermissionError(f"{self._name} answers only to its pool's notebook")
        self.called = time.monotonic()
        self._introductions.add(shell)
        self.start(shell, self._introduction)

    def needed(self) -> bool:
        """See `RayHolder.needed`."""
        files = {file.name for file in Path(self._folder).glob("*")}
        return bool(files - NO_DAEMONS) or (
            bool(files) and time.monotonic() - self.called < FORGOTTEN
        )

    def _key(self) -> str:
        """Return the pool's channel key, or "" until this node has been introduced."""
        with contextlib.suppress(OSError):
            return Path(self._folder, KEY_NAME).read_text()
        return ""

    def _others_need(self, names: Sequence[str]) -> bool:
        """Return True if another node is needed.

        Before the nodes have the key, return True if one has not started yet, since the notebook
        waits for it.
        """
        if key := self._key():
            caller = Caller(key)
            return any(is_needed(name, caller) for name in names if name != self._name)
        if all(is_started(name) for name in names):
            return False
        self.called = time.monotonic()
        return True

    def _watch(self, group: Any, names: Sequence[str]) -> None:
        """Wait until this process is no longer needed.

        Ends abandoned shells meanwhile. Removes the pool once no node is needed, and exits once
        Ray's own process on this node (the raylet) is gone.
        """
        raylet = os.getppid()
        while self.needed() or self._others_need(names):
            time.sleep(LOOK)
            # without a head the raylet ends, and may leave an actor whose threads wait
            if os.getppid() != raylet:
                os._exit(1)
            for shell in [
                shell
                for shell, last_read in self._asked.items()
                if time.monotonic() - last_read > FORGOTTEN
            ]:
                self.close(shell)
        remove_placement_group(group)  # upon which Ray ends this process

    def start(self, shell: str, command: str) -> None:
        """See `RayHolder.start`."""
        env, pipe = (
            {
                **self._env,
                "SKYMAGIC_HOLDER": self._folder,
                "SKYMAGIC_GUARD": self._usual,
                "SKYMAGIC_PYTHON": sys.executable,
            },
            subprocess.PIPE,
        )
        self._asked[shell] = time.monotonic()
        self._shells[shell] = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd="/tmp",
            start_new_session=True,
        )

    def write(self, shell: str, data: bytes) -> bool:
        """See `RayHolder.write`."""
        try:
            stream = self._shells[shell].stdin
            assert stream is not None
            stream.write(data)
            stream.flush()
            if not data:
                stream.close()
        except (KeyError, ValueError, OSError):  # it has ended
            return False
        return True

    def read(self, shell: str) -> tuple[int, bytes] | None:
        """See `RayHolder.read`."""
        if (process := self._shells.get(shell)) is None:
            return 0, b"-1"
        self._asked[shell] = time.monotonic()
        streams = {
            stream: number
            for number, stream in enumerate((process.stdout, process.stderr), 1)
            if stream and not stream.closed
        }
        if not streams:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return 0, str(max(-1, process.wait(POLL))).encode()
            return None
        if not (ready := select.select(streams, [], [], POLL)[0]):
            return None
        if not (data := os.read(ready[-1].fileno(), PIECE)):
            ready[-1].close()
        return streams[ready[-1]], data

    def close(self, shell: str) -> None:
        """See `RayHolder.close`."""
        self._introductions.discard(shell)
        self._asked.pop(shell, None)
        if (process := self._shells.pop(shell, None)) is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


class RayHolder:
    """Actor on one node, with a thread for each call. Takes the arguments of `HeldNode`.

    Ray lets every client call every method of an actor, including methods whose names begin with an
    underscore. Therefore each method checks its ticket.
    """

    def __init_subclass__(cls) -> None:
        def refused(self: RayHolder, *_: object, **__: object) -> None:
            raise PermissionError("this actor answers only to its pool's notebook")

        # Ray derives a class from this one, and its __ray_call__ lets every client run any function
        cls.__ray_call__ = refused  # type: ignore[attr-defined]

    def __init__(self, *arguments: Any) -> None:
        self._node = HeldNode(*arguments)

    def introduce(self, shell: str) -> None:
        """Start the session that gives this node the channel key.

        After that, no client can start another one.
        """
        self._node.introduce(shell)

    def renew(self, ticket: Ticket) -> None:
        """Keep this node: the notebook is alive and needs it."""
        self._node.accept(ticket, "renew")
        self._node.called = time.monotonic()

    def needed(self, ticket: Ticket) -> bool:
        """Return True if daemons run here or may be started soon."""
        self._node.accept(ticket, "needed")
        return self._node.needed()

    def start(self, ticket: Ticket, shell: str, command: str) -> None:
        """Start a shell with a command line."""
        self._node.accept(ticket, "start", shell, command)
        self._node.called = time.monotonic()
        self._node.start(shell, command)

    def write(self, ticket: Ticket | None, shell: str, data: bytes) -> bool:
        """Write to a shell's standard input; b"" closes it.

        Returns True if the shell accepted the data.
        """
        self._node.accept(ticket, "write", shell, data)
        return self._node.write(shell, data)

    def read(self, ticket: Ticket | None, shell: str) -> tuple[int, bytes] | None:
        """Return the next piece of a shell's output, or None if nothing arrives for a while.

        Returns:
            A stream number and data: output (1) or standard error (2), with b"" at their ends, then
                the exit status (0).
        """
        self._node.accept(ticket, "read", shell)
        return self._node.read(shell)

    def close(self, ticket: Ticket | None, shell: str) -> None:
        """End a shell and its process group. Twice is safe."""
        self._node.accept(ticket, "close", shell)
        self._node.close(shell)


def is_needed(name: str, caller: Caller) -> bool:
    """Return the holder's answer whether its node is needed, or True if it does not answer."""
    try:
        ticket = caller.ticket(name, "needed")
        return bool(ray.get(ray.get_actor(name, NAMESPACE).needed.remote(ticket), timeout=10))
    except (ActorUnavailableError, GetTimeoutError):
        return True
    except (RayActorError, ValueError):  # it is gone
        return False
    except RayError:  # it does not know the key yet
        return True


def is_started(name: str) -> bool:
    """Return True if a node's holder has started, or is gone already."""
    try:
        ray.get(ray.get_actor(name, NAMESPACE).__ray_ready__.remote(), timeout=10)
    except (ActorUnavailableError, GetTimeoutError):
        return False
    except (RayActorError, ValueError):
        return True
    return True


class GroupState(NamedTuple):
    """State of a placement group in Ray's words."""

    state: str
    scheduling_state: str

    @classmethod
    def of(cls, group: PlacementGroup) -> GroupState:
        """Return the state in the group's row of `placement_group_table`."""
        row = placement_group_table(group)
        return cls(row.get("state", ""), row.get("stats", {}).get("scheduling_state", ""))


def placement_problem(
    group: GroupState,
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[Mapping[str, float]],
) -> str:
    """Describe what a placement group waits for, with Ray's own state. Pure.

    Args:
        nodes: resources of the nodes that are alive.
    """
    able = sum(
        all(resources.get(key, 0) >= amount for key, amount in bundles[0].items())
        for resources in nodes
    )
    resources = ", ".join(
        f"{key} {amount:g}" if amount >= 1 else key for key, amount in bundles[0].items()
    )
    state = ", ".join(filter(None, (group.state, group.scheduling_state)))
    reason = "which others use"
    if able < len(bundles):
        reason = (
            f"and {able} of the cluster's {len(nodes)} nodes are such: "
            "an autoscaler may add some, else stop it and ask for less"
        )
    return f"{len(bundles)} × ({resources}), {reason} (Ray: {state})"


# ------------------------------------------------------------------------------------ requests


def serve(control: socket.socket) -> None:
    """Answer each request on its own thread until the notebook closes its end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 3)
        if not data:
            return
        request, sockets = (
            json.loads(data),
            [socket.socket(fileno=descriptor) for descriptor in descriptors],
        )
        logger.debug("request: do=%s job=%s", request["do"], request.get("job", ""))
        # before the next request is read: a later "end" must find the pool that it ends
        if request["do"] == "allocate":
            request["placement_group"] = create_holders(**request)
        threading.Thread(target=answer, args=(request, sockets), daemon=True).start()


def answer(request: Any, sockets: Sequence[socket.socket]) -> None:
    """Execute a request and send one line of JSON per answer."""
    named = {handler.__name__: handler for handler in ANSWERS}
    # the notebook may no longer wait for the answer
    with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
        for end in sockets:
            closing.enter_context(end)
        try:
            for line in named[request.pop("do")](sockets, **request):
                sockets[0].sendall(json.dumps(line).encode() + b"\n")
        # includes Ray's own asserts: the caller would take silence for an answer
        except Exception as problem:
            logger.warning(
                "request failed: job=%s error=%s", request.get("job", ""), type(problem).__name__
            )
            message = str(problem) if isinstance(problem, (RayError, ValueError)) else repr(problem)
            sockets[0].sendall(json.dumps({"error": message}).encode() + b"\n")


def nodes(_: object) -> Answers:
    """Yield the resources of each node in the cluster."""
    yield {"resources": alive_resources()}


def alive_resources() -> list[dict[str, float]]:
    """Return the resources of the nodes that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def create_holders(
    do: str,
    job: str,
    bundles: Sequence[Mapping[str, float]],
    folder: str,
    script: str,
    introduction: str,
) -> Any:
    """Create the holders of a new pool. Returns the error if Ray refuses."""
    name = f"{PREFIX}-{job}"
    names = [f"{name}-{index}" for index in range(len(bundles))]
    try:
        WAITING[job] = group = placement_group(bundles, "STRICT_SPREAD", name, "detached")
        return [
            ray.remote(RayHolder)
            .options(
                name=names[index],
                lifetime="detached",
                max_concurrency=100,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                resources={
                    key: amount
                    for key, amount in bundle.items()
                    if key not in ("CPU", "GPU", "memory")
                },
            )
            .remote(
                group,
                names,
                names[index],
                *(text.replace("@NODE@", str(index)) for text in (folder, script)),
                introduction,
            )
            for index, bundle in enumerate(bundles)
        ]
    except (RayError, ValueError) as problem:
        logger.warning("holders not created: job=%s error=%s", job, type(problem).__name__)
        return problem


def allocate(
    _: object, job: str, bundles: Sequence[Mapping[str, float]], placement_group: Any, **_more: str
) -> Answers:
    """Yield what a pool waits for until its nodes are ready, then its nodes.

    Nodes are given by host name, Ray's node ID, and the address for Ray's other nodes.
    """
    if isinstance(placement_group, Exception):
        raise placement_group
    last_message, starting = "", [holder.__ray_ready__.remote() for holder in placement_group]
    while len(ray.wait(starting, num_returns=len(starting), timeout=1.0)[0]) < len(starting):
        group = GroupState.of(WAITING[job])
        if (
            group.state != "CREATED"
            and (message := placement_problem(group, bundles, alive_resources())) != last_message
        ):
            logger.debug("placement group is %s: job=%s", group.state or "unknown", job)
            yield {"waits": (last_message := message)}
    ray.get(starting)
    logger.info("holders run: job=%s nodes=%s", job, len(bundles))
    node_ids = placement_group_table(WAITING[job])["bundles_to_node_id"]
    nodes_by_id = {node["NodeID"]: node for node in ray.nodes()}
    nodes = [nodes_by_id[node_ids[index]] for index in range(len(bundles))]
    yield {
        "placed": [
            {
                "host": node["NodeManagerHostname"],
                "ray_id": node["NodeID"],
                "address": node["NodeManagerAddress"],
            }
            for node in nodes
        ]
    }


def hold(_: object, job: str, count: int, key: str) -> Answers:
    """Keep the nodes of a pool, which already know the key, for as long as this process lives."""
    named = [f"{PREFIX}-{job}-{index}" for index in range(count)]

    def renew() -> None:
        ray.get(
            [
                holder_of(job, index).renew.remote(caller(key).ticket(name, "renew"))
                for index, name in enumerate(named)
            ]
        )

    renew()
    WAITING.pop(job, None)
    yield {}
    while True:
        time.sleep(FORGOTTEN / 4)
        renew()


@functools.cache
def caller(key: str) -> Caller:
    """Return the maker of this process's tickets."""
    return Caller(key)


def fate(_: object, job: str, index: int) -> Answers:
    """Yield why a node is gone, or "" if it is not.

    Ray may not know for a while that an actor is dead, nor that the head is gone. In the latter
    case Ray ends this process.
    """
    reason, deadline = None, time.monotonic() + POLL
    while reason is None:
        try:
            ray.get(holder_of(job, index).__ray_ready__.remote(), timeout=POLL)
            reason = ""
        except (ActorUnavailableError, GetTimeoutError) as problem:
            logger.debug(
                "node unclear: job=%s index=%s error=%s", job, index, type(problem).__name__
            )
            time.sleep(0.2)
            reason = "" if time.monotonic() > deadline else None
        except RayActorError as problem:
            message = " ".join(str(problem).split())
            reason = f"Ray says: {message[message.rfind('The actor ') :]}"
        except ValueError:
            reason = (
                "Ray has ended what held it: the pool has ended, or the node has left the cluster"
            )
    yield {"fate": reason}


@functools.cache
def holder_of(job: str, index: int) -> Any:
    """Return the actor that holds a node. Raises ValueError if it does not exist.

    Cached, because Ray forgets the names of dead actors and a known handle still reveals their
    fate.
    """
    return ray.get_actor(f"{PREFIX}-{job}-{index}", NAMESPACE)


def end(_: object, job: str) -> Answers:
    """Remove a pool. Yields the names that remain after a while."""
    deadline = time.monotonic() + 30.0
    while (remaining := remove(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield {"left": remaining}


def remove(job: str) -> list[str]:
    """Remove a pool's group and its holders, and return the names found.

    Ray itself ends only holders that run, so they are killed explicitly.
    """
    name = f"{PREFIX}-{job}"
    names = [actor for actor in everything() if actor.startswith(name)]
    logger.info("pool is removed: job=%s actors=%s", job, len(names))
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(name))
    for actor in names:
        # AssertionError: Ray's nodes have forgotten the class, with the last of its actors
        with contextlib.suppress(ValueError, AssertionError):
            ray.kill(ray.get_actor(actor, NAMESPACE))
    return names


def everything() -> dict[str, str]:
    """Return the states of the pools' actors and placement groups by name, in Ray's words."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    named = {record["name"]: "PENDING" for record in actors if record["namespace"] == NAMESPACE}
    groups = placement_group_table().values()
    return named | {
        record["name"]: record["state"] for record in groups if record["state"] != "REMOVED"
    }


def pools(_: object) -> Answers:
    """Yield the job IDs of pools with the states of their groups."""
    states = everything()
    named = (re.fullmatch(rf"{PREFIX}-(.+-[0-9a-f]{{8}})", name) for name in states)
    yield {"pools": [(match[1], states[match[0]]) for match in named if match]}


def pass_on(ends: Sequence[socket.socket], job: str, index: int, command: str, key: str) -> Answers:
    """Run a shell on a node and forward its streams, its standard error and its exit status.

    Ends when the shell has ended or the notebook has closed the sockets.
    """
    name, shell = f"{PREFIX}-{job}-{index}", os.urandom(8).hex()

    def call(method: str, *arguments: str | bytes) -> Any:
        ticket = caller(key).ticket(name, method, *arguments)
        return ray.get(getattr(holder_of(job, index), method).remote(ticket, *arguments))

    _join(ends, shell, call, lambda: call("start", shell, command))
    yield from ()


def introduce(ends: Sequence[socket.socket], job: str, index: int) -> Answers:
    """Run the session that gives a node the channel key, which later calls need. See `pass_on`."""
    shell = os.urandom(8).hex()

    def call(method: str, *arguments: str | bytes) -> Any:
        return ray.get(getattr(holder_of(job, index), method).remote(None, *arguments))

    _join(ends, shell, call, lambda: ray.get(holder_of(job, index).introduce.remote(shell)))
    yield from ()


def _join(
    ends: Sequence[socket.socket],
    shell: str,
    call: Callable[..., Any],
    start: Callable[[], object],
) -> None:
    """Start a shell and forward its streams.

    Args:
        call: calls a method of the shell's holder.
    """
    streams, errors, status = ends
    try:
        start()
        feeding = threading.Thread(target=feed, args=(call, shell, streams, status), daemon=True)
        feeding.start()
        try:
            which = -1
            while which:
                which, data = call("read", shell) or (-1, b"")
                if data:
                    (status, streams, errors)[which].sendall(data)
                elif which > 0:
                    (status, streams, errors)[which].shutdown(socket.SHUT_WR)
        finally:
            with contextlib.suppress(OSError):
                status.shutdown(socket.SHUT_RDWR)
            feeding.join()
    # reported on standard error, because the shell's output must not contain it
    except (RayError, ValueError) as problem:
        errors.sendall(f"Ray: {problem}".encode())


def feed(
    call: Callable[..., Any], shell: str, streams: socket.socket, status: socket.socket
) -> None:
    """Forward the notebook's input while the shell accepts it.

    Closes the shell when the notebook closes its sockets.
    """
    sockets = [streams, status]
    with contextlib.suppress(OSError, RayError):
        while status not in select.select(sockets, [], [])[0]:
            data = streams.recv(PIECE)
            if not (call("write", shell, data) and data):
                streams.shutdown(socket.SHUT_RD)  # upon which the notebook's writes fail
                sockets = [status]
        call("close", shell)


ANSWERS: Sequence[Callable[..., Answers]] = (
    nodes,
    allocate,
    introduce,
    hold,
    fate,
    end,
    pass_on,
    pools,
)


def connect(address: str) -> None:
    """Connect to Ray.

    Retries once, because Ray Client's proxy loses some of the processes that it starts for a client
    (ray-project/ray#63202).
    """
    init = functools.partial(
        ray.init, address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        init()
    except ConnectionAbortedError:  # after 40 s
        logger.warning("connection to Ray aborted, another attempt")
        init()
        init()


def start_log(arguments: Sequence[str]) -> None:
    """Write the debug log that the notebook requests.

    Only this process on the notebook's machine does, and there skymagic is installed.
    """
    if arguments:
        with contextlib.suppress(ImportError):
            from skymagic.wire import debug_log

            debug_log.start(arguments)


def main(descriptor: str, address: str, *log: str) -> None:
    """Connect to Ray, tell the notebook, and serve it.

    Args:
        log: arguments for the debug log (`wire.debug_log.start`).
    """
    start_log(log)
    control = socket.socket(fileno=int(descriptor))
    try:
        connect(address)
    except Exception as problem:
        logger.warning("not connected to Ray: error=%s", type(problem).__name__)
        control.send(json.dumps({"error": str(problem)}).encode())
        return
    connected = address if address.startswith("ray://") else ray.get_runtime_context().gcs_address
    logger.info("connected to Ray: address=%s", connected)
    control.send(json.dumps({"address": connected}).encode())
    serve(control)
    logger.info("notebook is gone: waiting_pools=%s", len(WAITING))
    for job in WAITING:  # the notebook was killed
        remove(job)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
