"""Ranks on this machine, in the notebook's own interpreter; nodes are groups of ranks."""

from __future__ import annotations

import contextlib
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
from skymagic.errors import PoolError, RequestError, noted_in
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

ADDRESS = "127.0.0.1"
COMPLAINT = 4000
"""Bytes of what an agent has said last that an error has, at most."""
DRIVER_TIMEOUT = 20.0
"""Seconds for nvidia-smi: without its persistence daemon a driver takes some for each GPU, and one that has failed never answers."""
CUDA_WHEELS = WHEELS + DEFAULT_CUDA


class Local:
    """The provider that needs nothing."""

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """Check the request against this machine."""
        mistakes: list[str] = []
        asked = image.Image(pip=request.pip)
        with noted_in(mistakes):
            here = inventory(request)
            made = plan(request, replace(here, descriptors=descriptors()))
            shape, each = made.topology, len(made.devices[0]) if made.devices else 0
            cluster = plugins.Cluster(shape.nodes, shape.procs_per_node, request.accelerator, each)
            asked = table.image_for(made.request.plugins, made.image, cluster)
        if asked.pip:
            mistakes += image.missing(
                asked, {name: _version(name) for name in image.projects(asked.pip)}
            )
        if mistakes:
            raise RequestError(mistakes)
        made = replace(made, image=asked)
        return Detached(made) if request.detached else Survey(made)

    def acquire(self, survey: Survey, job_id: str, say: Say) -> Sequence[Node]:
        """One agent serves all ranks of this machine."""
        if isinstance(survey, Detached):
            return [survey.here.node(f"{job_id}-0", run)]
        return [
            Node(0, socket.gethostname(), lambda state: run(processes.AGENT), run, address=ADDRESS)
        ]

    def attach(
        self, plan: Plan, accesses: Sequence[DetachedAccess]
    ) -> tuple[Survey, Sequence[Node]]:
        """This machine, for a pool that another notebook has made here with ``--detach``."""
        survey = Detached(plan, Here(accesses[0]))
        return survey, [survey.here.node(accesses[0].daemon, run)]


class ChildTransport:
    """An agent, or another process, as a child that is spoken to over pipes.

    Args:
        command: what to run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,  # a terminal's Ctrl-C is for the notebook, which passes it on
        )  # fmt: skip
        assert self._child.stdin is not None and self._child.stdout is not None
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        self._reading = threading.Lock()
        """Held while somebody reads: a descriptor that is closed at that moment may come to be another pipe's."""
        self._over = False

    def read(self) -> bytes:
        """Bytes from the agent."""
        with self._reading:
            return b"" if self._over else os.read(self._out, 1 << 16)

    def write(self, data: bytes | memoryview) -> None:
        """Bytes to the agent."""
        if self._over or self._child.stdin is None or self._child.stdin.closed:
            raise BrokenPipeError(
                "the agent has ended"
            )  # its descriptor may be another file's by now
        write_all(self._in, data)

    def complaint(self) -> str:
        """What the agent wrote to standard error, where it has no log: before its start, and of its failure; else how it ended."""
        if not self._reading.acquire(timeout=1.0):  # its output has not ended
            return ""
        try:
            if self._errors.closed:
                return ""
            size = os.fstat(self._errors.fileno()).st_size
            said = (
                os.pread(self._errors.fileno(), COMPLAINT, max(0, size - COMPLAINT))
                .decode(errors="replace")
                .strip()
            )
        finally:
            self._reading.release()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # its output has ended, and so it is about to
            status = self._child.wait(timeout=1.0)
            return said or (status_words(status) if status else "")
        return said

    def close(self) -> None:
        """Close its input, upon which it ends everything; kill it if it does not."""
        child = self._child
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        try:
            child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._over = True
        # Whoever reads comes to the end now, unless something that the child has left holds the pipe open.
        alone = self._reading.acquire(timeout=1.0)
        if child.stdout is not None:
            child.stdout.close()
        self._errors.close()
        if alone:
            self._reading.release()


def run(module: str, *arguments: str) -> ChildTransport:
    """``python -m module arguments`` with the notebook's own interpreter; a random.py beside the notebook is not taken for Python's.

    Ranks look there all the same, as notebooks do: IPython sees to that.
    """
    beside = (
        Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    )  # used from its source, not installed
    safe = () if beside else ("-P",)
    return ChildTransport((sys.executable, *safe, "-m", module, *arguments))


def descriptors() -> int:
    """How many files a process that a pool starts may have open: its agent raises the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)


def inventory(request: PoolRequest | None = None) -> Inventory:
    """What this machine has; its GPUs where the request may take some, for a driver may take seconds to answer."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    here = Inventory(
        socket.gethostname(),
        cpus,
        memory,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )
    if request is None or not gpus.wanted(request):
        return here
    # a line of the pool's own wins over what the notebook was started with
    said = dict(request.env).get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices, complaint = driver()
    return replace(
        here,
        gpus=gpus.visible(devices, said),
        unusable=complaint or _without_cuda(gpus.frameworks(request), devices),
    )


def driver() -> tuple[tuple[GpuDevice, ...], str]:
    """(this machine's GPUs as NVIDIA's driver lists them, why they cannot be used). Asking torch would open them in this process."""
    if shutil.which("nvidia-smi") is None:
        if sys.platform == "darwin":
            return (), "ranks do not use Apple's GPU (MPS): there is no process group for it"
        if Path("/dev/kfd").exists():
            return (), "ranks do not use AMD's GPUs (ROCm): they run CUDA programs"
        return (), ""
    rows, complaint = _smi(f"--query-gpu={gpus.FIELDS}")
    if "not a valid field" in complaint:  # a driver before MIG
        rows, complaint = _smi(f"--query-gpu={gpus.FIELDS.rpartition(',')[0]}")
    if complaint:
        return (), f"NVIDIA's driver does not answer ({complaint})"
    tree, _ = _smi("-L")
    applications, _ = _smi(f"--query-compute-apps={gpus.APPLICATIONS}")
    return gpus.listed(rows, tree, applications, _held(), (os.getpid(),)), ""


def _smi(question: str) -> tuple[list[str], str]:
    """(lines that nvidia-smi has printed, what it has said instead)."""
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


def _held() -> list[str]:
    """Names of the sockets by which agents on this machine hold GPUs."""
    try:
        with open("/proc/net/unix", errors="replace") as file:
            return re.findall(rf"@({gpus.HOLD}\S+)", file.read())
    except OSError:  # no Linux: nobody holds anything
        return []


def _without_cuda(frameworks: Collection[str], devices: Sequence[GpuDevice]) -> str:
    """Which framework here cannot use GPUs that are here, and what to do; by its distribution's label, for importing it takes seconds."""
    if not devices:
        return ""
    words = []
    if "torch" in frameworks and (label := _version("torch")).endswith("+cpu"):
        words.append(
            f"torch {label} is built without CUDA (install one with: pip install torch --index-url {CUDA_WHEELS})"
        )
    if (
        "jax" in frameworks
        and _version("jax")
        and not any(_version(f"jax-cuda{major}-plugin") for major in (12, 13))
    ):
        words.append(
            f"jax {_version('jax')} is installed without CUDA (pip install 'jax[cuda12]' adds it)"
        )
    return "; ".join(words)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# -- that outlive their notebook: a daemon keeps their agent, as on another machine, and lets notebooks attach --


@dataclass(frozen=True)
class DetachedAccess:
    """What leads another notebook of this machine to the daemon.

    Attributes:
        daemon: its name. secret: what it knows its notebooks by.
        machine: where it runs. python: the interpreter of its ranks, which a notebook must share.
    """

    daemon: str
    secret: str = field(repr=False)
    machine: str = field(default_factory=socket.gethostname)
    python: str = sys.executable


class Here:
    """This machine, and the tunnel to the agent on it.

    Args:
        access: what leads to an agent that is there already; None for a new one.

    Raises:
        PoolError: that one is on another machine, or of another Python; says what to do.
    """

    def __init__(self, access: DetachedAccess | None = None) -> None:
        if access is not None:
            _check(access)
        self._tunnel = AgentTunnel(access.secret if access is not None else "")

    def node(self, daemon: str, run: Callable[..., Transport]) -> Node:
        """The machine as a pool sees it.

        Args:
            daemon: names what keeps the agent.
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
        """End the agent and the tunnel; twice is safe."""
        self._tunnel.close()


@dataclass(frozen=True)
class Detached(Survey):
    """The plan of a pool whose agents outlive their notebook, and what leads to them: here, and from a head to the others."""

    here: Here = field(default_factory=Here)
    tunnels: tuple[AgentTunnel, ...] = ()

    def close(self) -> None:
        """End all agents and what leads to them; twice is safe."""
        self.here.close()
        for tunnel in self.tunnels:
            tunnel.close()


def _check(access: DetachedAccess) -> None:
    """Raises PoolError where an agent cannot be reached, or a notebook could not work with its ranks."""
    if access.machine != socket.gethostname():
        raise PoolError(f"it runs on {access.machine}: attach from a notebook there")
    if access.python != sys.executable:
        raise PoolError(
            f"its ranks run in {access.python}: attach from a notebook with that interpreter"
        )
