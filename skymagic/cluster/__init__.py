"""The node agents of one pool, and the ranks that they run.

agents    all of them: start, watch, signal, call, replace
states    what is known of nodes and ranks, by what their agents send
links     the connections to all agents
link      the connection to one agent, over whatever transport
routes    the addresses by which the nodes reach each other
liveness  failure detection: whether a node out of reach is gone
logs      what ranks wrote, as their nodes tell it
nodes     a machine as its provider gives it; what is known of a rank
checking  asks nodes how they are, and has them send bytes to each other
health    how nodes are, judged in words; pure
resources  what ranks use, while somebody wants to know
rpc       requests to agents, and their replies
tunnel/   many streams over one lossy connection, exactly once
"""

from skymagic.cluster.agents import Agents
from skymagic.cluster.link import Link
from skymagic.cluster.nodes import Node, RankState

__all__ = ["Agents", "Link", "Node", "RankState"]
