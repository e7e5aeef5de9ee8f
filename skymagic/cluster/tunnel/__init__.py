"""Links to a node that survive lost connections: the agent's messages and TCP streams, nothing lost, nothing repeated."""

from __future__ import annotations

from skymagic.cluster.tunnel.tunnel import Tunnel

__all__ = ["Tunnel"]
