"""Ranks on this machine, in the notebook's own interpreter. Nodes are groups of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skymagic import plugins
from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.errors import PoolError, RequestError, collect_mistakes
from skymagic.plan import gpus, image
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.limits import MOST_DESCRIPTORS
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory, Plan
from skymagic.plan.requests import PoolRequest
from skymagic.plugins import table
from skymagic.plugins._torch.plugin import DEFAULT_CUDA, WHEELS
from skymagic.providers.provider import Say, Survey
from skymagic.wire import processes
from skymagic.wire.codec import Transport, write_all
from skymagic.wire.processes import status_words

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
COMPLAINT = 4000
"""Maximum number of bytes of an agent's last output that an error contains."""
DRIVER_TIMEOUT = 20.0
"""Timeout for nvidia-smi in seconds.

Without its persistence daemon a driver takes a few seconds per GPU, and a failed driver never
answers.
"""
CUDA_WHEELS = WHEELS + DEFAULT_CUDA


class Local:
    """Provider that uses this machine and needs nothing else."""

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """Check the request against this machine."""
        mistakes: list[str] = []
        requested_image = image.Image(pip=request.pip)
        with collect_mistakes(mistakes):
            local_inventory = inventory(request)
            local_plan = plan(request, replace(local_inventory, descriptors=descriptors()))
            shape, gpus_per_node = (
                local_plan.topology,
                len(local_plan.devices[0]) if local_plan.devices else 0,
            )
            cluster = plugins.Cluster(
                shape.nodes, shape.procs_per_node, request.accelerator, gpus_per_node
            )
            requested_image = table.image_for(local_plan.request.plugins, local_plan.image, cluster)
        if requested_image.pip:
            mistakes += image.explain_unsatisfied(
                requested_image,
                {name: _version(name) for name in image.projects(requested_image.pip)},
            )
        if mistakes:
            raise RequestError(mistakes)
        local_plan = replace(local_plan, image=requested_image)
        return Detached(local_plan) if request.detached else Survey(local_plan)

    def acquire(self, survey: Survey, job_id: str, say: Say) -> Sequence[Node]:
        """Return one node: a single agent serves all ranks on this machine."""
        if isinstance(survey, Detached):
            return [survey.machine.node(f"{job_id}-0", run)]
        return [
            Node(0, socket.gethostname(), lambda state: run(processes.AGENT), run, address=ADDRESS)
        ]

    def attach(
        self, plan: Plan, accesses: Sequence[DetachedAccess]
    ) -> tuple[Survey, Sequence[Node]]:
        """Return this machine for a pool that another notebook created here with ``--detach``."""
        survey = Detached(plan, LocalMachine(accesses[0]))
        return survey, [survey.machine.node(accesses[0].daemon, run)]


class ChildTransport:
    """An agent or another process, run as a child process that talks over pipes.

    Args:
        command: command line to run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a terminal's Ctrl-C is for the notebook, which passes it on
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        self._reading = threading.Lock()
        """Held while a thread reads.

        A descriptor closed at that moment may be reused for another pipe.
        """
        self._over = False

    def read(self) -> bytes:
        """Read bytes from the agent."""
        with self._reading:
            return b"" if self._over else os.read(self._out, 1 << 16)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes to the agent."""
        if self._over or self._child.stdin is None or self._child.stdin.closed:
            # its descriptor may belong to another file by now
            raise BrokenPipeError("the agent has ended")
        write_all(self._in, data)

    def complaint(self) -> str:
        """Return the agent's standard error, or a message on how it ended if that is empty.

        Once it runs, the agent writes to a log; standard error holds errors before its start and
        about its failure.
        """
        if not self._reading.acquire(timeout=1.0):  # its output has not ended
            return ""
        try:
            if self._errors.closed:
                return ""
            size = os.fstat(self._errors.fileno()).st_size
            text = (
                os.pread(self._errors.fileno(), COMPLAINT, max(0, size - COMPLAINT))
                .decode(errors="replace")
                .strip()
            )
        finally:
            self._reading.release()
        # its output has ended, so the process is about to end too
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._child.wait(timeout=1.0)
            return text or (status_words(status) if status else "")
        return text

    def close(self) -> None:
        """Close the child's input, which makes it end everything. Kill it if it does not."""
        child = self._child
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        try:
            child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            logger.warning("child process is killed, because it did not end: pid=%s", child.pid)
            child.kill()
            child.wait()
        self._over = True
        # A reader sees the end of the output now, unless a leftover process keeps the pipe open.
        alone = self._reading.acquire(timeout=1.0)
        if child.stdout is not None:
            child.stdout.close()
        self._errors.close()
        if alone:
            self._reading.release()


def run(module: str, *arguments: str) -> ChildTransport:
    """Run ``python -m module arguments`` with the notebook's own interpreter.

    A random.py next to the notebook does not shadow Python's. Ranks do search that folder, as
    notebooks do: IPython takes care of that.
    """
    logger.debug("child process starts: module=%s", module)
    # run from a source checkout rather than installed
    in_checkout = Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    safe = () if in_checkout else ("-P",)
    return ChildTransport((sys.executable, *safe, "-m", module, *arguments))


def descriptors() -> int:
    """Return how many files a process of a pool may open: its agent raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)


def inventory(request: PoolRequest | None = None) -> Inventory:
    """Return this machine's resources.

    Lists GPUs only if the request may take some, because a driver may need seconds to answer.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    local_inventory = Inventory(
        socket.gethostname(),
        cpus,
        memory,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )
    if request is None or not gpus.uses_gpus(request):
        return local_inventory
    # the pool's own setting takes precedence over the notebook's environment
    visible_devices = dict(request.env).get(
        "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    devices, complaint = driver()
    return replace(
        local_inventory,
        gpus=gpus.visible(devices, visible_devices),
        unusable=complaint or _without_cuda(gpus.frameworks(request), devices),
    )


def driver() -> tuple[tuple[GpuDevice, ...], str]:
    """List this machine's GPUs as reported by NVIDIA's driver, and the reason if they are unusable.

    Asking torch instead would open the GPUs in this process.
    """
    if shutil.which("nvidia-smi") is None:
        if sys.platform == "darwin":
            return (), "there is no process group for Apple's GPU (MPS)"
        if Path("/dev/kfd").exists():
            return (), "AMD's GPUs (ROCm) are not supported"
        return (), ""
    rows, complaint = _smi(f"--query-gpu={gpus.FIELDS}")
    if "not a valid field" in complaint:  # a driver before MIG
        rows, complaint = _smi(f"--query-gpu={gpus.FIELDS.rpartition(',')[0]}")
    if complaint:
        return (), f"NVIDIA's driver does not answer ({complaint})"
    tree, _ = _smi("-L")
    applications, _ = _smi(f"--query-compute-apps={gpus.APPLICATIONS}")
    return gpus.parse_nvidia_smi(rows, tree, applications, _reserved_sockets(), (os.getpid(),)), ""


def _smi(question: str) -> tuple[list[str], str]:
    """Return the lines that nvidia-smi printed, and its error message."""
    command = [
        "nvidia-smi",
        question,
        *([] if question == "-L" else ["--format=csv,noheader,nounits"]),
    ]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DRIVER_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi took more than {DRIVER_TIMEOUT:.0f} s"
    except OSError as problem:
        return [], f"nvidia-smi: {problem.strerror}"
    if answer.returncode:
        return [], (answer.stdout + answer.stderr).strip()[
            -300:
        ] or f"nvidia-smi ended with {answer.returncode}"
    return [line for line in answer.stdout.splitlines() if line.strip()], ""


def _reserved_sockets() -> list[str]:
    """Return the names of the sockets that agents on this machine use to reserve GPUs."""
    try:
        with open("/proc/net/unix", errors="replace") as file:
            return re.findall(rf"@({gpus.HOLD}\S+)", file.read())
    except OSError:  # no Linux: nobody holds anything
        return []


def _without_cuda(frameworks: Collection[str], devices: Sequence[GpuDevice]) -> str:
    """Explain which installed framework cannot use this machine's GPUs, and how to fix it.

    Reads the versions of the distributions, because importing a framework takes seconds.
    """
    if not devices:
        return ""
    problems = []
    if "torch" in frameworks and (label := _version("torch")).endswith("+cpu"):
        problems.append(
            f"torch {label} is built without CUDA "
            f"(install one with: pip install torch --index-url {CUDA_WHEELS})"
        )
    if (
        "jax" in frameworks
        and _version("jax")
        and not any(_version(f"jax-cuda{major}-plugin") for major in (12, 13))
    ):
        problems.append(
            f"jax {_version('jax')} is installed without CUDA (pip install 'jax[cuda12]' adds it)"
        )
    return "; ".join(problems)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# -- Detached pools: a daemon keeps their agent, as on another machine, and lets notebooks attach --


@dataclass(frozen=True)
class DetachedAccess:
    """Everything another notebook on this machine needs to reach the daemon.

    Attributes:
        daemon: name of the daemon.
        secret: secret that the daemon expects from its notebooks.
        machine: machine it runs on.
        python: interpreter of its ranks, which a notebook must share.
    """

    daemon: str
    secret: str = field(repr=False)
    machine: str = field(default_factory=socket.gethostname)
    python: str = sys.executable


class LocalMachine:
    """This machine, and the tunnel to the agent on it.

    Args:
        access: access to an existing agent; None for a new one.

    Raises:
        PoolError: the agent is on another machine or uses another Python; the message gives the
            fix.
    """

    def __init__(self, access: DetachedAccess | None = None) -> None:
        if access is not None:
            _check(access)
        self._tunnel = AgentTunnel(access.secret if access is not None else "")

    def node(self, daemon: str, run: Callable[..., Transport]) -> Node:
        """Return the `Node` that a pool uses.

        Args:
            daemon: name of the daemon that keeps the agent running.
            run: starts ``python -m module arguments`` here.
        """

        def opened(state: Callable[[str], None]) -> Transport:
            return self._tunnel.open(lambda: run(processes.ATTACH, daemon), state)

        access = DetachedAccess(daemon, self._tunnel.secret)
        return Node(
            0,
            socket.gethostname(),
            opened,
            run,
            access=access,
            leave=self._tunnel.leave,
            address=ADDRESS,
        )

    def close(self) -> None:
        """End the agent and the tunnel. Twice is safe."""
        self._tunnel.close()


@dataclass(frozen=True)
class Detached(Survey):
    """Plan of a pool whose agents outlive their notebook.

    Owns the tunnels to the agents: the one here, and those from the head to other nodes.
    """

    machine: LocalMachine = field(default_factory=LocalMachine)
    tunnels: tuple[AgentTunnel, ...] = ()

    def close(self) -> None:
        """End all agents and tunnels. Twice is safe."""
        self.machine.close()
        for tunnel in self.tunnels:
            tunnel.close()


def _check(access: DetachedAccess) -> None:
    """Raise PoolError if the agent is out of reach or the notebook cannot work with its ranks."""
    if access.machine != socket.gethostname():
        raise PoolError(
            f"it runs on {access.machine}: attach from a notebook there",
            code="other-machine",
            host=access.machine,
        )
    if access.python != sys.executable:
        raise PoolError(
            f"its ranks run in {access.python}: attach from a notebook with that interpreter",
            code="other-python",
        )
