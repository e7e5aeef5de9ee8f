"""Nodes of a Ray cluster: one placement group for a pool, reached through an actor on each node, used as hosts of SSH are, and removed at the end."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, HostGone, ProvisionError, RequestError
from skymagic.plan import gpus
from skymagic.plan.accelerators import Accelerator, GpuChoice, matches
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count
from skymagic.providers import slurm_jobs, ssh
from skymagic.providers.provider import ListedPool, Say, Survey
from skymagic.ssh.command import SocketChannel
from skymagic.ssh.host import ChannelConnection
from skymagic.wire import atomic

DRIVER = Path(__file__).with_name("ray_driver.py")
"""What is connected to Ray, in a process of its own."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
KIND = "accelerator_type:"
"""What Ray calls a GPU's kind among a node's resources."""


@dataclass(frozen=True)
class RayAccess(ssh.HostAccess):
    """What leads another notebook of this user to a node.

    Attributes:
        address: of the cluster. job: the pool's.
    """

    address: str = ""
    job: str = ""


# ------------------------------------------------------------------------------------ the way to Ray


class RayLink:
    """The process that is connected to Ray, started on use, and again where it has ended: Ray ends it when the cluster's head is gone.

    Args:
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, request: Mapping[str, Any], seconds: float | None = ANSWER_SECONDS) -> Iterator[dict[str, Any]]:
        """The answers to a request, as they come; an interrupt is heard. Raises ProvisionError where there is no cluster, or it refuses."""
        near, far = socket.socketpair()
        with near, near.makefile("rb") as lines:
            near.settimeout(seconds)
            with far:
                self.send(request, (far,))
            try:
                for line in lines:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ProvisionError(f"Ray: {answer['error']}")
                    yield answer
            except TimeoutError:
                raise ProvisionError(f"the Ray cluster at {self.address} does not answer") from None

    def send(self, request: Mapping[str, Any], sockets: Sequence[socket.socket]) -> None:
        """Hand a request over, with the sockets for its answers. Raises ProvisionError where there is no cluster."""
        with self._lock:
            if self._program is None or self._program.poll() is not None:
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [each.fileno() for each in sockets])
            except OSError:
                raise ProvisionError(f"the connection to the Ray cluster at {self.address} is lost") from None

    def _start(self) -> None:
        _reach(self.address)
        self._stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_SECONDS)
        try:
            with theirs:
                self._program = subprocess.Popen(
                    [sys.executable, "-P", str(DRIVER), str(theirs.fileno()), self.address], pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C is for the notebook
                )  # fmt: skip
            told = json.loads(self._control.recv(1 << 18) or b'{"error": "its driver ended without a word"}')
            if "error" in told:
                raise ProvisionError(refusal(self.address, told["error"]))
        except TimeoutError:
            self._stop()
            raise ProvisionError(f"the Ray cluster at {self.address} does not answer") from None
        except BaseException:
            self._stop()
            raise
        self._control.settimeout(None)
        self.address = told["address"]

    def close(self) -> None:
        """Leave the cluster; twice is safe."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # upon which the process ends
        if self._program is not None:
            try:
                self._program.wait(5.0)
            except subprocess.TimeoutExpired:
                self._program.kill()
                self._program.wait()
        self._program = self._control = None


def _reach(address: str) -> None:
    """Raises ProvisionError where nothing listens: Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as problem:
        raise ProvisionError(
            f"no Ray cluster answers at {address}: {getattr(problem, 'strerror', None) or problem}\n"
            "  `ray status` on its head says whether it runs; its port is 6379, and 10001 for ray:// addresses"
        ) from None


def refusal(address: str, said: str) -> str:
    """Why Ray lets nobody in, in words; pure."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", said)
    if "ersion mismatch" in said and len(versions) == 2:
        (ray, python), (own, own_python) = versions
        return (
            f"the Ray cluster at {address} has Ray {ray} and Python {python}, this notebook Ray {own} and Python {own_python}: Ray works "
            f"only where both are the same\n  run the notebook with Python {python} and pip install ray=={ray}"
        )
    if address == "auto" and "Could not find any running Ray instance" in said:
        return "--address auto: no Ray cluster runs on this machine, and RAY_ADDRESS is not set; write --address HOST:PORT, or ray://HOST:10001"
    return f"the Ray cluster at {address} lets nobody in: {' '.join(said.split())[:1000]}"


class RayChannel(SocketChannel):
    """A shell on a node, whose streams the link's process passes on.

    Args:
        opening: starts it, with a command line, and the far ends of its streams, its standard error, and what tells its exit status.
    """

    def __init__(self, opening: Callable[[str, Sequence[socket.socket]], None]) -> None:
        super().__init__()
        self._opening, self._status = opening, -1
        self._told, self._their_told = socket.socketpair()

    def exec_command(self, command: str) -> None:
        """Start the shell."""
        with self._theirs, self._their_errors, self._their_told:
            self._opening(command, (self._theirs, self._their_errors, self._their_told))
        threading.Thread(target=self._wait, name="skymagic-channel", daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(OSError):  # closed here
            self._status = int(self._told.recv(16) or b"-1")
        self.status_event.set()

    def recv_exit_status(self) -> int:
        """The shell's exit status; -1 where a signal ended it, or the node is gone."""
        self.status_event.wait()
        return self._status

    def close(self) -> None:
        """End the shell; twice is safe."""
        if self.closed:
            return
        self.closed = True
        self._wake()
        with contextlib.suppress(OSError):
            self._told.shutdown(socket.SHUT_RDWR)
        for each in (self._streams, self._errors, self._told, self._theirs, self._their_errors, self._their_told):
            each.close()


@dataclass(frozen=True)
class RayNode:
    """A node of a pool's placement group.

    Attributes:
        job: the pool's. index: its number in the group. name: as the user knows it.
    """

    link: RayLink
    job: str
    index: int
    name: str

    def connection(self) -> ChannelConnection:
        """Shells beside the node's holder."""

        def shell(command: str, ends: Sequence[socket.socket]) -> None:
            self.link.send({"do": "open", "job": self.job, "index": self.index, "command": command}, ends)

        return ChannelConnection(self.name, f"ray status --address {self.link.address}", lambda _: RayChannel(shell))

    def reconnected(self) -> ChannelConnection:
        """One more connection, unless Ray says that the node is gone. Raises HostGone."""
        if reason := self.fate():
            raise HostGone(self.name, reason)
        return self.connection()

    def fate(self) -> str:
        """Why the node is gone, as Ray says; "" where it is not, or nobody says."""
        with contextlib.suppress(ProvisionError):
            return "".join(one["fate"] for one in self.link.ask({"do": "fate", "job": self.job, "index": self.index}))
        return ""


# ------------------------------------------------------------------------------------ the provider


@dataclass
class HeldGroup:
    """The placement group of a pool, as far as there is one."""

    job: str = ""
    """The pool's; "" before anything is asked for."""
    machines: list[ssh.HostMachine] = field(default_factory=list)
    plan: Plan | None = None
    ready: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class RaySurvey(Survey):
    """What is asked for; owns the link and the group.

    Attributes:
        bundles: Ray's resources of each node.
    """

    requirements: Requirements
    link: RayLink
    bundles: tuple[Mapping[str, float], ...] = ()
    held: HeldGroup = field(default_factory=HeldGroup)

    def outcome(self) -> Plan:
        """The plan with the nodes that were given."""
        return self.held.plan or self.plan

    def ready(self) -> None:
        """All ranks are up."""
        self.held.ready = True

    def close(self) -> None:
        """Close all connections, and remove group and actors; twice is safe."""
        held = self.held
        with held.closing:
            ssh.side_by_side(ssh.HostMachine.close, held.machines)
            if held.job:
                _end(self.link, held.job)
                if not held.ready:
                    print_note("[the pool's placement group is removed]")
            held.job = ""
            self.link.close()


class Ray:
    """The provider of a Ray cluster, from one of its machines, or from any other by a ``ray://`` address."""

    def plan(self, request: PoolRequest, say: Say) -> RaySurvey:
        """Ask what the cluster has; nothing is started there."""
        mistakes = ssh.elsewhere(request)
        if importlib.util.find_spec("ray") is None:
            mistakes.append(
                "--provider ray needs Ray in the notebook's environment, in the cluster's version: pip install \"skymagic[ray]\""
            )
        if mistakes:
            raise RequestError(mistakes)
        shape = topology(request)
        link = RayLink(request.address or _address())
        try:
            (answer,) = link.ask({"do": "nodes"})
            wanted = bundle(request, answer["nodes"])
            image, requirements = ssh.needs(request, shape, say)
        except BaseException:
            link.close()
            raise
        gpu = request.accelerator
        plan = Plan(
            provider="ray", request=request, topology=shape, image=image,
            hosts=(f"{count(shape.nodes, 'node')} of the Ray cluster at {link.address}",),
            cpus=int(wanted["CPU"]), memory_gb=min((each.get("memory", 0.0) for each in answer["nodes"]), default=0.0) // 1e9,
            devices=(gpus.named(*[gpu.name] * gpu.count),) * shape.nodes if gpu else (), remote=True,
        )  # fmt: skip
        return RaySurvey(plan, requirements, link, (wanted,) * shape.nodes)

    def acquire(self, survey: RaySurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Have Ray place the group and wait for it; then set its nodes up side by side."""
        held = survey.held
        held.job = job_id
        with contextlib.suppress(OSError):  # a home that cannot be written
            atomic.write(_note(job_id), survey.link.address.encode())
        names = _names(_placed(survey, say))
        say(StartStep(f"Ray has given {', '.join(names)} …", "connecting", names))
        places = [RayNode(survey.link, job_id, index, name) for index, name in enumerate(names)]
        held.machines.extend(ssh.side_by_side(functools.partial(_reached, survey.requirements), places))
        held.plan = ssh.measured(survey.plan, survey.held.machines, survey.requirements)
        ssh.set_up(held.machines, survey.requirements, say)
        return [_node(one, place, f"{job_id}-{place.index}") for one, place in zip(held.machines, places, strict=True)]

    def attach(self, plan: Plan, accesses: Sequence[RayAccess]) -> tuple[RaySurvey, Sequence[Node]]:
        """The nodes of a pool that another notebook of this user has made from this plan; no node is connected to yet."""
        first, link = accesses[0], RayLink(accesses[0].address)
        places = [RayNode(link, one.job, index, one.host) for index, one in enumerate(accesses)]
        if (gone := places[0].fate()) and all(place.fate() for place in places):
            link.close()
            raise CloudError("missing", "", gone)
        machines = [
            ssh.HostMachine(place.name, place.reconnected, None, one.installation.facts, one.secret, one.installation)
            for place, one in zip(places, accesses, strict=True)
        ]
        held = HeldGroup(first.job, machines, plan, ready=True)
        survey = RaySurvey(plan, first.installation.requirements, link, held=held)
        return survey, [_node(*each) for each in zip(machines, places, (one.daemon for one in accesses), strict=True)]

    def pools(self) -> Sequence[ListedPool]:
        """Pools in the cluster that `RAY_ADDRESS` or this machine leads to, and in those where pools were made from here."""
        notes = [each.read_text() for each in _note("*").parent.glob("*.ray")]
        listed = []
        for address in dict.fromkeys(notes or [_address()]):
            with contextlib.closing(RayLink(address)) as link:
                (answer,) = link.ask({"do": "pools"})
            where = f"the Ray cluster at {link.address}"
            listed += [ListedPool(job.rpartition("-")[0], job, where, state.lower()) for job, state in answer["pools"]]
        return listed

    def end(self, job_id: str) -> None:
        """Remove the group and actors of a pool."""
        note = _note(job_id)
        with contextlib.closing(RayLink(note.read_text() if note.exists() else _address())) as link:
            _end(link, job_id)


def _address() -> str:
    return os.environ.get("RAY_ADDRESS") or "auto"


def _note(job: str) -> Path:
    """What says in which cluster a pool is, for who ends it without its notebook."""
    return user_state_path("skymagic") / "pools" / f"{job}.ray"


def _end(link: RayLink, job: str) -> None:
    """Raises ProvisionError where something is left."""
    if left := [each for answer in link.ask({"do": "end", "job": job}) for each in answer["left"]]:
        raise ProvisionError(f"Ray has not removed {', '.join(left)} (namespace skymagic) of pool {job}")
    _note(job).unlink(missing_ok=True)


def bundle(request: PoolRequest, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Ray's resources of each node of a pool; pure. Raises RequestError for GPUs that no node has.

    Args:
        nodes: what the cluster's nodes have.
    """
    shape = topology(request)
    wanted: dict[str, float] = {"CPU": max(int(request.cpus.amount) if request.cpus else 1, shape.procs_per_node)}
    if request.memory:
        wanted["memory"] = request.memory.amount * 1e9
    if not gpus.asked(request) or request.gpu is None:
        return wanted
    return wanted | _gpu_resources(request.gpu, nodes)


def _gpu_resources(gpu: Accelerator | GpuChoice, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    most = max((each.get("GPU", 0.0) for each in nodes), default=0.0)
    if isinstance(gpu, GpuChoice):
        if gpu.words:
            raise RequestError(f"--gpu {gpu}: Ray chooses the GPUs: write how many, as in --gpu {len(gpu.words)}")
        if not most and gpu.count is None:
            raise RequestError("--gpu all: no node of the cluster has GPUs now: write how many")
        return {"GPU": float(gpu.count or most)}
    kinds = dict.fromkeys(key.removeprefix(KIND) for each in nodes for key in each if key.startswith(KIND))
    named = next((each for each in kinds if matches(gpu.name, each)), None)
    return {"GPU": float(gpu.count), f"{KIND}{named or gpu.name}": 0.001}


def _placed(survey: RaySurvey, say: Say) -> list[dict[str, str]]:
    """The nodes that Ray has given, once it has. Raises ProvisionError."""
    job = survey.held.job
    folder = slurm_jobs.holder_folder(job, "@NODE@")
    keeper = {"job": job, "bundles": survey.bundles, "folder": folder, "script": slurm_jobs.holder_script(folder)}
    for one in survey.link.ask({"do": "place", "keeper": keeper}, None):
        if "nodes" in one:
            return list(one["nodes"])
        if words := one.get("waits"):
            say(StartStep(f"Ray has no place yet for {words}", "requested", step=f"waits for {words}"))
    raise ProvisionError(f"the connection to the Ray cluster at {survey.link.address} is lost")


def _names(nodes: Sequence[Mapping[str, str]]) -> list[str]:
    """What nodes are called: by their hosts, and by Ray's number where two are on one."""
    hosts = [each["host"] for each in nodes]
    return [
        host if hosts.count(host) == 1 else f"{host}-{each['ray'][:6]}" for host, each in zip(hosts, nodes, strict=True)
    ]


def _reached(requirements: Requirements, place: RayNode) -> ssh.HostMachine:
    return ssh.inspected(place.name, place.reconnected, place.connection(), requirements)


def _node(machine: ssh.HostMachine, place: RayNode, daemon: str) -> Node:
    node = machine.node(place.index, daemon)
    access = RayAccess(**vars(node.access), address=place.link.address, job=place.job)
    return replace(node, access=access, fate=place.fate)
