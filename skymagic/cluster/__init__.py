"""The node agents of one pool, and the ranks that they run.

agents    all of them: start, watch, signal, call, replace
link      the connection to one agent, over whatever transport
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
