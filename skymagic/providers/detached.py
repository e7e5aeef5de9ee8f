"""Ranks on this machine that outlive their notebook: a daemon keeps their agent, as on another machine, and lets notebooks attach."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.errors import PoolError
from skymagic.providers.provider import Survey
from skymagic.wire import processes
from skymagic.wire.codec import Transport

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Access:
    """What leads another notebook of this machine to the daemon.

    Attributes:
        daemon: its name. secret: what it knows its notebooks by.
        machine: where it runs. python: the interpreter of its ranks, which a notebook must share.
    """

    daemon: str
    secret: str = field(repr=False)
    machine: str = field(default_factory=socket.gethostname)
    python: str = sys.executable


class Here:
    """This machine, and the tunnel to the agent on it.

    Args:
        access: what leads to an agent that is there already; None for a new one.

    Raises:
        PoolError: that one is on another machine, or of another Python; says what to do.
    """

    def __init__(self, access: Access | None = None) -> None:
        if access is not None:
            _check(access)
        self._tunnel = AgentTunnel(access.secret if access is not None else "")

    def node(self, daemon: str, run: Callable[..., Transport]) -> Node:
        """The machine as a pool sees it.

        Args:
            daemon: names what keeps the agent.
            run: starts ``python -m module arguments`` here.
        """

        def opened(state: Callable[[str], None]) -> Transport:
            return self._tunnel.open(lambda: run(processes.ATTACH, daemon), state)

        access = Access(daemon, self._tunnel.secret)
        return Node(0, socket.gethostname(), opened, run, access=access, leave=self._tunnel.leave, address=ADDRESS)

    def close(self) -> None:
        """End the agent and the tunnel; twice is safe."""
        self._tunnel.close()


@dataclass(frozen=True)
class Detached(Survey):
    """The plan of such a pool, and what leads to its agent."""

    here: Here = field(default_factory=Here)

    def close(self) -> None:
        """Close the tunnel; twice is safe."""
        self.here.close()


def _check(access: Access) -> None:
    """Raises PoolError where an agent cannot be reached, or a notebook could not work with its ranks."""
    if access.machine != socket.gethostname():
        raise PoolError(f"it runs on {access.machine}: attach from a notebook there")
    if access.python != sys.executable:
        raise PoolError(f"its ranks run in {access.python}: attach from a notebook with that interpreter")
