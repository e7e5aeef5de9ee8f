"""Ending what a failed test has left, so that it is neither in the way of the next one nor of running the failed one again."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

DAEMON = "skymagic.kernels.daemon.attach"
"""What is in the command lines of a daemon and its agent."""
DEADLINE = 20.0
"""Seconds that a daemon has to end its agent, which it kills after ten."""
JOB_ID = re.compile(r"[A-Za-z0-9_.]+-[0-9a-f]{8}(?=-)")
"""The end of a pool's job id, in the name of its folder or of a node's daemon."""


def end(found: Callable[[], Iterable[psutil.Process]]) -> None:
    """End processes: daemons are asked to, and remove their folders; then all are killed, and the folders of their pools removed.

    Args:
        found: those that are there now, with their children; asked again, for some may start others meanwhile.
    """
    there = list(found())
    job_ids = {
        job_id for process in there for word in cmdline(process) for job_id in JOB_ID.findall(word)
    }
    for process in there:
        with contextlib.suppress(psutil.Error):
            above = process.parent()
            if DAEMON in cmdline(process) and (above is None or DAEMON not in cmdline(above)):
                process.terminate()
    if any(DAEMON in cmdline(process) for process in there):
        psutil.wait_procs(there, timeout=DEADLINE)
    for _ in range(3):  # what is killed may just have started another
        if not (there := list(found())):
            break
        for process in there:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(there, timeout=DEADLINE)
    for parent in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for job_id in job_ids:
            for path in parent.glob(f"skymagic*{job_id}-*"):
                shutil.rmtree(path, ignore_errors=True)


def cmdline(process: psutil.Process) -> list[str]:
    """Its command line; its number when it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return [f"process {process.pid}"]


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """The processes whose environment has this. Read from /proc: psutil takes ten times as long to look at all that there are."""
    wanted, found = f"\0{name}={value}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is another user's
            # a process that has written its title over it has an end there
            if wanted in b"\0" + (folder / "environ").read_bytes().partition(b"\0\0")[0] + b"\0":
                found.append(psutil.Process(int(folder.name)))
    return found


def environ(process: psutil.Process) -> dict[str, str]:
    """Its environment; empty when it has ended, or is another user's."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def program(process: psutil.Process) -> str:
    """The name of its program; "" when it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""
