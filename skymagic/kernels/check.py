"""The node's end of a check: what it has, and its clock; one process per check.

It speaks `skymagic.wire.check` over its standard input and output, and ends when its input does. Its own user's rights do: what only
root may read is said to be unknown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from skymagic.kernels.fork import take_streams
from skymagic.wire import check as wire
from skymagic.wire.codec import write_all

PROGRAM_TIMEOUT = 20.0
"""Seconds for a program that looks at the hardware: a GPU that has fallen off its bus makes nvidia-smi hang."""
CHUNK = 1 << 20
KEPT_LINES = 50
"""Newest lines of the kernel's log that are kept."""
MARK = "NVRM: Xid"


def look() -> wire.NodeSurvey:
    """What this node has, and how it is."""
    disk = shutil.disk_usage(Path.home())
    if shutil.which("nvidia-smi") is None:
        return wire.NodeSurvey(disk_free=disk.free)
    gpus, complaint = _said(
        "nvidia-smi", f"--query-gpu={','.join(wire.GPU_FIELDS)}", "--format=csv,noheader,nounits"
    )
    return wire.NodeSurvey(
        gpus, complaint, _processes() if gpus else None, _kernel(), efa_unused(), disk.free
    )


def efa_unused(root: Path = Path("/")) -> bool:
    """Whether EFA's cards are there and NCCL's plugin for them (aws-ofi-nccl) is not: without it NCCL takes TCP, and says nothing."""
    drivers = root.glob("sys/class/infiniband/*/device/driver")
    if not any(driver.resolve().name == "efa" for driver in drivers):
        return False
    places = (
        "opt/amazon/ofi-nccl",
        "opt/amazon/aws-ofi-nccl",
        "opt/aws-ofi-nccl",
        "usr/local/lib",
        "usr/lib/x86_64-linux-gnu",
    )
    names = ("libnccl-net*.so*", "libnccl-ofi*.so*")
    return not any(
        True for place in places for name in names for _ in (root / place).glob(f"**/{name}")
    )


def _said(*command: str) -> tuple[str, str]:
    """(what a program has printed, "") or ("", what it has said instead)."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_TIMEOUT, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} has not answered within {PROGRAM_TIMEOUT:.0f} s"
    except OSError as problem:
        return "", f"{command[0]}: {problem.strerror}"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    return "", (done.stdout + done.stderr).strip()[
        -1000:
    ] or f"{command[0]} ended with {done.returncode}"


def _processes() -> dict[str, list[int]] | None:
    """Processes that use a GPU, each with those that it comes from; None where nvidia-smi does not say."""
    listed, complaint = _said("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    if complaint:
        return None
    return {word: list(_origins(int(word))) for word in listed.split() if word.isdigit()}


def _origins(pid: int) -> Iterator[int]:
    """The pid, its parent's, and so on."""
    while pid > 1:
        yield pid
        try:
            # the name, in parentheses, may hold blanks and parentheses itself
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def _kernel() -> list[str] | None:
    """What the kernel says of GPUs since it was booted; None where this user may not read it."""
    for command in (("dmesg",), ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat")):
        said, complaint = _said(*command)
        if said and not complaint:
            return [line for line in said.splitlines() if MARK in line][-KEPT_LINES:]
    return None


# -- the process ---------------------------------------------------------------------------------------------------------


def answer(request: wire.CheckMessage) -> wire.CheckMessage:
    """The reply to a request."""
    match request:
        case wire.SurveyNode():
            return look()
        case wire.ReadClock():
            return wire.NodeClock(time.time())
    raise ValueError(f"not a request: {request!r}")


def main() -> None:
    """Answer on the streams that this process was started with; what else prints goes to standard error."""
    source, sink = take_streams()
    with contextlib.suppress(EOFError, BrokenPipeError):
        for message, _ in wire.messages(lambda: os.read(source, CHUNK)):
            write_all(sink, wire.encode(answer(message)))


if __name__ == "__main__":
    main()
