"""The other tools: torchrun as a command, ipyparallel as its users start it, torchrunx and nbdistributed where pip has them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import say

ROOT = Path(__file__).resolve().parent.parent
INSTALL = 60.0
"""Seconds that an installation may take."""

MARK = "SKYMAGIC_BENCH"
"""In the environment of all processes of one command."""

INIT = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
END = "\nimport torch.distributed as dist\ndist.destroy_process_group()\n"
DDP_END = f"\nimport gc\nmodel = None\ngc.collect()\n{END}"
"""DDP keeps the group alive, and a thread of gloo's that is still at work when Python ends aborts the process, or hangs."""


@dataclass
class Ran:
    """How a command went; times are those of `time.time()`."""

    begun: float
    ended: float = float("inf")
    lines: list[tuple[float, str]] = field(default_factory=list)
    """Output and errors, with the time at which each came."""
    status: int | None = None
    """None when it had to be killed."""

    @property
    def seconds(self) -> float:
        """From its start to its end, infinite when it had to be killed."""
        return self.ended - self.begun

    @property
    def text(self) -> str:
        """All of its output."""
        return "".join(line for _, line in self.lines)

    def seen(self, words: str) -> float:
        """When a line with these words came first; infinite if it did not."""
        return next((when for when, line in self.lines if words in line), float("inf"))

    def number(self, label: str) -> float:
        """The number that the script printed after a label.

        Raises:
            RuntimeError: it printed none; with its output.
        """
        for _, line in self.lines:
            _, found, rest = line.partition(label + " ")
            if found:
                return float(rest.split()[0])
        raise RuntimeError(f"the script printed no {label}:\n{self.text[-4000:]}")


def command(
    words: list[str],
    *,
    env: dict[str, str] | None = None,
    limit: float = 60.0,
    meanwhile: Callable[[subprocess.Popen[str]], object] = lambda process: None,
) -> Ran:
    """Run a command in a process group of its own; whatever it has started is gone afterwards.

    Args:
        limit: seconds after which it is killed.
        meanwhile: called while it runs.
    """
    ran = Ran(time.time())
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        words, env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), MARK: mark}, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        ran.lines.extend((time.time(), line) for line in output)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        meanwhile(process)
        ran.status = process.wait(limit)
        ran.ended = time.time()
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_all(mark)
        process.wait()
        reader.join()
        output.close()
    return ran


def end_all(mark: str) -> None:
    """Kill what has this mark in its environment: torchrun and ipyparallel give their children sessions of their own."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.pid != os.getpid() and one.environ().get(MARK) == mark:
                one.kill()


def python(source: str, *options: str, **how: Any) -> Ran:
    """Run a script in a fresh Python that finds skymagic and the benchmarks."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(source)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {"PYTHONPATH": path, **how.pop("env", {})}
        return command([sys.executable, *options, str(script)], env=env, **how)


def torchrun(source: str, ranks: int, **how: Any) -> Ran:
    """What ``torchrun --standalone --nproc_per_node=…`` does with a script."""
    return python(
        source, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", **how
    )


@contextmanager
def ipyparallel(ranks: int) -> Iterator[Any]:
    """A client of a default cluster: nothing is tuned, its magics are there."""
    import ipyparallel as ipp

    cluster = ipp.Cluster(
        n=ranks, engine_timeout=300
    )  # 64 engines took more than the default minute on two cores
    client = cluster.start_and_connect_sync()
    try:
        yield client
    finally:
        client.close()
        cluster.stop_cluster_sync()


@contextmanager
def installed(package: str, *needs: str) -> Iterator[str | None]:
    """A folder with a package and the `needs` that this environment lacks; torch is not among them, it stays the same for all.

    It is gone afterwards. None when pip does not bring it within a minute; why not is said.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        orders = [[*pip, "--no-deps", package], *([[*pip, *needs]] if needs else [])]
        deadline = time.monotonic() + INSTALL
        problem = ""
        for order in orders:
            ran = command(order, limit=max(0.0, deadline - time.monotonic()))
            if ran.status != 0:
                problem = (
                    f"took more than {INSTALL:.0f} s" if ran.status is None else ran.text[-500:]
                )
                say(f"  no {package}: {problem}")
                break
        yield None if problem else folder
