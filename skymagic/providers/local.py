"""Ranks on this machine, in the notebook's own interpreter; nodes are groups of ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

from skymagic import plugins
from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.plan import image
from skymagic.plan.capacity import Room
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory, Plan, topology
from skymagic.plan.requests import PoolRequest
from skymagic.plugins import packing
from skymagic.providers.detached import ADDRESS, Access, Detached, Here
from skymagic.providers.provider import Say, Survey
from skymagic.providers.room import descriptors, room
from skymagic.wire import processes
from skymagic.wire.exit_status import status_words
from skymagic.wire.transport import write_all

COMPLAINT = 4000
"""Bytes of what an agent has said last that an error has, at most."""


class Local:
    """The provider that needs nothing."""

    def plan(self, request: PoolRequest, say: Say) -> Survey:
        """Check the request against this machine."""
        mistakes: list[str] = []
        asked = image.Image(pip=request.pip)
        try:
            here = inventory()
            # looking at all takes a while with many processes about
            many = topology(request).world_size > here.cpus
            here = replace(here, room=room() if many else Room(descriptors=descriptors()))
            made = plan(request, here)
            cluster = plugins.Cluster(made.topology.nodes, made.topology.procs_per_node, made.request.gpu)
            asked = packing.image_for(made.request.plugins, made.image, cluster)
        except RequestError as refused:
            mistakes += refused.mistakes
        if asked.pip:
            mistakes += image.missing(asked, {dist.name: dist.version for dist in distributions() if dist.name})
        if mistakes:
            raise RequestError(mistakes)
        made = replace(made, image=asked)
        return Detached(made) if request.detached else Survey(made)

    def acquire(self, survey: Survey, job_id: str, say: Say) -> Sequence[Node]:
        """One agent serves all ranks of this machine."""
        if isinstance(survey, Detached):
            return [survey.here.node(f"{job_id}-0", run)]
        return [Node(0, socket.gethostname(), lambda state: run(processes.AGENT), run, address=ADDRESS)]

    def attach(self, plan: Plan, accesses: Sequence[Access]) -> tuple[Survey, Sequence[Node]]:
        """This machine, for a pool that another notebook has made here with ``--detached``."""
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
            raise BrokenPipeError("the agent has ended")  # its descriptor may be another file's by now
        write_all(self._in, data)

    def complaint(self) -> str:
        """What the agent wrote to standard error, where it has no log: before its start, and of its failure; else how it ended."""
        if not self._reading.acquire(timeout=1.0):  # its output has not ended
            return ""
        try:
            if self._errors.closed:
                return ""
            size = os.fstat(self._errors.fileno()).st_size
            said = os.pread(self._errors.fileno(), COMPLAINT, max(0, size - COMPLAINT)).decode(errors="replace").strip()
        finally:
            self._reading.release()
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output has ended, and so it is about to
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
    beside = Path(__file__).resolve().parents[2] == Path.cwd().resolve()  # used from its source, not installed
    safe = () if beside else ("-P",)
    return ChildTransport((sys.executable, *safe, "-m", module, *arguments))


def inventory() -> Inventory:
    """What this machine has. GPUs are those that nvidia-smi lists; asking torch would open them in this process."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return Inventory(socket.gethostname(), cpus, memory, gpus(), f"{sys.version_info.major}.{sys.version_info.minor}")


def gpus() -> tuple[str, ...]:
    """Names of this machine's GPUs, in the order of their numbers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
