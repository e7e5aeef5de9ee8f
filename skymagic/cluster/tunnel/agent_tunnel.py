"""The tunnel to a node's agent, and to each that is started in the place of one that is gone."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from skymagic.cluster.tunnel.tunnel import Tunnel
from skymagic.wire.codec import Transport


class AgentTunnel:
    """Owns a tunnel at a time.

    Args:
        secret: what the daemon of an agent that is there already knows its notebooks by; a new one unless given.
    """

    def __init__(self, secret: str = "") -> None:
        self.secret = secret or secrets.token_hex(16)
        self._takes_over = bool(secret)
        """Whether the next tunnel leads to an agent that is there already."""
        self._tunnel: Tunnel | None = None

    def open(self, connect: Callable[[], Transport], state: Callable[[str], None]) -> Transport:
        """The transport to an agent, after the end of the one before; the arguments are `Tunnel`'s."""
        self.close()
        takes_over, self._takes_over = self._takes_over, False
        self._tunnel = Tunnel(connect, state=state, secret=self.secret, takes_over=takes_over)
        return self._tunnel.agent

    def forward(self, address: str, port: int) -> int:
        """A port here that leads to this address and port as the node reaches it, while the agent is connected."""
        assert self._tunnel is not None
        return self._tunnel.forward(address, port)

    def leave(self) -> None:
        """Close it, and leave the agent and what that runs; twice is safe."""
        if self._tunnel is not None:
            self._tunnel.leave()

    def close(self) -> None:
        """End the agent and the tunnel; twice is safe."""
        if self._tunnel is not None:
            self._tunnel.close()
