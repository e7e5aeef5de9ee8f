"""The node agents of one pool, and the ranks that they run, whatever gave the nodes.

agents       start, watch, signal, call, replace
requests     what nodes and ranks are asked and told while they run
links        the connections to all agents, requests and replies, addresses from node to node
nodes        machines and ranks: what agents tell of them, and whether a node out of reach is gone
telemetry    what ranks wrote and what they use
checking     asks nodes how they are
health       how nodes are, judged in words; pure
tunnel       one session with a node's daemon over many connections, exactly once
tunnel_ends  one connection of a tunnel, and the transport to the agent behind it
"""

from skymagic.cluster.agents import Agents
from skymagic.cluster.links import AgentLink
from skymagic.cluster.nodes import Node, RankState

__all__ = ["Agents", "AgentLink", "Node", "RankState"]
