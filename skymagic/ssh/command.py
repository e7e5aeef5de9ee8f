"""Channels backed by local sockets.

A program (``srun … /bin/sh``, ``ssh -S …``, ``kubectl exec``) or a thread is behind them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

END_SECONDS = 5.0
"""Seconds that a program may take to end after SIGTERM."""


class SocketChannel:
    """The streams of a channel, for a program or thread that passes them on.

    They are sockets rather than pipes: sockets have timeouts and half-close, and their `shutdown`
    wakes readers. `_theirs` and `_their_errors` are the other ends.
    """

    def __init__(self) -> None:
        self.closed = False
        self._status = -1
        self.status_event = threading.Event()
        self._streams, self._theirs = socket.socketpair()
        self._output = self._streams  # output is read from here
        self._errors, self._their_errors = socket.socketpair()

    def settimeout(self, timeout: float | None) -> None:
        """Set the timeout of the streams, in seconds."""
        for stream in (self._streams, self._output):
            stream.settimeout(timeout)

    def recv(self, nbytes: int) -> bytes:
        """Return bytes of its output."""
        return _received(self._output, min(nbytes, 1 << 20))

    def recv_stderr(self, nbytes: int) -> bytes:
        """Return bytes of its standard error."""
        return _received(self._errors, nbytes)

    def recv_ready(self) -> bool:
        """Return True if output, or its end, can be read."""
        return bool(select.select([self._output], [], [], 0)[0])

    def send(self, data: bytes) -> int:
        """Send some of these bytes to its standard input."""
        return self._streams.send(data)

    def shutdown_write(self) -> None:
        """End its standard input."""
        self._streams.shutdown(socket.SHUT_WR)

    def exit_status_ready(self) -> bool:
        """Return True if the shell has ended."""
        return self.status_event.is_set()

    def recv_exit_status(self) -> int:
        """Wait for the shell's exit status; -1 if a signal ended it, or if it is unknown."""
        self.status_event.wait()
        return self._status

    def close(self) -> None:
        """End the program or thread behind the streams. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        # this ends all reads and writes at either end
        own = (self._streams, self._output, self._errors)
        for stream in own:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._end()
        for end in (*own, self._theirs, self._their_errors):
            end.close()

    def _end(self) -> None:
        """End the program or thread, wait for it and release its resources. Called once."""
        raise NotImplementedError


class CommandChannel(SocketChannel):
    """A program that takes a shell's command line as its last argument, and relays that shell's
    streams.

    Args:
        command: the program with its arguments.
        env: its environment.
        lost: exit status with which the program reports that it does not know the shell's status.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], lost: int = -1) -> None:
        super().__init__()
        # A program must not have one socket as both streams. One that is built on asyncio watches
        # its output for the end of the reader, takes incoming data for it, and closes.
        self._output, self._their_output = socket.socketpair()
        self._lost = lost
        self._command, self._env = tuple(command), dict(env)
        self._program: subprocess.Popen[bytes] | None = None

    def exec_command(self, command: str) -> None:
        """Start the program with this command line as its last argument."""
        with self._theirs, self._their_output, self._their_errors:
            self._program = subprocess.Popen(
                [*self._command, command],
                stdin=self._theirs.fileno(),
                stdout=self._their_output.fileno(),
                stderr=self._their_errors.fileno(),
                env=self._env,
                start_new_session=True,  # a terminal's Ctrl-C is meant for the notebook
            )
        threading.Thread(target=self._wait, name="skymagic-channel", daemon=True).start()

    def _wait(self) -> None:
        assert self._program is not None
        status = self._program.wait()
        self._status = -1 if status == self._lost else max(-1, status)
        self.status_event.set()

    def _end(self) -> None:
        self._their_output.close()
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
