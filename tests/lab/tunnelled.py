"""This machine as a provider whose agent is behind a tunnel: a pool whose connection a test can lose without any SSH."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymagic import providers
from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.plan.requests import PoolRequest
from skymagic.providers import Say, Survey
from skymagic.providers.local import Local, run
from skymagic.wire import processes


@dataclass(frozen=True)
class Tunnels(Survey):
    """The plan of a pool, and the tunnel to its agent."""

    tunnel: AgentTunnel = field(default_factory=AgentTunnel)

    def close(self) -> None:
        """Close the tunnel."""
        self.tunnel.close()


class Tunnelled(Local):
    """Ranks on this machine, reached as those of another are."""

    def plan(self, request: PoolRequest, say: Say) -> Tunnels:
        """Check the request against this machine."""
        return Tunnels(super().plan(request, say).plan)

    def acquire(self, survey: Survey, job_id: str, say: Say) -> Sequence[Node]:
        """One agent, which outlives its connections."""
        assert isinstance(survey, Tunnels)

        def opened(state):
            return survey.tunnel.open(lambda: run(processes.ATTACH, f"{job_id}-0"), state)

        return [Node(0, socket.gethostname(), opened, run, survey.tunnel.forward)]


providers.TABLE["local"] = f"{__name__}:Tunnelled"
