"""A check of a pool's nodes: what its plan expects of them, and which processes there are its own."""

from __future__ import annotations

from collections.abc import Callable

from skymagic.cluster import Agents, checking
from skymagic.cluster.health import Findings
from skymagic.plan.plans import Plan


def check(agents: Agents, plan: Plan, quick: bool, say: Callable[[str], None]) -> Findings:
    """Check all nodes, also while cells run, which then share the links with the check.

    Args:
        quick: send little over each link.
        say: gets a line on each step.
    """
    own: dict[int, list[int]] = {}
    for rank, state in agents.ranks.items():
        if state.pid is not None and state.exited is None:
            own.setdefault(agents.specs[rank][0], []).append(state.pid)
    # nodes of a pool on this machine share it
    gpus = (
        len({one.word for node in plan.devices for one in node})
        if not plan.remote
        else max(map(len, plan.devices), default=0)
    )
    return checking.check(agents.nodes, own, checking.QUICK if quick else checking.WHOLE, expected=gpus, say=say)
