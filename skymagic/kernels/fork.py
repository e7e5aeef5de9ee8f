"""Building blocks of a node's processes: a cheap fork, signals as readable events, an event loop.

A forked process finds all modules imported. Some schedulers end, with each of their steps, all
processes that the step has started. There, a *holder* forks instead: a process of the job that the
scheduler itself has started. It reads names from a FIFO, and runs the file of that name in its
folder::

    a step ── folder/NAME (sh), then NAME to folder/start ──▶ holder ──▶ sh folder/NAME ──▶ process
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
    """Run a function in a forked process, and return the process id.

    The exit code is the function's result (0 if it is not a number), or 1 if it raises. In the
    child this call never returns: the parent's objects that own descriptors must not be collected
    where the numbers mean other files.
    """
    if pid := os.fork():
        return pid
    code = 1
    signal.set_wakeup_fd(-1)  # it would wake the parent
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
    """Return a descriptor that becomes readable when a handled signal arrives.

    This is the self-pipe trick; from this call on, it is the process's wakeup descriptor. Every
    wait must include it: a signal that arrives between the interpreter's last check and the wait
    does not interrupt the wait, and its handler would only run after it.
    """
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


class Forked:
    """A forked process with its own standard streams and session.

    Args:
        main: the function that it runs; it inherits nothing else from this process.
        errors: descriptor that becomes its standard error.

    Attributes:
        pid: its process id.
        stdin: writes to its standard input.
        stdout: reads from its standard output.
    """

    def __init__(self, main: Callable[[], None], errors: int) -> None:
        reads, write = os.pipe()
        read, writes = os.pipe()

        def become() -> None:
            # a forked process inherits handlers, and these were written for the parent
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, fd in enumerate((reads, writes, errors)):
                os.dup2(fd, target)
            close_from(3)
            main()

        self.pid = fork(become)
        # copies here would hide the end of the process: no broken pipe, and no end of its output
        os.close(reads)
        os.close(writes)
        self.stdin = open(write, "wb", buffering=0)  # noqa: SIM115  # closed by the owner
        self.stdout = open(read, "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        """Return the process's exit code, or minus the signal that killed it; None while it runs.

        An exit is reported only once.
        """
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def take_streams() -> tuple[int, int]:
    """Reserve this process's standard streams, and return their descriptors.

    Other output goes to standard error.
    """
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return source, sink


def close_from(first: int, but: int = -1) -> None:
    """Close all descriptors from `first` on, except `but`."""
    highest = os.sysconf("SC_OPEN_MAX")
    end = min(highest, 1 << 16) if highest > 0 else 1 << 16
    if first <= but < end:
        os.closerange(first, but)
        first = but + 1
    os.closerange(first, end)


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Make Linux send this process a signal when its parent ends; does nothing on other systems."""
    prctl(PR_SET_PDEATHSIG, signum)


class EventLoop:
    """Event loop that calls back when a descriptor is readable, or a timer expires.

    Args:
        on_error: called with an exception of a callback; the loop continues.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call back whenever `source` (a descriptor, or an object with one) is readable."""
        self._watch(source, selectors.EVENT_READ, callback)

    def watch_writable(self, source: Any, callback: Callable[[], None]) -> None:
        """Call back whenever `source` can be written to, until `unwatch_writable`."""
        self._watch(source, selectors.EVENT_WRITE, callback)

    def unwatch(self, source: Any) -> None:
        """Stop watching whether `source` is readable; twice is safe."""
        self._unwatch(source, selectors.EVENT_READ)

    def unwatch_writable(self, source: Any) -> None:
        """Stop watching whether `source` can be written to; twice is safe."""
        self._unwatch(source, selectors.EVENT_WRITE)

    def _watch(self, source: Any, event: int, callback: Callable[[], None]) -> None:
        try:
            callbacks = self._selector.get_key(source).data
        except KeyError:
            self._selector.register(source, event, {event: callback})
            return
        callbacks[event] = callback
        self._selector.modify(source, sum(callbacks), callbacks)

    def _unwatch(self, source: Any, event: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            callbacks = self._selector.get_key(source).data
            if callbacks.pop(event, None) is None:
                return
            if callbacks:
                self._selector.modify(source, sum(callbacks), callbacks)
            else:
                self._selector.unregister(source)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, after the given time."""
        self._timers.append((time.monotonic() + seconds, callback))

    def run_once(self, until: float | None) -> None:
        """Wait for events or timers, and call back.

        Args:
            until: latest end of the wait in monotonic seconds; None for no limit.
        """
        due = [when for when, _ in self._timers] + ([until] if until is not None else [])
        ready = self._selector.select(max(0.0, min(due) - time.monotonic()) if due else None)
        for key, events in ready:
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                # an earlier callback of this round may have closed it, and its number may belong to
                # another descriptor now
                current = self._selector.get_map().get(key.fd)
                is_same = current is not None and current.data is key.data
                if events & event and is_same and event in key.data:
                    self._call(key.data[event])
        now = time.monotonic()
        expired = [callback for when, callback in self._timers if when <= now]
        # before the callbacks, which may add timers
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for callback in expired:
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as problem:
            self._on_error(problem)


# -- the holder of a job ---------------------------------------------------------------------------

HOLDER_TIMEOUT = 30.0
"""Seconds for a holder to appear, and then to start the process."""
HOLDER_POLL = 0.02
START = "start"
"""FIFO in a holder's folder that receives the names of files to run."""


def holder() -> str:
    """Return the folder of this step's holder once it exists, or "" if the step needs no holder.

    A step needs none if its processes outlive it. The folder's usual name is in the environment.
    Another user can take that name first, because /tmp is shared: then the holder has appended a
    plus sign and random letters. If the holder does not appear in time, `run_below_holder`
    reports the problem with the folder.
    """
    usual = os.environ.get(HOLDER, "")
    deadline = time.monotonic() + HOLDER_TIMEOUT
    while usual and time.monotonic() < deadline:
        for folder in [usual, *glob.glob(glob.escape(f"{usual}+") + "*")]:
            if why_unsafe(folder) is None and os.path.exists(os.path.join(folder, START)):
                return folder
        time.sleep(HOLDER_POLL)
    return usual


def run_below_holder(
    folder: str, name: str, command: Sequence[str], text: str, started: Callable[[], T | None]
) -> T | None:
    """Have the holder run ``python command`` with `text` as its input.

    Returns:
        The result of `started`, or None if it is still None at the timeout.

    Raises:
        OSError: the holder is missing, or belongs to another user.
    """
    deadline = time.monotonic() + HOLDER_TIMEOUT
    fifo = os.path.join(folder, START)
    if not os.path.exists(fifo):
        raise FileNotFoundError(
            f"the job's holder is not on this node ({folder}): has the job ended?"
        )
    if (reason := why_unsafe(folder)) is not None:
        raise PermissionError(f"{folder}: {reason}")
    # the whole file before its name: the holder may read it as soon as it has the name
    file = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    write_all(file, held_script(command, text, os.environ).encode())
    os.close(file)
    names = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO if the holder has ended
    write_all(names, f"{name}\n".encode())
    os.close(names)
    while (result := started()) is None and time.monotonic() < deadline:
        time.sleep(HOLDER_POLL)
    return result


def held_script(command: Sequence[str], text: str, environ: Mapping[str, str]) -> str:
    """Return the shell script that makes a holder run this Python; pure.

    It runs in the environment of the process that orders it.

    Args:
        text: input of the process; no line of it is END.
    """
    inherited = {
        key: environ[key] for key in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if key in environ
    }
    # the additions of a site's prologue to the holder's PATH
    site = {"PATH": f"${{{SITE}:+:$PATH}}"}
    settings = "".join(
        f"export {key}={shlex.quote(value)}{site.get(key, '')}\n"
        for key, value in inherited.items()
    )
    # the quotes of 'END' keep the shell from expanding anything in the text
    return (
        f"{settings}exec {shlex.join([sys.executable, *command])} <<'END'\n{text.rstrip()}\nEND\n"
    )
