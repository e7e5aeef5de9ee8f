"""Channels whose streams are sockets here: a local program (``srun … /bin/sh``, ``ssh -S …``, ``kubectl exec``), or what else passes them on."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

END_SECONDS = 5.0
"""For which a program may take to end that is asked to."""


class SocketChannel:
    """The streams of a channel, for what passes them on: a program, a thread.

    Sockets and not pipes: they have timeouts and half-close, and their `shutdown` wakes whoever reads. `_theirs` and `_their_errors` are the
    other ends.
    """

    def __init__(self) -> None:
        self.closed = False
        self._status = -1
        self.status_event = threading.Event()
        self._streams, self._theirs = socket.socketpair()
        self._errors, self._their_errors = socket.socketpair()

    def settimeout(self, timeout: float | None) -> None:
        """Set the timeout of the streams, in seconds."""
        self._streams.settimeout(timeout)

    def recv(self, nbytes: int) -> bytes:
        """Bytes of its output."""
        return _received(self._streams, min(nbytes, 1 << 20))

    def recv_stderr(self, nbytes: int) -> bytes:
        """Bytes of its standard error."""
        return _received(self._errors, nbytes)

    def recv_ready(self) -> bool:
        """Whether there is output, or its end."""
        return bool(select.select([self._streams], [], [], 0)[0])

    def send(self, data: bytes) -> int:
        """Send some of these bytes to its standard input."""
        return self._streams.send(data)

    def shutdown_write(self) -> None:
        """End its standard input."""
        self._streams.shutdown(socket.SHUT_WR)

    def exit_status_ready(self) -> bool:
        """Whether it has ended."""
        return self.status_event.is_set()

    def recv_exit_status(self) -> int:
        """The shell's exit status; -1 where a signal ended it, or nobody knows."""
        self.status_event.wait()
        return self._status

    def close(self) -> None:
        """End what passes the streams on; twice is safe."""
        if self.closed:
            return
        self.closed = True
        for stream in (
            self._streams,
            self._errors,
        ):  # whoever reads or writes at either end comes to the end
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._end()
        for each in (self._streams, self._errors, self._theirs, self._their_errors):
            each.close()

    def _end(self) -> None:
        """Have it end, and wait for that; what it had of its own is closed. Called once."""
        raise NotImplementedError


class CommandChannel(SocketChannel):
    """A program that takes a shell's command line as its last argument, and passes that shell's streams through.

    Args:
        command: the program with its arguments.
        env: its environment.
        lost: exit status by which the program says that it does not know the shell's.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], lost: int = -1) -> None:
        super().__init__()
        self._lost = lost
        self._command, self._env = tuple(command), dict(env)
        self._program: subprocess.Popen[bytes] | None = None

    def exec_command(self, command: str) -> None:
        """Start the program with this as its last argument."""
        with self._theirs, self._their_errors:
            self._program = subprocess.Popen(
                [*self._command, command], stdin=self._theirs.fileno(), stdout=self._theirs.fileno(), stderr=self._their_errors.fileno(),
                env=self._env, start_new_session=True,  # a terminal's Ctrl-C is for the notebook
            )  # fmt: skip
        threading.Thread(target=self._wait, name="skymagic-channel", daemon=True).start()

    def _wait(self) -> None:
        assert self._program is not None
        status = self._program.wait()
        self._status = -1 if status == self._lost else max(-1, status)
        self.status_event.set()

    def _end(self) -> None:
        if self._program is not None and self._program.poll() is None:
            self._program.terminate()
            if not self.status_event.wait(END_SECONDS):
                self._program.kill()


def _received(stream: socket.socket, nbytes: int) -> bytes:
    try:
        return stream.recv(nbytes)
    except TimeoutError:
        raise
    except OSError:  # closed by another thread
        return b""
