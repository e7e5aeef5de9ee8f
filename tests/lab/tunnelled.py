"""This machine as a provider whose agent is behind a tunnel: a pool whose connection a test can lose without any SSH."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from skymagic import providers
from skymagic.cluster import Node
from skymagic.cluster.tunnel import Tunnel
from skymagic.plan import Plan
from skymagic.providers import Say
from skymagic.providers.local import Local, run


class Tunnelled(Local):
    """Ranks on this machine, reached as those of another are."""

    def __init__(self) -> None:
        self._tunnels: list[Tunnel] = []

    def acquire(self, plan: Plan, job_id: str, say: Say) -> Sequence[Node]:
        """One agent, which outlives its gates."""

        def opened(state):
            self._tunnels.append(
                Tunnel(lambda: run("skymagic.kernels.daemon.attach", f"{job_id}-0"), state=state)
            )
            return self._tunnels[-1].agent()

        def forward(address: str, port: int) -> int:
            return self._tunnels[-1].forward(address, port)

        return [Node(0, socket.gethostname(), opened, run, forward)]

    def release(self) -> None:
        """Close the tunnels."""
        for tunnel in self._tunnels:
            tunnel.close()


providers.TABLE["local"] = f"{__name__}:Tunnelled"
