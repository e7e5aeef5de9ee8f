"""What a pool says of its ranks: a row for each, what they keep when it grows or shrinks, what can be done when some are gone; pure."""

from __future__ import annotations

from collections.abc import Sequence

from skymagic.cluster import Agents
from skymagic.plan.plans import Topology
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool.states import State


def rows(topology: Topology, agents: Agents, state: State) -> list[tuple[object, ...]]:
    """A row for each rank: rank, node, host, process id, state."""
    of_all = "ready" if state is State.DEGRADED else state.value
    found: list[tuple[object, ...]] = []
    for number, rank in sorted(agents.ranks.items()):
        word = "ended" if rank.exited else of_all if rank.ready else "starting"
        index = agents.specs[number][0]
        word = "gone" if index in agents.gone else "reconnecting" if index in agents.away else word
        found.append((number, topology.node_of(number), rank.hostname, rank.pid, word))
    return found


def variables_then(before: int, after: int, inseparable: Sequence[str]) -> str:
    """What becomes of the variables when a pool of `before` ranks has `after`.

    Args:
        inseparable: plugins whose ranks cannot go on when their number changes.
    """
    if inseparable:
        names = ", ".join(inseparable)
        return f"all ranks were started anew, without variables: {names} cannot go on with another number of ranks"
    stay = range(min(before, after))
    others = f"{rank_words(range(before, after))} {agreeing(after - before, 'has', 'have')} none"
    if after < before:
        others = f"those of {rank_words(range(after, before))} are gone"
    return f"{rank_words(stay)} {agreeing(len(stay), 'keeps its', 'keep their')} variables, {others}"


def lost(name: str) -> str:
    """What can be done when all ranks of a pool are out of reach."""
    return f"pool {name!r} is lost: %sky_restart starts all ranks anew, without variables; %sky_down {name} ends it"


def without(lost: Sequence[int], world_size: int) -> str:
    """What can be done when the machines of these ranks are gone."""
    left = [rank for rank in range(world_size) if rank not in lost]
    there = ",".join(map(str, left))
    keep = (
        f"{rank_words(left)} {agreeing(len(left), 'keeps its', 'keep their')} variables "
        f"(-t {there} runs cells there, %sky_pull NAMES -t {there} brings variables back); "
        if left
        else ""
    )
    return f"{keep}%sky_restart tries to reach them again, %sky_down ends the pool"
