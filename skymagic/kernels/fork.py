"""What processes of a node are made of: a fork that finds imported what is imported here, signals as readable events, an event loop.

Where a scheduler ends, with each of its steps, whatever that has started, a *holder* forks instead: one process of the job, which the scheduler
itself has started. It reads names from a FIFO, and runs the file of that name in its folder::

    a step ── folder/NAME (sh), then NAME to folder/start ──▶ holder ──▶ sh folder/NAME ──▶ the process
"""

from __future__ import annotations

import contextlib
import glob
import os
import selectors
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from skymagic.kernels.proc import PR_SET_PDEATHSIG, prctl
from skymagic.wire.codec import write_all
from skymagic.wire.processes import HOLDER, SITE
from skymagic.wire.record import why_unsafe

T = TypeVar("T")


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
        self._timers = [
            timer for timer in self._timers if timer[0] > now
        ]  # before the calls: they may add others
        for callback in expired:
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as problem:
            self._on_error(problem)


# -- by the holder of a job -----------------------------------------------------------------------------------------------

HOLDER_TIMEOUT = 30.0
"""Seconds that a holder may take to be there, and then to start what was ordered."""
HOLDER_POLL = 0.02
START = "start"
"""The FIFO in a holder's folder that takes the names of what it starts."""


def holder() -> str:
    """Return the folder of this step's holder, once it is there, or "" where what is started outlives the step by itself.

    Its usual name is in the environment. Another user can take that first, for all of /tmp is everybody's: then the holder has
    appended a plus sign and random letters. `held` says what is wrong with the folder if there is none in time.
    """
    usual = os.environ.get(HOLDER, "")
    deadline = time.monotonic() + HOLDER_TIMEOUT
    while usual and time.monotonic() < deadline:
        for place in [usual, *glob.glob(glob.escape(f"{usual}+") + "*")]:
            if why_unsafe(place) is None and os.path.exists(os.path.join(place, START)):
                return place
        time.sleep(HOLDER_POLL)
    return usual


def held(
    place: str, name: str, words: Sequence[str], text: str, started: Callable[[], T | None]
) -> T | None:
    """Have the holder in this folder run ``python words`` with this text as its input; what `started` finds, None where that is nothing in time.

    Raises:
        OSError: there is no holder, or it is not this user's.
    """
    deadline = time.monotonic() + HOLDER_TIMEOUT
    fifo = os.path.join(place, START)
    if not os.path.exists(fifo):
        raise FileNotFoundError(
            f"the job's holder is not on this node ({place}): has the job ended?"
        )
    if (reason := why_unsafe(place)) is not None:
        raise PermissionError(f"{place}: {reason}")
    file = os.open(os.path.join(place, name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    write_all(file, held_script(words, text, os.environ).encode())
    os.close(file)
    names = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO where the holder has ended
    write_all(names, f"{name}\n".encode())
    os.close(names)
    while (found := started()) is None and time.monotonic() < deadline:
        time.sleep(HOLDER_POLL)
    return found


def held_script(words: Sequence[str], text: str, environ: Mapping[str, str]) -> str:
    """sh by which a holder runs this Python with these words, in the environment of who orders it; pure.

    Args:
        text: what the process reads from its input; no line of it is END.
    """
    kept = {key: environ[key] for key in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if key in environ}
    site = {"PATH": f"${{{SITE}:+:$PATH}}"}  # what a site's prologue has added to the holder's
    settings = "".join(
        f"export {key}={shlex.quote(value)}{site.get(key, '')}\n" for key, value in kept.items()
    )
    return f"{settings}exec {shlex.join([sys.executable, *words])} <<'END'\n{text.rstrip()}\nEND\n"
