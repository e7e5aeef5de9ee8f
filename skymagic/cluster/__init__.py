"""Node agents of one pool and the ranks that they run, independent of the provider.

agents       start, watch, signal, call, replace
requests     requests to nodes and ranks while they run
links        connections to all agents, requests and replies, addresses between nodes
nodes        machines and ranks: state reported by agents, and detection of dead nodes
telemetry    output and resource use of ranks
checking     collects health reports from nodes
health       judges health reports and words the verdicts; pure
tunnel       one session with a node's daemon over many connections, exactly once
tunnel_ends  one connection of a tunnel, and the transport to the agent behind it
"""

from skymagic.cluster.agents import Agents
from skymagic.cluster.links import AgentLink
from skymagic.cluster.nodes import Node, RankState

__all__ = ["Agents", "AgentLink", "Node", "RankState"]
