"""The process that is connected to a Ray cluster for a notebook, and the actors by which it holds a pool's nodes there; run as a file.

It is a process of its own because Ray ends the one that it is connected from when the cluster's head is gone, and because the notebook may use
Ray itself::

    notebook ──requests with sockets for their answers──▶ this process ──calls, and shells in pieces──▶ RayHolder: one per node, detached
                                                                                                         └──▶ guard ──▶ holder ──▶ daemons

Every client of the cluster can call the actors, so each call has a *ticket*: proof that the caller knows the pool's channel key, good for this
call alone. A node gets the key in its first session with the notebook, whose fingerprint it knows from the start (`RayHolder.introduce`).
Shells are sessions of their own (`wire.sealed`): what passes here and through Ray is encrypted.

A pool is a detached placement group and a detached actor in each of its bundles, made at once. With the group Ray ends the actors. They remove it
themselves when none of them is needed: all daemons have ended, or none has run and nobody has called for `FORGOTTEN` seconds.
Standard library and Ray only: nodes have nothing else, and Ray copies the classes of ``__main__``.
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
KEY_NAME = "channel.key"
"""File of a holder's folder that `wire.sealed` writes; this file runs without our packages."""
NO_DAEMONS = {"start", "python", KEY_NAME}
"""Files of a holder's folder that are of no daemon."""
MAX_INTRODUCTIONS = 8
WINDOW = 1000
"""Calls of a session that may overtake one another."""
Ticket = tuple[str, int, str]
"""A caller's session, the call's number in it, and the proof."""
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
    rm -rf "$0" "$0+"*
) &
"""
"""What outlives an actor on its node, by a double fork, for Ray ends an actor's children but not theirs: it starts the holder, and when the
actor is gone, however it went, it ends all that carries its mark."""


# ------------------------------------------------------------------------------------ who may call


def ticket_proof(
    key: str, session: str, number: int, name: str, method: str, *arguments: str | bytes
) -> str:
    """Return the HMAC of a call of this method of the actor of this name; pure."""
    made = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (session, str(number), name, method, *arguments):
        data = part if isinstance(part, bytes) else part.encode()
        made.update(len(data).to_bytes(8, "big"))
        made.update(data)
    return made.hexdigest()


class Caller:
    """Makes tickets for calls.

    Args:
        key: the pool's channel key.
    """

    def __init__(self, key: str) -> None:
        self._key, self._session = key, os.urandom(16).hex()
        self._numbers = itertools.count(1)

    def ticket(self, name: str, method: str, *arguments: str | bytes) -> Ticket:
        """Return the ticket for one call of this method of the actor of this name."""
        number = next(self._numbers)
        proof = ticket_proof(self._key, self._session, number, name, method, *arguments)
        return self._session, number, proof


class TicketCheck:
    """Accepts each ticket once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, set[int]] = {}
        """Session → numbers of its latest calls."""

    def accept(
        self, key: str, ticket: object, name: str, method: str, *arguments: str | bytes
    ) -> None:
        """Raise PermissionError for a ticket that is not the key's, is for another call, or was used."""
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
                self._used[session] = {each for each in used if each > max(used) - WINDOW}


def _read(ticket: object) -> Ticket:
    """A ticket as a stranger may have made it up: one that proves nothing where it is none."""
    if isinstance(ticket, tuple) and tuple(map(type, ticket)) == (str, int, str):
        session, number, proof = ticket
        return session, number, proof
    return "", 0, ""


# ------------------------------------------------------------------------------------ on the nodes


def own_folder(usual: str) -> str | None:
    """Return the folder in which this user's holder waits, under its usual name or, where another user has taken that, a random one.

    As `skymagic.kernels.fork.holder` does, which is not here.
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
    """A node of a pool: starts what holds the pool's daemons there, and passes the streams of shells.

    Args:
        group: the pool's. names: of its holders. name: this one's.
        folder: of the holder. script: sh of the holder, which starts the daemons whose names come.
        introduction: sh of a session with the notebook that has made the pool, in which this node gets the channel key.
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
        """Shells that anyone may call: what they carry convinces only those who may know."""
        self._tickets = TicketCheck()
        self._usual = folder
        self._shells, self._asked = dict[str, subprocess.Popen[bytes]](), dict[str, float]()
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
        while (own := own_folder(folder)) is None:
            time.sleep(0.01)
        self._folder = own
        threading.Thread(target=self._watch, args=(group, names), daemon=True).start()

    def accept(self, ticket: object, method: str, *arguments: str | bytes) -> None:
        """Raise PermissionError where the caller may not make this call."""
        # a session of introduction needs no ticket: nobody has the key before it
        shell = arguments[0] if arguments else ""
        if ticket is not None or method == "start" or shell not in self._introductions:
            self._tickets.accept(self._key(), ticket, self._name, method, *arguments)

    def introduce(self, shell: str) -> None:
        """As of `RayHolder`."""
        if self._key() or len(self._introductions) >= MAX_INTRODUCTIONS or shell in self._shells:
            raise PermissionError(f"{self._name} answers only to its pool's notebook")
        self.called = time.monotonic()
        self._introductions.add(shell)
        self.start(shell, self._introduction)

    def needed(self) -> bool:
        """As of `RayHolder`."""
        files = {each.name for each in Path(self._folder).glob("*")}
        return bool(files - NO_DAEMONS) or (
            bool(files) and time.monotonic() - self.called < FORGOTTEN
        )

    def _key(self) -> str:
        """The pool's channel key; "" until this node has been introduced."""
        with contextlib.suppress(OSError):
            return Path(self._folder, KEY_NAME).read_text()
        return ""

    def _others_need(self, names: Sequence[str]) -> bool:
        """Whether another node is needed. Before nodes know each other: whether one is not there yet, for which the notebook waits."""
        if key := self._key():
            caller = Caller(key)
            return any(is_needed(name, caller) for name in names if name != self._name)
        if all(is_there(name) for name in names):
            return False
        self.called = time.monotonic()
        return True

    def _watch(self, group: Any, names: Sequence[str]) -> None:
        """End shells that nobody reads any more, the pool once no node is needed, and this process once Ray's own on this node is gone."""
        raylet = os.getppid()
        while self.needed() or self._others_need(names):
            time.sleep(LOOK)
            if (
                os.getppid() != raylet
            ):  # without a head it ends, and may leave an actor whose threads wait
                os._exit(1)
            for shell in [
                shell
                for shell, asked in self._asked.items()
                if time.monotonic() - asked > FORGOTTEN
            ]:
                self.close(shell)
        remove_placement_group(group)  # upon which Ray ends this process

    def start(self, shell: str, command: str) -> None:
        """As of `RayHolder`."""
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
            ["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd="/tmp", start_new_session=True
        )  # fmt: skip

    def write(self, shell: str, data: bytes) -> bool:
        """As of `RayHolder`."""
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
        """As of `RayHolder`."""
        if (process := self._shells.get(shell)) is None:
            return 0, b"-1"
        self._asked[shell] = time.monotonic()
        streams = {
            each: number
            for number, each in enumerate((process.stdout, process.stderr), 1)
            if each and not each.closed
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
        """As of `RayHolder`."""
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
    """An actor on one node, with a thread for each call; the arguments are `HeldNode`'s.

    Ray lets every client call every method of an actor, also those whose names begin with an underscore: each of them checks its ticket.
    """

    def __init_subclass__(cls) -> None:
        def refused(self: RayHolder, *_: object, **__: object) -> None:
            raise PermissionError("this actor answers only to its pool's notebook")

        # Ray derives a class from this one, by whose method every client could run any function here
        cls.__ray_call__ = refused  # type: ignore[attr-defined]

    def __init__(self, *arguments: Any) -> None:
        self._node = HeldNode(*arguments)

    def introduce(self, shell: str) -> None:
        """Start the session in which this node gets the channel key. Once it has that, nobody can start another one."""
        self._node.introduce(shell)

    def renew(self, ticket: Ticket) -> None:
        """The notebook is there, and needs this node."""
        self._node.accept(ticket, "renew")
        self._node.called = time.monotonic()

    def needed(self, ticket: Ticket) -> bool:
        """Whether daemons run here, or may be started soon."""
        self._node.accept(ticket, "needed")
        return self._node.needed()

    def start(self, ticket: Ticket, shell: str, command: str) -> None:
        """Start a shell with a command line."""
        self._node.accept(ticket, "start", shell, command)
        self._node.called = time.monotonic()
        self._node.start(shell, command)

    def write(self, ticket: Ticket | None, shell: str, data: bytes) -> bool:
        """Write to a shell's standard input, b"" to end it; whether it took that."""
        self._node.accept(ticket, "write", shell, data)
        return self._node.write(shell, data)

    def read(self, ticket: Ticket | None, shell: str) -> tuple[int, bytes] | None:
        """The next of a shell's output (1) or standard error (2), b"" at their ends, then its exit status (0); None for nothing in a while."""
        self._node.accept(ticket, "read", shell)
        return self._node.read(shell)

    def close(self, ticket: Ticket | None, shell: str) -> None:
        """End a shell with its process group; twice is safe."""
        self._node.accept(ticket, "close", shell)
        self._node.close(shell)


def is_needed(name: str, caller: Caller) -> bool:
    """Whether a node is, as its holder says; one that does not answer may be."""
    try:
        ticket = caller.ticket(name, "needed")
        return bool(ray.get(ray.get_actor(name, NAMESPACE).needed.remote(ticket), timeout=10))
    except (ActorUnavailableError, GetTimeoutError):
        return True
    except (RayActorError, ValueError):  # it is gone
        return False
    except RayError:  # it does not know the key yet
        return True


def is_there(name: str) -> bool:
    """Whether a node's holder has been started, or is gone."""
    try:
        ray.get(ray.get_actor(name, NAMESPACE).__ray_ready__.remote(), timeout=10)
    except (ActorUnavailableError, GetTimeoutError):
        return False
    except (RayActorError, ValueError):
        return True
    return True


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
    do: str,
    job: str,
    bundles: Sequence[Mapping[str, float]],
    folder: str,
    script: str,
    introduction: str,
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
            ).remote(
                group, names, names[index], *(text.replace("@NODE@", str(index)) for text in (folder, script)), introduction
            )
            for index, bundle in enumerate(bundles)
        ]  # fmt: skip
    except (RayError, ValueError) as problem:
        return problem


def place(
    _: object, job: str, bundles: Sequence[Mapping[str, float]], made: Any, **_more: str
) -> Answers:
    """What a pool waits for, until its nodes are there: what they are called, by their systems and by Ray, and where Ray's nodes reach them."""
    if isinstance(made, Exception):
        raise made
    told, asked = "", [each.__ray_ready__.remote() for each in made]
    while len(ray.wait(asked, num_returns=len(asked), timeout=1.0)[0]) < len(asked):
        row = placement_group_table(WAITING[job])
        if row.get("state") != "CREATED" and (said := waits(row, bundles, alive_nodes())) != told:
            yield {"waits": (told := said)}
    ray.get(asked)
    given = placement_group_table(WAITING[job])["bundles_to_node_id"]
    known = {each["NodeID"]: each for each in ray.nodes()}
    nodes = [known[given[index]] for index in range(len(bundles))]
    yield {
        "nodes": [
            {
                "host": each["NodeManagerHostname"],
                "ray": each["NodeID"],
                "address": each["NodeManagerAddress"],
            }
            for each in nodes
        ]
    }


def hold(_: object, job: str, count: int, key: str) -> Answers:
    """Hold the nodes of a pool, which know the key, while this process is there."""
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
    """Return what makes this process's tickets."""
    return Caller(key)


def fate(_: object, job: str, index: int) -> Answers:
    """Why a node is gone; "" where it is not. For a while Ray may not know of a dead actor, nor that the head is gone: then it ends this process."""
    words, deadline = None, time.monotonic() + POLL
    while words is None:
        try:
            ray.get(holder_of(job, index).__ray_ready__.remote(), timeout=POLL)
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


def pass_on(ends: Sequence[socket.socket], job: str, index: int, command: str, key: str) -> Answers:
    """A shell on a node with its streams, its standard error and its exit status, until it has ended or the notebook has closed them."""
    name, shell = f"{PREFIX}-{job}-{index}", os.urandom(8).hex()

    def call(method: str, *arguments: str | bytes) -> Any:
        ticket = caller(key).ticket(name, method, *arguments)
        return ray.get(getattr(holder_of(job, index), method).remote(ticket, *arguments))

    _join(ends, shell, call, lambda: call("start", shell, command))
    yield from ()


def introduce(ends: Sequence[socket.socket], job: str, index: int) -> Answers:
    """The session in which a node gets the channel key, with which it can be called afterwards; as `pass_on`."""
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
    """Start a shell and pass its streams on.

    Args:
        call: calls a method of its holder.
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
    except (RayError, ValueError) as problem:  # what comes of the shell is no place for it
        errors.sendall(f"Ray: {problem}".encode())


def feed(
    call: Callable[..., Any], shell: str, streams: socket.socket, status: socket.socket
) -> None:
    """What the notebook sends, as long as the shell takes it; closes the shell when the notebook closes its sockets."""
    heard = [streams, status]
    with contextlib.suppress(OSError, RayError):
        while status not in select.select(heard, [], [])[0]:
            data = streams.recv(PIECE)
            if not (call("write", shell, data) and data):
                streams.shutdown(socket.SHUT_RD)  # upon which the notebook's writes fail
                heard = [status]
        call("close", shell)


ANSWERS: Sequence[Callable[..., Answers]] = (
    nodes,
    place,
    introduce,
    hold,
    fate,
    end,
    pass_on,
    pools,
)


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
