"""A function in a forked process, which finds imported what is imported here; on demand with the interface of a `subprocess.Popen`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def fork(main: Callable[[], object]) -> int:
    """Run a function in a forked process, whose exit code is what it returns (0 if no number), or 1 when it raises; the process id.

    There this call never returns: the parent's objects that own descriptors must not be collected where the numbers mean other files.
    """
    if pid := os.fork():
        return pid
    code = 1
    signal.set_wakeup_fd(-1)  # it wakes the parent
    try:
        result = main()
        code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def signal_pipe() -> int:
    """The self-pipe trick: a descriptor that can be read once a signal has come that has a handler; from then on, of this process.

    Whoever waits must wait for it too. A signal that comes between the interpreter's last look and the wait does not interrupt that,
    and its handler would run when the wait is over.
    """
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


class Forked:
    """The process.

    Args:
        main: what it runs; it holds nothing of this process but standard streams of its own, and leads a session.
        errors: descriptor that becomes its standard error.

    Attributes:
        pid: its process.
        stdin: leads to its standard input.
        stdout: leads from its standard output.
    """

    def __init__(self, main: Callable[[], None], errors: int) -> None:
        reads, write = os.pipe()
        read, writes = os.pipe()

        def become() -> None:
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, fd in enumerate((reads, writes, errors)):
                os.dup2(fd, target)
            close_from(3)
            main()

        self.pid = fork(become)
        os.close(reads)
        os.close(writes)
        self.stdin = open(write, "wb", buffering=0)  # noqa: SIM115  # closed by the owner
        self.stdout = open(read, "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it, which is told once; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def close_from(first: int, but: int = -1) -> None:
    """Close all descriptors from `first` on, but one."""
    highest = os.sysconf("SC_OPEN_MAX")
    end = min(highest, 1 << 16) if highest > 0 else 1 << 16
    if first <= but < end:
        os.closerange(first, but)
        first = but + 1
    os.closerange(first, end)


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when the one that forked it ends, where the system can (Linux)."""
    prctl(PR_SET_PDEATHSIG, signum)
