"""ProxyJump and ProxyCommand: streams to a host that are no plain sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from typing import TYPE_CHECKING

from skymagic.errors import HostError
from skymagic.ssh.config import Endpoint

if TYPE_CHECKING:
    import paramiko


def open_through(jump: paramiko.Transport, via: Endpoint, endpoint: Endpoint) -> paramiko.Channel:
    """A direct-tcpip channel (RFC 4254, 7.2) through a jump host to the endpoint.

    Raises:
        HostError: the jump host cannot, or may not, reach it.
    """
    import paramiko

    where = f"{endpoint.hostname} port {endpoint.port}"
    address = (endpoint.hostname, endpoint.port)
    try:
        return jump.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=endpoint.timeout)
    except paramiko.ChannelException as problem:
        how, remedy = "cannot connect", f"is the host up, and does {via.label} know it by that name?"
        if problem.code == 1:
            how = "does not allow connections"
            remedy = f"AllowTcpForwarding must be on in the sshd of {via.label}"
        reason = f"the jump host {via.label} {how} to {where}: {problem.text}"
        raise HostError(endpoint.label, reason, remedy) from problem
    except (paramiko.SSHException, OSError, EOFError) as problem:
        reason = f"{where} did not answer through the jump host {via.label} within {endpoint.timeout:.0f} s"
        raise HostError(endpoint.label, reason, f"is the host up, and may {via.label} reach it?") from problem


class ProxyCommand:
    """A ProxyCommand: a child process whose input and output are the stream.

    Args:
        endpoint: has a `proxy_command`.

    Raises:
        HostError: it cannot be started.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.proxy_command is not None
        if os.name == "nt":
            raise HostError(endpoint.label, "ProxyCommand does not work on Windows", "ProxyJump does")
        self._endpoint = endpoint
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [os.environ.get("SHELL", "/bin/sh"), "-c", f"exec {endpoint.proxy_command}"],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors,
                start_new_session=True,  # a terminal's Ctrl-C is for the notebook
            )  # fmt: skip

    def with_output(self, failure: HostError) -> HostError:
        """The failure, or the command's exit code and output when it has ended."""
        try:
            code = self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return failure
        said = os.pread(self._errors.fileno(), 2000, 0).decode(errors="replace").strip()
        words = f"its ProxyCommand {self._endpoint.proxy_command!r} ended with exit code {code}"
        return HostError(failure.host, f"{words}: {said}" if said else words, f"try it by hand: ssh {failure.host}")

    def close(self) -> None:
        """Kill the command; twice is safe."""
        self.socket.close()
        try:
            self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._errors.close()
