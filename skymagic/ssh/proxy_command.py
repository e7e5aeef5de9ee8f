"""ProxyCommand: a child process whose standard input and output are connected to an sshd."""

from __future__ import annotations

import errno
import os
import selectors
import subprocess
import tempfile
import threading

from skymagic.errors import HostError
from skymagic.ssh.config import Endpoint


class PipeStream:
    """A byte stream over two pipes, with the socket methods that paramiko calls.

    One thread reads, others write; `close` may be called by any of them, twice.

    Args:
        readable: file descriptor of the pipe to read from. The stream owns both descriptors.
        writable: file descriptor of the pipe to write to.
    """

    def __init__(self, readable: int, writable: int) -> None:
        self._readable, self._writable = readable, writable
        os.set_blocking(readable, False)
        os.set_blocking(writable, False)
        self._timeout: float | None = None
        # Closing wakes all waiting threads, and closes the descriptors only once none uses them:
        # their numbers may be given to other files at once.
        self._wake_reader, self._wake_writer = os.pipe()
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._ending = threading.Lock()
        self._closed = False  # paramiko reads it

    def settimeout(self, timeout: float | None) -> None:
        """Set the seconds after which `recv` and `send` raise TimeoutError; None for never."""
        self._timeout = timeout

    def recv(self, nbytes: int) -> bytes:
        """Return at least one byte, or b"" at the end of the stream."""
        with self._reading:
            while True:
                self._wait(self._readable, selectors.EVENT_READ)
                try:
                    return os.read(self._readable, nbytes)
                except BlockingIOError:
                    continue

    def send(self, data: bytes) -> int:
        """Write some of these bytes and return how many."""
        with self._writing:
            while True:
                self._wait(self._writable, selectors.EVENT_WRITE)
                try:
                    return os.write(self._writable, data)
                except BlockingIOError:
                    continue

    def close(self) -> None:
        """Close both pipes. Safe to call twice, and on several threads at once."""
        # held to the end: else a second thread could close the descriptor that the first writes to
        with self._ending:
            if self._closed:
                return
            self._closed = True
            os.write(self._wake_writer, b"x")
            with self._reading, self._writing:
                for fd in (self._readable, self._writable, self._wake_reader, self._wake_writer):
                    os.close(fd)

    def _wait(self, fd: int, event: int) -> None:
        """Wait until the descriptor is ready; its lock is held."""
        if self._closed:
            raise OSError(errno.EBADF, "the stream is closed")
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            ready = selector.select(self._timeout)
        if self._closed:
            raise OSError(errno.EBADF, "the stream is closed")
        if not ready:
            raise TimeoutError("timed out")


class ProxyCommand:
    """A ProxyCommand: a child process whose input and output are the stream.

    Its input and output are two pipes, as with OpenSSH. A single socket for both misleads proxies
    built on asyncio, which watch their output for the end of its reader and mistake incoming data
    for that.

    Args:
        endpoint: has a `proxy_command`.

    Raises:
        HostError: it cannot be started.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.proxy_command is not None
        if os.name == "nt":
            raise HostError(
                endpoint.label,
                "ProxyCommand does not work on Windows",
                "ProxyJump does",
                code="host-proxy",
            )
        self._endpoint = endpoint
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        child_input, to_child = os.pipe()
        from_child, child_output = os.pipe()
        self.stream = PipeStream(from_child, to_child)
        try:
            self._child = subprocess.Popen(
                [os.environ.get("SHELL", "/bin/sh"), "-c", f"exec {endpoint.proxy_command}"],
                stdin=child_input,
                stdout=child_output,
                stderr=self._errors,
                start_new_session=True,  # a terminal's Ctrl-C is for the notebook
            )
        except OSError as problem:
            self.stream.close()
            self._errors.close()
            reason = f"its ProxyCommand could not be started: {problem}"
            raise HostError(
                endpoint.label, reason, "does the shell that $SHELL names exist?", code="host-proxy"
            ) from problem
        finally:
            os.close(child_input)
            os.close(child_output)

    def with_output(self, failure: HostError) -> HostError:
        """Return the failure, or the command's exit code and output if it has ended."""
        try:
            code = self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return failure
        output = os.pread(self._errors.fileno(), 2000, 0).decode(errors="replace").strip()
        message = f"its ProxyCommand {self._endpoint.proxy_command!r} ended with exit code {code}"
        return HostError(
            failure.host,
            f"{message}: {output}" if output else message,
            f"try it by hand: ssh {failure.host}",
            code="host-proxy",
        )

    def close(self) -> None:
        """Kill the command. Safe to call twice."""
        self.stream.close()
        try:
            self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._errors.close()
