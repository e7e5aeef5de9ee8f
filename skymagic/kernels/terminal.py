"""A node's end of a terminal: a shell, or one command, on a pseudo-terminal, with the environment and the folder of a rank.

It ends with its input: whoever has closed the link leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import threading
import time
from typing import NoReturn

from skymagic.kernels import network
from skymagic.runtime.info import InstanceInfo
from skymagic.wire import terminal as wire
from skymagic.wire.codec import write_all

CHUNK = 1 << 16
GRACE = 1.0
"""Seconds that a program has to end once its terminal is gone."""


def main() -> int:
    """Serve one terminal on the streams that this process was started with."""
    source = wire.messages(lambda: os.read(0, CHUNK), noise=True)
    try:
        begin, _ = next(source)
    except EOFError:
        return 0
    assert isinstance(begin, wire.StartProgram)
    pid, terminal = pty.fork()
    if not pid:
        _become(begin)
    _resize(terminal, begin.rows, begin.columns)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            for message, payload in source:
                if isinstance(message, wire.Typed):
                    write_all(terminal, payload)
                elif isinstance(message, wire.Resized):
                    _resize(terminal, message.rows, message.columns)
        _end(pid)

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(OSError):  # a terminal that nobody has open any more; or whoever started this is gone
        while data := os.read(terminal, CHUNK):
            write_all(1, wire.encode(wire.Printed(len(data)), data))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        write_all(1, wire.encode(wire.ProgramEnded(status)))
    return 0


def _resize(terminal: int, rows: int, columns: int) -> None:
    """Set a pseudo-terminal's size; the system sends SIGWINCH to what has it in the foreground."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _end(pid: int) -> NoReturn:
    """End the program and what it runs in the foreground, and this process."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)  # its process leads a session
            if number == signal.SIGHUP:
                time.sleep(GRACE)  # it may have handlers; nobody can tell here when the last one has ended
    os._exit(0)


def _become(begin: wire.StartProgram) -> NoReturn:
    """Become the program."""
    try:
        with contextlib.suppress(OSError):
            os.chdir(f"/proc/{begin.pid}/cwd")
        environment = {**os.environ, **begin.env}
        if begin.info:
            info = InstanceInfo.from_plain(begin.info)
            environment = {**os.environ, **network.environment(info), **begin.env}
            environment |= network.interfaces(info, environment)
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
        if begin.command:
            os.execve("/bin/sh", ["sh", "-c", begin.command], {"TERM": "dumb", **environment})
        shell = environment.get("SHELL", "/bin/sh")
        os.execve(shell, [shell, "-i"], {"TERM": "xterm-256color", **environment})
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}", flush=True)
    os._exit(127)


if __name__ == "__main__":
    os._exit(main())
