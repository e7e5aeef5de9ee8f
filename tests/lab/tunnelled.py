"""This machine as a provider whose agent is behind a tunnel: a pool whose connection a test can lose without any SSH."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymagic import providers
from skymagic.cluster import Node
from skymagic.cluster.tunnel import Tunnel
from skymagic.plan.requests import PoolRequest
from skymagic.providers import Say, Survey
from skymagic.providers.local import Local, run


@dataclass(frozen=True)
class Tunnels(Survey):
    """The plan of a pool, and the tunnels to its agent, one after the other."""

    opened: list[Tunnel] = field(default_factory=list)

    def close(self) -> None:
        """Close the tunnels."""
        for tunnel in self.opened:
            tunnel.close()


class Tunnelled(Local):
    """Ranks on this machine, reached as those of another are."""

    def plan(self, request: PoolRequest, say: Say) -> Tunnels:
        """Check the request against this machine."""
        return Tunnels(super().plan(request, say).plan)

    def acquire(self, survey: Survey, job_id: str, say: Say) -> Sequence[Node]:
        """One agent, which outlives its connections."""
        assert isinstance(survey, Tunnels)

        def opened(state):
            survey.opened.append(Tunnel(lambda: run("skymagic.kernels.daemon.attach", f"{job_id}-0"), state=state))
            return survey.opened[-1].agent

        def forward(address: str, port: int) -> int:
            return survey.opened[-1].forward(address, port)

        return [Node(0, socket.gethostname(), opened, run, forward)]


providers.TABLE["local"] = f"{__name__}:Tunnelled"
