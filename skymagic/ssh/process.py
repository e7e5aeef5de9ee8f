"""A remote process over one channel."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from skymagic.errors import HostError
from skymagic.wire.untrusted import sanitized

CHUNK_BYTES = 1 << 16
WINDOW_BYTES = 1 << 24
"""Receive window of a channel (RFC 4254): bytes that a host may send before they are read."""
KEPT_ERROR_BYTES = 1 << 20
"""Bytes of standard error to keep; earlier ones are dropped."""
START_TIMEOUT = 30.0
"""Seconds that a login shell's profile may take."""
GRACE_PERIOD = 5.0
"""Seconds that a process has to end after its input has ended."""
ACCOUNT_REMEDY = "skymagic needs an account that can run /bin/sh there"
# Works as a command line of sh, bash, zsh, fish and csh alike, and leaves one process, which leads
# its session.
SHELL = "exec /bin/sh -s"


@dataclass(frozen=True)
class Shell:
    """Shell that reads a process's script.

    Attributes:
        command: command line for any login shell; it becomes ``/bin/sh -s``, which leads its
            session.
        noun: what starts it, for messages.
        timeout: seconds that it may take to start; None for `START_TIMEOUT`.
    """

    command: str = SHELL
    noun: str = "the login shell"
    timeout: float | None = None


LOGIN_SHELL = Shell()


class Channel(Protocol):
    """A byte pipe to a shell on a node, with the methods of a socket; owned by `Process`.

    paramiko's channels satisfy it unchanged. One thread reads its output, one its standard error,
    others write. `close` may be called by any of them, twice.
    """

    closed: bool
    status_event: threading.Event
    """Set once the exit status is available, or the channel is lost."""

    def settimeout(self, timeout: float | None) -> None:
        """Set the seconds after which `recv`, `recv_stderr` and `send` raise TimeoutError; None for
        never.
        """

    def exec_command(self, command: str) -> None:
        """Start the shell with this command line; called once, before all other methods."""

    def recv(self, nbytes: int) -> bytes:
        """Return bytes of its output, at least one; b"" at its end."""

    def recv_ready(self) -> bool:
        """Return True if `recv` would return at once."""

    def recv_stderr(self, nbytes: int) -> bytes:
        """Return bytes of its standard error, as `recv`."""

    def send(self, data: bytes) -> int:
        """Send some of these bytes to its standard input and return how many.

        Returns 0 or raises OSError if the shell has ended.
        """

    def shutdown_write(self) -> None:
        """End its standard input (half-close); its output stays open."""

    def exit_status_ready(self) -> bool:
        """Return True if it has ended and its status is known."""

    def recv_exit_status(self) -> int:
        """Return the command's exit status; -1 if a signal ended it, or if it is unknown."""

    def close(self) -> None:
        """End the pipe at both ends; readers see its end."""


class Process:
    """A remote shell script with its standard streams; a Transport.

    The text goes to ``/bin/sh`` over standard input, so that no login shell's grammar matters and
    the script does not show in process lists. Output of profiles is dropped: the script's output
    begins after a random mark. The process starts in the user's home.

    Args:
        channel: a new channel, owned by the process from now on.
        host: the host's label, for errors.
        text: the script, for POSIX sh. It may read the standard input that is written here.
        kill: called with the process's number if it does not end by itself; must end it with all
            its child processes.
        connected: returns True while the underlying connection is up.
        trial: a command line with which the user can try the same.
        shell: the shell that reads the script.

    Raises:
        HostError: it did not start.
    """

    def __init__(
        self,
        channel: Channel,
        host: str,
        text: str,
        kill: Callable[[int], None],
        connected: Callable[[], bool],
        trial: str,
        shell: Shell = LOGIN_SHELL,
    ) -> None:
        self.host = host
        self._shell = shell
        self._channel, self._kill, self._connected = channel, kill, connected
        self._errors = bytearray()
        self._mark = f"skymagic-{secrets.token_hex(8)}"
        self._unread = b""
        self._thread = threading.Thread(
            target=self._read_errors, name=f"skymagic-errors-{host}", daemon=True
        )
        try:
            timeout = shell.timeout or START_TIMEOUT
            channel.settimeout(timeout)
            channel.exec_command(shell.command)
            self._thread.start()
            # Race: if it has already ended, its output says why.
            with contextlib.suppress(OSError):
                self.write(_script(self._mark, text).encode())
            self.pid = self._wait_for_start()
            """Process id on its host; the process leads its session."""
            channel.settimeout(None)
        except BaseException as problem:
            self._release()
            if isinstance(problem, TimeoutError):
                reason = f"{shell.noun} ran nothing within {shell.timeout or START_TIMEOUT:.0f} s"
                waits = "does a profile wait for something? " if shell is LOGIN_SHELL else ""
                raise HostError(
                    host,
                    reason,
                    f"{waits}Try: {trial}".lstrip(),
                    code="shell-hangs",
                ) from problem
            if isinstance(problem, Exception) and not isinstance(problem, HostError):
                raise HostError(
                    host,
                    f"no process could be started: {problem}",
                    f"try: {trial}",
                    code="shell-refused",
                ) from problem
            raise

    def _wait_for_start(self) -> int:
        """Read up to the mark, drop everything before it, and return the process id."""
        output = b""
        while (match := re.search(rb"%s (\d+)\n" % self._mark.encode(), output)) is None:
            data = self._channel.recv(CHUNK_BYTES)
            if not data:
                self._thread.join(timeout=1.0)
                if not self.alive:
                    raise HostError(self.host, "the connection is lost", code="host-lost")
                message = b"\n".join(filter(None, (output.strip(), bytes(self._errors).strip())))[
                    -4000:
                ]
                ending = (
                    ":\n" + message.decode(errors="replace") if message else " without any output"
                )
                reason = f"{self._shell.noun} ended before it ran anything{ending}"
                raise HostError(
                    self.host, reason, "" if message else ACCOUNT_REMEDY, code="shell-ended"
                )
            output += data
            if len(output) > KEPT_ERROR_BYTES:
                reason = (
                    f"{self._shell.noun} printed more than {KEPT_ERROR_BYTES >> 20} MB "
                    "before it ran anything"
                )
                raise HostError(self.host, reason, ACCOUNT_REMEDY, code="shell-floods")
        self._unread = output[match.end() :]
        return int(match[1])

    # -- Transport ---------------------------------------------------------------------------------

    def read(self) -> bytes:
        """Return bytes of its standard output, at least one.

        Return b"" when it has ended or the connection is lost.
        """
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        # Read everything available: paramiko moves the rest of its buffer at each read.
        return self._channel.recv(WINDOW_BYTES)

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes to its standard input.

        Raises:
            BrokenPipeError: it has ended, or the connection is lost.
        """
        view = memoryview(data).cast("B")
        while view:
            # A process that ends while it is being fed shows in two ways: paramiko returns 0 if it
            # saw the end while waiting for room, and raises "Socket is closed" if it saw it before.
            try:
                # paramiko copies its argument before it cuts off a packet.
                sent = self._channel.send(view[:CHUNK_BYTES])  # type: ignore[arg-type]
            except TimeoutError:  # the login shell timed out
                raise
            except (EOFError, OSError) as problem:
                raise self._broken_pipe() from problem
            if sent == 0:
                raise self._broken_pipe()
            view = view[sent:]

    def _broken_pipe(self) -> BrokenPipeError:
        reason = "the input of the process is closed" if self.alive else "the connection is lost"
        return BrokenPipeError(f"{self.host}: {reason}")

    def complaint(self) -> str:
        """Return the end of its standard error, for messages."""
        return sanitized(self.errors()[-4000:].strip())

    def close(self) -> None:
        """End its input, wait until it has ended, and kill it if it does not.

        Safe to call twice.
        """
        self.end_input()
        self.kill(GRACE_PERIOD)

    def kill(self, grace: float = 0.0) -> None:
        """End it now, or after `grace` seconds, with all its child processes; close the channel.

        Safe to call twice.
        """
        if not self._channel.closed and self.alive and not self._wait(grace):
            with contextlib.suppress(Exception):
                self._kill(self.pid)
            self._wait(GRACE_PERIOD)
        self._release()

    # -- other methods -----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True while its connection is up."""
        return self._connected()

    def status(self) -> int | None:
        """Return the exit status; None while it runs, -1 if a signal ended it or the connection was
        lost.
        """
        if self._channel.exit_status_ready():
            return self._channel.recv_exit_status()
        return -1 if self._channel.closed else None

    def errors(self) -> str:
        """Return its standard error, without the beginning if it is long."""
        text = bytes(self._errors).decode(errors="replace")
        return text.partition(f"{self._mark}\n")[2] if f"{self._mark}\n" in text else text

    def end_input(self) -> None:
        """Close its standard input. Safe to call twice."""
        with contextlib.suppress(Exception):
            self._channel.shutdown_write()

    def finish(self, timeout: float | None = None) -> int | None:
        """Wait for its exit status after its output has ended.

        Return None after `timeout` seconds.
        """
        self._channel.status_event.wait(timeout)
        self._thread.join(timeout=1.0)
        return self.status()

    def _wait(self, seconds: float) -> bool:
        """Return True if it ends within `seconds` seconds.

        Its output is drained meanwhile, because a full window would block it.
        """
        end = time.monotonic() + seconds
        while not self._channel.status_event.wait(0.02):
            if time.monotonic() >= end:
                return False
            with contextlib.suppress(OSError):
                while self._channel.recv_ready() and self._channel.recv(CHUNK_BYTES):
                    pass
        return True

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            self._channel.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _read_errors(self) -> None:
        """Drain standard error: unread, it would fill the channel's window and block standard
        output too.
        """
        while True:
            try:
                data = self._channel.recv_stderr(CHUNK_BYTES)
            except TimeoutError:  # the channel's timeout is meant for the login shell
                continue
            if not data:
                return
            self._errors += data
            if len(self._errors) > 2 * KEPT_ERROR_BYTES:
                del self._errors[:-KEPT_ERROR_BYTES]


def _script(mark: str, text: str) -> str:
    """Return the text as a compound command; everything behind it becomes the text's input.

    A shell reads a compound command as a whole before it runs any of it. The mark is not spelled
    out in it, so that a shell that echoes its input does not print the mark.
    """
    head, tail = mark[:12], mark[12:]
    return (
        f"{{ cd; printf '%s%s\\n' {head} {tail} >&2; "
        f"printf '%s%s %s\\n' {head} {tail} $$\n{text}\nexit\n}}\n"
    )
