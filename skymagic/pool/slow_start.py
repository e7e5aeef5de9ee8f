"""Slow starts of ranks: report what delays them before the user gives up; restarts get past it.

A rank starts in two steps: the node's agent asks its forkserver for a process, and then the plugins
prepare it. Each step depends on another process, which may hang or be stopped while its connections
stay up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from skymagic.plan.units import rank_words, verb_form
from skymagic.wire import queries

if TYPE_CHECKING:
    from skymagic.pool.resources import PoolResources

logger = logging.getLogger(__name__)

SLOW_AFTER = 7.0
"""Seconds without progress in any rank's start after which the start counts as slow."""
ANSWER_TIMEOUT = 1.0
"""Seconds for an agent to answer a question."""


def delay_reason(resources: PoolResources) -> str:
    """Return what delays the starting ranks, in a sentence with its remedy; "" for no long delay.

    Takes up to `ANSWER_TIMEOUT` seconds if an agent does not answer.
    """
    late_ranks = resources.agents.late(SLOW_AFTER)
    if not late_ranks:
        return ""
    have, them = (
        verb_form(len(late_ranks), "has", "have"),
        verb_form(len(late_ranks), "it", "them"),
    )
    text = (
        f"{rank_words(late_ranks)} {have} not started for {SLOW_AFTER:.0f} s: "
        f"{_cause(resources, late_ranks)}; "
        f"%sky_restart starts {them} again"
    )
    logger.warning("%s", text)
    return text


def give_up_slow_nodes(resources: PoolResources, ranks: Collection[int]) -> bool:
    """Give up nodes with ranks that are slow to start.

    Args:
        ranks: the ranks to restart. A node with other ranks is kept, and so is an unreachable node,
            which may come back.

    Returns:
        True if a node was given up.
    """
    agents = resources.agents
    late_ranks = agents.late(SLOW_AFTER)
    if not late_ranks:
        return False
    nodes = {agents.specs[rank][0] for rank in late_ranks}
    stuck_nodes = [
        index
        for index in sorted(nodes - agents.gone.keys() - agents.away)
        if set(agents.ranks_of(index)) <= set(ranks)
    ]
    for index in stuck_nodes:
        agents.abandon(index, f"ranks on {agents.nodes[index].name} did not start")
    return bool(stuck_nodes)


def _cause(resources: PoolResources, late: Collection[int]) -> str:
    agents = resources.agents
    answered = agents.ask(late, queries.USAGE, ANSWER_TIMEOUT)
    if silent := [rank for rank in late if rank not in answered]:
        return f"the agent on {_hosts(resources, silent)} does not answer"
    if unforked := [rank for rank in late if agents.ranks[rank].pid is None]:
        return (
            f"the process that forks ranks on {_hosts(resources, unforked)} is still importing, or "
            "does not answer"
        )
    return "their plugins are still preparing them"


def _hosts(resources: PoolResources, ranks: Collection[int]) -> str:
    names = (resources.agents.ranks[rank].hostname for rank in ranks)
    return ", ".join(dict.fromkeys(names))
