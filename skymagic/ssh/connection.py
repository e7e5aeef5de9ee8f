"""An authenticated SSH connection, whose channels are paramiko's."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from skymagic.errors import HostError
from skymagic.ssh import login
from skymagic.ssh.config import Endpoint
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import WINDOW_BYTES

if TYPE_CHECKING:
    import paramiko

CHANNEL_ATTEMPTS = 3


class SSHConnection(HostConnection):
    """A connection to one host, with the connections to the hosts that it goes through; made by ``connecting``.

    Args:
        endpoint: the host.
        transport: an authenticated transport.
        resources: what is closed after it: sockets and connections that it goes through.
    """

    def __init__(self, endpoint: Endpoint, transport: paramiko.Transport, resources: contextlib.ExitStack) -> None:
        super().__init__(endpoint.label, f"ssh {endpoint.label} true")
        self._transport, self._resources = transport, resources

    @property
    def alive(self) -> bool:
        """Whether the connection is up; a dead peer is detected by TCP keepalive, after `DEAD_PEER_TIMEOUT`."""
        return self._transport.is_active()

    def release(self) -> None:
        """Close the connection and all that goes over it; twice is safe."""
        login.close(self._transport)
        self._resources.close()

    def open_channel(self, timeout: float) -> paramiko.Channel:
        """A channel of this connection. Raises HostError."""
        import paramiko

        attempts_left = CHANNEL_ATTEMPTS
        while True:
            try:
                return self._transport.open_session(window_size=WINDOW_BYTES, timeout=timeout)
            except paramiko.ChannelException as problem:
                # race: a process that has just ended may count toward MaxSessions a moment longer
                attempts_left -= 1
                if not attempts_left:
                    reason = f"sshd allows no more processes on this connection ({problem.text})"
                    raise HostError(self.label, reason, "raise MaxSessions in the host's sshd_config") from problem
                time.sleep(0.1)
            except (paramiko.SSHException, OSError, EOFError) as problem:
                raise HostError(self.label, "the connection is lost") from problem
