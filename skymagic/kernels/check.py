"""A node's end of ``%sky_check``: report GPUs, the kernel's log, the disk and the clock.

Each check has its own process, which speaks `skymagic.wire.check` over its standard input and
output, and ends when its input does. It has its user's rights: information that only root may read
is reported as unknown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from skymagic.kernels.fork import take_streams
from skymagic.wire import check as check_wire
from skymagic.wire.codec import write_all

PROGRAM_TIMEOUT = 20.0
"""Seconds for a hardware query: nvidia-smi hangs if a GPU has fallen off its bus."""
CHUNK = 1 << 20
XID = "NVRM: Xid"
MAX_XID_LINES = 50


def main() -> None:
    """Answer requests on the streams that this process was started with."""
    source, sink = take_streams()
    with contextlib.suppress(EOFError, BrokenPipeError):
        for request, _ in check_wire.messages(lambda: os.read(source, CHUNK)):
            reply = (
                check_wire.NodeClock(time.time())
                if isinstance(request, check_wire.ReadClock)
                else survey()
            )
            write_all(sink, check_wire.encode(reply))


def survey() -> check_wire.NodeSurvey:
    """Query the hardware of this node."""
    disk_free = shutil.disk_usage(Path.home()).free
    if shutil.which("nvidia-smi") is None:
        return check_wire.NodeSurvey(disk_free=disk_free)
    query = f"--query-gpu={','.join(check_wire.GPU_FIELDS)}"
    gpus, complaint = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
    return check_wire.NodeSurvey(gpus, complaint, _kernel_log(), disk_free)


def _kernel_log() -> list[str] | None:
    """Return the kernel's log lines about GPU errors since boot, or None if it may not be read."""
    for command in (("dmesg",), ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat")):
        log, complaint = _run(*command)
        if log and not complaint:
            return [line for line in log.splitlines() if XID in line][-MAX_XID_LINES:]
    return None


def _run(*command: str) -> tuple[str, str]:
    """Return (output of a program, ""), or ("", its complaint)."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} has not answered within {PROGRAM_TIMEOUT:.0f} s"
    except OSError as problem:
        return "", f"{command[0]}: {problem.strerror}"
    if ended.returncode == 0:
        return ended.stdout.strip(), ""
    complaint = (ended.stdout + ended.stderr).strip()[-1000:]
    return "", complaint or f"{command[0]} ended with {ended.returncode}"


if __name__ == "__main__":
    main()
