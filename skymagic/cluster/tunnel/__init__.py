"""The notebook's end of a node's session (`wire.session`): an agent and TCP ports that outlive each connection.

tunnel        one session over one connection after the other: reconnects, forwards ports, reports its state
agent_tunnel  the one to a node's agent, and to each that follows it there
connection    one connection: handshake, then bytes both ways on threads of its own
agent_end     channel 0 as a transport, which does not notice lost connections
"""

from skymagic.cluster.tunnel.agent_tunnel import AgentTunnel
from skymagic.cluster.tunnel.tunnel import Tunnel

__all__ = ["AgentTunnel", "Tunnel"]
