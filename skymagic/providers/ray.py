"""Ray provider: one placement group per pool, removed at the end.

Each node is reached through an actor and then used like an SSH host.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.errors import ProvisionError, RequestError
from skymagic.plan import gpus
from skymagic.plan.accelerators import Accelerator, GpuChoice, matches
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest, unsupported_options
from skymagic.plan.units import count
from skymagic.providers import ssh
from skymagic.providers.channel_key import ChannelKey
from skymagic.providers.cluster import (
    ClusterAccess,
    ClusterNode,
    ClusterSurvey,
    check_gpu_count,
    cpus_of,
)
from skymagic.providers.holder import holder_folder, holder_script
from skymagic.providers.provider import RemotePool, RemotePools, Say
from skymagic.ssh.command import SocketChannel
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.process import START_TIMEOUT, Channel
from skymagic.ssh.programs import Programs
from skymagic.ssh.sealed import SealedChannel, bootstrap
from skymagic.wire import atomic, debug_log, sealed, tls
from skymagic.wire.threads import start_all
from skymagic.wire.untrusted import sanitized_line

logger = logging.getLogger(__name__)

DRIVER = Path(__file__).with_name("ray_driver.py")
"""Program of the process that is connected to Ray."""
CONNECT_SECONDS = 5.0
SETTINGS = b"\x04"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
"""Opening bytes of a gRPC connection, the protocol Ray uses.

`SETTINGS` is the type of the first frame that both sides send (RFC 9113).
"""
# Ray Client may need 40 s to notice that it must retry
ANSWER_SECONDS, CLIENT_SECONDS = 60.0, 120.0
HERE = Programs("sh", "PATH|HOME")
"""This machine, whose home folder may be shared with the cluster's nodes."""
KIND = "accelerator_type:"
"""Prefix under which Ray lists a GPU's type among a node's resources."""


# ---------------------------------------------------------------------------------- the link to Ray


@dataclass(frozen=True)
class PlacedNode:
    """Node on which Ray has placed a pool.

    Attributes:
        host: its host name.
        ray_id: Ray's ID of the node.
        address: the address at which Ray's other nodes reach it.
    """

    host: str
    ray_id: str
    address: str


@dataclass(frozen=True)
class DriverAnswer:
    """Answer of the process that is connected to Ray; the request determines its fields.

    Attributes:
        error: why the request was refused; "" if it was not.
        resources: those of each node in the cluster (``nodes``).
        waits: what a pool waits for (``allocate``).
        placed: the pool's nodes (``allocate``, at its end).
        fate: why a node is gone; "" if it is not (``fate``).
        left: names that remain after a pool's end (``end``).
        pools: job IDs with Ray's states of their groups (``pools``).
    """

    error: str = ""
    resources: tuple[Mapping[str, float], ...] = ()
    waits: str = ""
    placed: tuple[PlacedNode, ...] = ()
    fate: str = ""
    left: tuple[str, ...] = ()
    pools: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, line: bytes) -> DriverAnswer:
        """Return the answer in a line of JSON."""
        answer = json.loads(line)
        return cls(
            error=answer.get("error", ""),
            resources=tuple(answer.get("resources", ())),
            waits=answer.get("waits", ""),
            placed=tuple(
                PlacedNode(node["host"], node["ray_id"], node["address"])
                for node in answer.get("placed", ())
            ),
            fate=answer.get("fate", ""),
            left=tuple(answer.get("left", ())),
            pools=tuple((job, state) for job, state in answer.get("pools", ())),
        )


class RayLink:
    """The process that is connected to Ray. Started on first use, and restarted if it has ended.

    Ray ends it when the cluster's head is gone.

    Args:
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._lost: float | None = None
        """Time since when the address has not answered."""
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(
        self, request: Mapping[str, object], seconds: float | None = ANSWER_SECONDS
    ) -> Iterator[DriverAnswer]:
        """Yield the answers to a request as they arrive. Can be interrupted.

        Raises ProvisionError if no cluster answers, or it refuses the request.
        """
        near, far = socket.socketpair()
        answer = None
        with near, near.makefile("rb") as lines:
            near.settimeout(seconds)
            with far:
                self.send(request, (far,))
            try:
                for line in lines:
                    answer = DriverAnswer.parse(line)
                    if answer.error:
                        raise ProvisionError(f"Ray: {answer.error}", code="ray-refused")
                    yield answer
            except TimeoutError:
                raise ProvisionError(
                    f"the Ray cluster at {self.address} does not answer", code="ray-unreached"
                ) from None
        if answer is None:  # Ray has ended the process that asks
            raise ProvisionError(
                f"the connection to the Ray cluster at {self.address} is lost", code="ray-lost"
            )

    def send(self, request: Mapping[str, object], sockets: Sequence[socket.socket]) -> None:
        """Send a request together with the sockets for its answers.

        Raises ProvisionError if no cluster answers.
        """
        with self._lock:
            for _ in range(2):
                if self._program is None or self._program.poll() is not None:
                    self._start()
                assert self._control is not None and self._program is not None
                try:
                    socket.send_fds(
                        self._control,
                        [json.dumps(request).encode()],
                        [end.fileno() for end in sockets],
                    )
                    return
                except OSError:  # Ray is ending it
                    logger.warning("Ray's process is ending: pid=%s", self._program.pid)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._program.wait(CONNECT_SECONDS)
            raise ProvisionError(
                f"the connection to the Ray cluster at {self.address} is lost", code="ray-lost"
            )

    def lost(self) -> str:
        """Return a message that the head is gone, or "" if that is not known from here.

        Returns it only after Ray has ended the nodes too, which wait some time for their head.
        """
        if (
            self._lost is None
            or self.address.startswith("ray://")
            or time.monotonic() - self._lost < _head_seconds()
        ):
            return ""
        return (
            f"the head of the Ray cluster at {self.address} is gone, and Ray ends nodes "
            f"that do not reach it for {_head_seconds():.0f} s"
        )

    def _start(self) -> None:
        try:
            _reach(self.address)
        except ProvisionError:
            # if Ray ended the driver, it had already waited as long as the nodes do
            self._lost = self._lost or time.monotonic() - (
                _head_seconds() if self._program else 0.0
            )
            raise
        self._lost = None
        self._stop()
        self._control, driver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(
            CLIENT_SECONDS if self.address.startswith("ray://") else ANSWER_SECONDS
        )
        try:
            with driver_end:
                arguments = (str(driver_end.fileno()), self.address)
                self._program = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        str(DRIVER),
                        *arguments,
                        *debug_log.arguments_beside("ray"),
                    ],
                    pass_fds=[driver_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C is for the notebook
                )
            greeting = json.loads(
                self._control.recv(1 << 18) or b'{"error": "its driver ended without a word"}'
            )
            if "error" in greeting:
                raise ProvisionError(refusal(self.address, greeting["error"]), code="ray-refused")
        except TimeoutError:
            self._stop()
            raise ProvisionError(
                f"the Ray cluster at {self.address} does not answer", code="ray-unreached"
            ) from None
        except BaseException:
            self._stop()
            raise
        self._control.settimeout(None)
        self.address = greeting["address"]
        logger.info("Ray's process runs: pid=%s address=%s", self._program.pid, self.address)

    def close(self) -> None:
        """Disconnect from the cluster. Twice is safe."""
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


def _head_seconds() -> float:
    """Return how long Ray's nodes wait for a lost head, in seconds.

    Reads Ray's own variable, which applies both to the cluster and here, or uses its default.
    """
    return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", 60.0))  # noqa: SIM112


def _reach(address: str) -> None:
    """Raise ProvisionError if nothing listens at the address, or something other than Ray does.

    Ray itself would retry for half a minute.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection,
            contextlib.suppress(TimeoutError),
        ):
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(HELLO)
                if connection.recv(4, socket.MSG_WAITALL)[3:] != SETTINGS:
                    raise OSError("what listens there is not Ray")
    except (OSError, ValueError) as problem:
        raise ProvisionError(
            f"no Ray cluster answers at {address}: "
            f"{getattr(problem, 'strerror', None) or problem}\n"
            "  `ray status` on its head says whether it runs; its port is 6379, "
            "and 10001 for ray:// addresses",
            code="ray-unreached",
        ) from None


def refusal(address: str, reason: str) -> str:
    """Explain why Ray refused the connection. Pure."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", reason)
    if "ersion mismatch" in reason and len(versions) == 2:
        (ray, python), (own, own_python) = versions
        return (
            f"the Ray cluster at {address} has Ray {ray} and Python {python}, "
            f"this notebook Ray {own} and Python {own_python}: Ray works "
            "only where both are the same\n"
            f"  run the notebook with Python {python} and pip install ray=={ray}"
        )
    if address == "auto" and "Could not find any running Ray instance" in reason:
        return (
            "--address auto: no Ray cluster runs on this machine, and RAY_ADDRESS is not set; "
            "write --address HOST:PORT, or ray://HOST:10001"
        )
    message = f"the Ray cluster at {address} lets nobody in: {' '.join(reason.split())[:1000]}"
    # gRPC crashes in the process that Ray's server forks
    if "Starting Ray client server failed" in reason:
        message += (
            "\n  Ray loses some clients (ray-project/ray#63202): try again, "
            "or start the head with GRPC_ENABLE_FORK_SUPPORT=0"
        )
    return message


class RayChannel(SocketChannel):
    """A shell on a node whose streams are forwarded by the link's process.

    Args:
        opening: starts the shell, given a command line and the far ends of three sockets: its
            streams, its standard error, and its exit status.
    """

    def __init__(self, opening: Callable[[str, Sequence[socket.socket]], None]) -> None:
        super().__init__()
        self._opening = opening
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

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._told.shutdown(socket.SHUT_RDWR)
        self._told.close()
        self._their_told.close()


@dataclass(frozen=True)
class RayNode(ClusterNode):
    """A node of a pool's placement group, with its index in the group."""

    link: RayLink
    index: int
    host: str
    """Address of the node in the cluster's network."""
    key: ChannelKey = field(repr=False)

    @property
    def channel_key(self) -> str:
        """Key of the node's channel, see `ClusterAccess`."""
        return self.key.secret

    @property
    def location(self) -> tuple[str, ...]:
        """Address of the cluster, and of the node."""
        return self.link.address, self.host

    def address(self) -> str:
        """Return the node's address, or "" outside of the cluster."""
        return "" if self.link.address.startswith("ray://") else self.host

    def connection(self) -> ChannelConnection:
        """Return a connection that starts shells on the node through its actor.

        Each shell has an encrypted session, because Ray's calls are unencrypted.
        """
        which = {"job": self.job_id, "index": self.index, "key": self.key.secret}

        def shell(command: str, ends: Sequence[socket.socket]) -> None:
            self.link.send({"do": "pass_on", "command": command, **which}, ends)

        def opening(_: float) -> Channel:
            return SealedChannel(RayChannel(shell), self.name, self.job_id, self.key)

        return ChannelConnection(self.name, f"ray status --address {self.link.address}", opening)

    def introduce(self, pem: str) -> None:
        """Give the node the channel key, which every later call needs. Raises HostError.

        Args:
            pem: certificate and key whose fingerprint the node was started with.
        """

        def session(_: str, ends: Sequence[socket.socket]) -> None:
            self.link.send({"do": "introduce", "job": self.job_id, "index": self.index}, ends)

        channel = SealedChannel(RayChannel(session), self.name, self.job_id, self.key, pem)
        channel.introduce(START_TIMEOUT)

    def fate(self) -> str:
        """Return Ray's reason why the node is gone, or "" if it is present or unknown."""
        question = {"do": "fate", "job": self.job_id, "index": self.index}
        # without the head, the first attempt may block until Ray ends the process that asks
        for _ in range(2):
            with contextlib.suppress(ProvisionError):
                return "".join(answer.fate for answer in self.link.ask(question))
        return self.link.lost()


# ------------------------------------------------------------------------------------ the provider


@dataclass(frozen=True)
class RaySurvey(ClusterSurvey):
    """A resource request; owns the link and the placement group.

    Attributes:
        bundles: Ray's resources of each node.
    """

    link: RayLink
    bundles: tuple[Mapping[str, float], ...] = ()

    def give_back(self) -> str:
        """Remove the group and its actors, unless they are gone with the head."""
        if reason := self.link.lost():
            logger.warning("placement group not removed: job=%s", self.allocation.job_id)
            return reason
        _end(self.link, self.allocation.job_id)
        return "the pool's placement group is removed"

    def leave(self) -> None:
        """Close the link. Twice is safe."""
        self.link.close()


class Ray:
    """Provider for a Ray cluster, used from one of its machines or through a ``ray://`` address."""

    def plan(self, request: PoolRequest, say: Say) -> RaySurvey:
        """Query what the cluster offers. Starts nothing on it."""
        mistakes = unsupported_options(request, "ray")
        if importlib.util.find_spec("ray") is None:
            missing = (
                "--provider ray needs Ray in the notebook's environment, in the cluster's version: "
            )
            mistakes.append(f'{missing}pip install "skymagic[ray]"')
        if mistakes:
            raise RequestError(mistakes)
        shape = topology(request)
        address = request.address or _address()
        say(f"connecting to Ray at {address} …")
        link = RayLink(address)
        try:
            # runs while the driver imports Ray, which takes most of a second
            (needed,) = start_all([lambda: ssh.needs(request, shape, say)], name="skymagic-needs")
            (answer,) = link.ask({"do": "nodes"})
            resources = bundle(request, answer.resources)
            image, requirements = needed.result()
        except BaseException:
            link.close()
            raise
        gpu = request.accelerator
        plan = Plan(
            provider="ray",
            request=request,
            topology=shape,
            image=image,
            hosts=(f"{count(shape.nodes, 'node')} of the Ray cluster at {link.address}",),
            cpus=int(resources["CPU"]),
            memory_gb=min((node.get("memory", 0.0) for node in answer.resources), default=0.0)
            // 1e9,
            devices=(gpus.devices_by_name(*[gpu.name] * gpu.count),) * shape.nodes if gpu else (),
            remote=True,
        )
        return RaySurvey(plan, requirements, link, (resources,) * shape.nodes)

    def acquire(self, survey: RaySurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Have Ray place the group, wait for it, then set its nodes up in parallel."""
        survey.allocation.job_id = job_id
        survey.allocation.key = key = ChannelKey(job_id, HERE.run)
        key.share()
        atomic.keep(_note(job_id), survey.link.address.encode())
        pem = tls.certificate()
        allocated = _wait_until_placed(survey, pem, say)
        nodes = [
            RayNode(name, job_id, survey.link, index, node.address, key)
            for index, (name, node) in enumerate(zip(_names(allocated), allocated, strict=True))
        ]
        ssh.call_concurrently(lambda node: node.introduce(pem), nodes)
        hold = {"do": "hold", "job": job_id, "count": len(nodes), "key": key.secret}
        next(survey.link.ask(hold))
        return survey.prepare_nodes(nodes, "Ray has given", say)

    def attach(
        self, plan: Plan, accesses: Sequence[ClusterAccess]
    ) -> tuple[RaySurvey, Sequence[Node]]:
        """Return the nodes of a pool that another notebook of this user created from this plan.

        Connects to no node yet.
        """
        survey = RaySurvey(
            plan, accesses[0].installation.requirements, RayLink(accesses[0].location[0])
        )
        key = ChannelKey(accesses[0].job_id, HERE.run, accesses[0].channel_key)
        survey.allocation.key = key
        nodes = [
            RayNode(access.host, access.job_id, survey.link, index, access.location[1], key)
            for index, access in enumerate(accesses)
        ]
        return survey, survey.adopt_nodes(nodes, accesses)

    def pools(self) -> RemotePools:
        """Return the pools in all clusters known from here.

        These are the clusters where pools were created from this machine or, if none were, the
        cluster named by `RAY_ADDRESS` or running on this machine.
        """
        notes = [file.read_text() for file in _note("*").parent.glob("*.ray")]
        listed = []
        for address in dict.fromkeys(notes or [_address()]):
            with contextlib.closing(RayLink(address)) as link:
                (answer,) = link.ask({"do": "pools"})
            cluster = f"the Ray cluster at {link.address}"
            listed += [
                RemotePool(job.rpartition("-")[0], job, cluster, state.lower())
                for job, state in answer.pools
            ]
        return RemotePools(tuple(listed))

    def end(self, pool: RemotePool) -> str:
        """Remove the group and actors of a pool."""
        note = _note(pool.job_id)
        with contextlib.closing(RayLink(note.read_text() if note.exists() else _address())) as link:
            _end(link, pool.job_id)
        return ""


def _address() -> str:
    return os.environ.get("RAY_ADDRESS") or "auto"


def _note(job: str) -> Path:
    """Return the file that records a pool's cluster, so that any process can end the pool."""
    return atomic.state_folder("pools") / f"{job}.ray"


def _end(link: RayLink, job: str) -> None:
    """Remove a pool from Ray. Raises ProvisionError if something remains."""
    if remaining := [
        name for answer in link.ask({"do": "end", "job": job}) for name in answer.left
    ]:
        raise ProvisionError(
            f"Ray has not removed {', '.join(remaining)} (namespace skymagic) of pool {job}",
            code="not-released",
            names=remaining,
        )
    _note(job).unlink(missing_ok=True)
    ChannelKey(job, HERE.run).drop()


def bundle(request: PoolRequest, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return Ray's resources for each node of a pool. Pure.

    Args:
        nodes: resources of the cluster's nodes.

    Raises:
        RequestError: no node has the requested GPUs.
    """
    resources: dict[str, float] = {"CPU": cpus_of(request)}
    if request.memory:
        resources["memory"] = request.memory.amount * 1e9
    if not gpus.requests_gpus(request) or request.gpu is None:
        return resources
    return resources | _gpu_resources(request.gpu, nodes)


def _gpu_resources(
    gpu: Accelerator | GpuChoice, nodes: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    most = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    check_gpu_count(gpu, "Ray")
    if isinstance(gpu, GpuChoice):
        if not most and gpu.count is None:
            raise RequestError("--gpu all: no node of the cluster has GPUs now: write how many")
        return {"GPU": float(gpu.count or most)}
    kinds = dict.fromkeys(
        key.removeprefix(KIND) for node in nodes for key in node if key.startswith(KIND)
    )
    kind = next((name for name in kinds if matches(gpu.name, name)), None)
    return {"GPU": float(gpu.count), f"{KIND}{kind or gpu.name}": 0.001}


def _wait_until_placed(survey: RaySurvey, pem: str, say: Say) -> tuple[PlacedNode, ...]:
    """Wait until Ray has placed the pool and return its nodes. Raises ProvisionError.

    Args:
        pem: certificate and key of the notebook for the session that gives nodes the channel key.
    """
    job = survey.allocation.job_id
    folder = holder_folder(job, "@NODE@")
    request = {
        "do": "allocate",
        "job": job,
        "bundles": survey.bundles,
        "folder": folder,
        "script": holder_script(folder, job),
        "introduction": bootstrap(job, sealed.fingerprint_of(pem)),
    }
    for answer in survey.link.ask(request, None):
        if answer.placed:
            logger.info("Ray has placed the pool: job=%s nodes=%s", job, len(answer.placed))
            return answer.placed
        if answer.waits:
            logger.info("Ray has no place yet: job=%s missing=%s", job, answer.waits)
            say(
                StartStep(
                    f"Ray has no place yet for {answer.waits}",
                    "requested",
                    step=f"waits for {answer.waits}",
                )
            )
    raise ProvisionError(
        f"the connection to the Ray cluster at {survey.link.address} is lost", code="ray-lost"
    )


def _names(nodes: Sequence[PlacedNode]) -> list[str]:
    """Return display names of nodes: host names, with Ray's ID added if two nodes share a host."""
    hosts = [sanitized_line(node.host) for node in nodes]
    return [
        host if hosts.count(host) == 1 else f"{host}-{node.ray_id[:6]}"
        for host, node in zip(hosts, nodes, strict=True)
    ]
