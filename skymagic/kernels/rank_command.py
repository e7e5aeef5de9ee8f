"""A node's end of ``%sky_shell``: one command on a pseudo-terminal, with the environment and the folder of a rank.

It ends with its input: a notebook that closes the link leaves nothing behind. On a pseudo-terminal programs print line by line, and Ctrl-C
reaches all that the command runs in the foreground.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import threading
import time
from typing import NoReturn

from skymagic.kernels import network
from skymagic.runtime.info import InstanceInfo
from skymagic.wire import rank_command as wire
from skymagic.wire.codec import write_all

CTRL_C = b"\x03"
CHUNK = 1 << 16
GRACE = 1.0
"""Seconds that a program has to end once its terminal is gone."""
ENVIRONMENT = {"TERM": "dumb", "COLUMNS": "120"}


def main() -> int:
    """Serve one command on the streams that this process was started with."""
    source = wire.messages(lambda: os.read(0, CHUNK), noise=True)
    try:
        begin, _ = next(source)
    except EOFError:
        return 0
    assert isinstance(begin, wire.BeginCommand)
    pid, terminal = pty.fork()
    if not pid:
        _become(begin)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            for _ in source:  # nothing but interrupts comes
                write_all(terminal, CTRL_C)
        _end(pid)

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(
        OSError
    ):  # nobody has the terminal open any more, or the notebook is gone
        while data := os.read(terminal, CHUNK):
            write_all(1, wire.encode(wire.CommandOutput(len(data)), data))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        write_all(1, wire.encode(wire.CommandEnded(status)))
    return 0


def _end(pid: int) -> NoReturn:
    """End the command and what it runs in the foreground, and this process."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)  # its process leads a session
            if number == signal.SIGHUP:
                time.sleep(
                    GRACE
                )  # it may have handlers; nobody can tell here when the last one has ended
    os._exit(0)


def _become(begin: wire.BeginCommand) -> NoReturn:
    """Become the command."""
    try:
        with contextlib.suppress(OSError):
            os.chdir(f"/proc/{begin.pid}/cwd")
        environment = {**os.environ, **begin.env}
        if begin.info:
            info = InstanceInfo.from_plain(begin.info)
            environment = {**os.environ, **network.environment(info), **begin.env}
            environment |= network.interfaces(info, environment)
        environment["PATH"] = os.pathsep.join(
            [os.path.dirname(sys.executable), environment.get("PATH", os.defpath)]
        )
        os.execve("/bin/sh", ["sh", "-c", begin.command], {**ENVIRONMENT, **environment})
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}", flush=True)
    os._exit(127)


if __name__ == "__main__":
    os._exit(main())
