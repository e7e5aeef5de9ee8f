"""Ranks that are slow to start: what holds them up, told before a user gives up waiting, and how a restart gets past it.

A rank starts in three steps, each by another process, which may hang or be stopped while the connections to it stand: the node's agent
asks its forkserver for a process, that process registers with the controller, and then the plugins prepare it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from skymagic.plan.units import agreeing, rank_words

if TYPE_CHECKING:
    from skymagic.pool.resources import PoolResources

logger = logging.getLogger(__name__)

SLOW_AFTER = 7.0
"""Seconds without news of any rank's start after which it counts as slow."""
ANSWER_TIMEOUT = 1.0
"""Seconds in which an agent, or the controller, answers a question."""


def reason(resources: PoolResources) -> str:
    """Return what holds up the ranks that are starting, in a sentence with its remedy, or "" while nothing has for long.

    It takes up to `ANSWER_TIMEOUT` seconds for each process that does not answer.
    """
    late = resources.agents.late(SLOW_AFTER)
    if not late:
        return ""
    have, them = agreeing(len(late), "has", "have"), agreeing(len(late), "it", "them")
    text = (
        f"{rank_words(late)} {have} not registered for {SLOW_AFTER:.0f} s: {_cause(resources, late)}; "
        f"%sky_restart starts {them} again"
    )
    logger.warning("%s", text)
    return text


def give_up(resources: PoolResources, ranks: Collection[int]) -> bool:
    """Give up the nodes on which ranks are slow to start, and the head if the controller does not answer.

    Args:
        ranks: those that are to be restarted. A node with another rank is kept, and so is one that is out of reach: it may come back.

    Returns:
        Whether there was one.
    """
    agents = resources.agents
    late = agents.late(SLOW_AFTER)
    if not late:
        return False
    nodes = {agents.specs[rank][0] for rank in late}
    if not resources.engine.answers(ANSWER_TIMEOUT):
        nodes.add(0)
    stuck = [
        index
        for index in sorted(nodes - agents.gone.keys() - agents.away)
        if set(agents.ranks_of(index)) <= set(ranks)
    ]
    for index in stuck:
        agents.abandon(index, f"ranks on {agents.nodes[index].name} did not start")
    return bool(stuck)


def _cause(resources: PoolResources, late: Collection[int]) -> str:
    agents = resources.agents
    answered = agents.ask(late, "usage", ANSWER_TIMEOUT)
    if silent := [rank for rank in late if rank not in answered]:
        return f"the agent on {_hosts(resources, silent)} does not answer"
    if unforked := [rank for rank in late if agents.ranks[rank].pid is None]:
        return f"the process that forks ranks on {_hosts(resources, unforked)} is still importing, or does not answer"
    if not resources.engine.answers(ANSWER_TIMEOUT):
        return f"the controller on {agents.nodes[0].name} does not answer"
    return "their plugins are still preparing them"


def _hosts(resources: PoolResources, ranks: Collection[int]) -> str:
    names = (resources.agents.ranks[rank].hostname for rank in ranks)
    return ", ".join(dict.fromkeys(names))
