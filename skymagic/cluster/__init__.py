"""The node agents of one pool, and the ranks that they run.

link       the notebook's end of the line to one agent, over whatever transport
members    machines as a provider gives them; what is known of a rank
questions  what agents are asked, and their answers
absence    whether a node out of sight is gone: the others are asked
agents     all of them: start, watch, signal, ask, replace
"""

from skymagic.cluster.agents import Agents
from skymagic.cluster.link import Link
from skymagic.cluster.nodes import Node, RankState

__all__ = ["Agents", "Link", "Node", "RankState"]
