"""What processes of a node are made of: a fork that finds imported what is imported here, signals as readable events, an event loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from skymagic.kernels.supervisor import PR_SET_PDEATHSIG, prctl


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
        """The process's exit code, or minus the signal that killed it, which is told once; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def take_streams() -> tuple[int, int]:
    """Descriptors of the streams that this process was started with, for itself alone: what else prints goes to standard error."""
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return source, sink


def close_from(first: int, but: int = -1) -> None:
    """Close all descriptors from `first` on, but one."""
    highest = os.sysconf("SC_OPEN_MAX")
    end = min(highest, 1 << 16) if highest > 0 else 1 << 16
    if first <= but < end:
        os.closerange(first, but)
        first = but + 1
    os.closerange(first, end)


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal when the one that forked it ends, where the system can (Linux)."""
    prctl(PR_SET_PDEATHSIG, signum)


class EventLoop:
    """Calls back when a descriptor can be read, or a time has come.

    Args:
        on_error: called with what a callback raised; the loop goes on.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call back whenever `source` (a descriptor, or what has one) can be read."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: Any) -> None:
        """Watch it no longer; twice is safe."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, after this time."""
        self._timers.append((time.monotonic() + seconds, callback))

    def run_once(self, until: float | None) -> None:
        """Wait for events, for timers, or until a time (monotonic seconds, None: as long as it takes), and call back."""
        due = [when for when, _ in self._timers] + ([until] if until is not None else [])
        ready = self._selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
        for key, _ in ready:
            # an earlier call of this round may have closed it, and its number may be another descriptor's by now
            if self._selector.get_map().get(key.fd) is key:
                self._call(key.data)
        now = time.monotonic()
        expired = [callback for when, callback in self._timers if when <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]  # before the calls: they may add others
        for callback in expired:
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as problem:
            self._on_error(problem)
