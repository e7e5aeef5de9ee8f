"""A function in a forked process, with the interface of a `subprocess.Popen`: what is imported here is imported there already."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)


class Forked:
    """The process.

    Args:
        main: what it runs; it holds nothing of this process but standard streams of its own, and leads a session.
        errors: descriptor that becomes its standard error.

    Attributes:
        pid: its process.
        stdin: leads to its standard input.
        stdout: leads from its standard output.
        returncode: how it ended, as `poll` found out.
    """

    def __init__(self, main: Callable[[], None], errors: int) -> None:
        reads, write = os.pipe()
        read, writes = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(main, (reads, writes, errors))
        os.close(reads)
        os.close(writes)
        self.stdin = open(write, "wb", buffering=0)  # noqa: SIM115  # closed by the owner
        self.stdout = open(read, "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def close_from(first: int, but: int = -1) -> None:
    """Close all descriptors from `first` on, but one."""
    highest = os.sysconf("SC_OPEN_MAX")
    end = min(highest, 1 << 16) if highest > 0 else 1 << 16
    if first <= but < end:
        os.closerange(first, but)
        first = but + 1
    os.closerange(first, end)


def _become(main: Callable[[], None], streams: tuple[int, int, int]) -> None:
    """Never returns: the parent's objects that own descriptors must not be collected here, where the numbers mean other files."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        close_from(3)
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
