"""What a pool says of its ranks: a row for each, what they keep when it grows or shrinks, what can be done when some are gone; pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from skymagic.cluster import Agents
from skymagic.plan.plans import Topology
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool.states import State
from skymagic.wire import agent as wire


def rows(topology: Topology, agents: Agents, state: State) -> list[tuple[object, ...]]:
    """A row for each rank: rank, node, host, process id, state."""
    of_all = "ready" if state is State.DEGRADED else state.value
    found: list[tuple[object, ...]] = []
    for number, rank in sorted(agents.ranks.items()):
        word = "ended" if rank.exited else of_all if rank.ready else "starting"
        index = agents.specs[number][0]
        word = "taken back" if index in agents.ending else word
        word = "gone" if index in agents.gone else "reconnecting" if index in agents.away else word
        found.append((number, topology.node_of(number), rank.hostname, rank.pid, word))
    return found


def interruption(message: wire.InterruptionNotice, name: str, now: float) -> str:
    """What will become of a machine.

    Args:
        name: the machine's. now: seconds since 1970.
    """
    if message.at is None:
        return f"node {message.node} ({name}): {message.reason}"
    when = f"in {max(0.0, message.at - now):.0f} s, at {time.strftime('%H:%M:%S', time.localtime(message.at))}"
    lost = f"{rank_words(message.ranks)} {agreeing(len(message.ranks), 'is', 'are')} lost"
    return (
        f"node {message.node} ({name}): {message.reason} {when}; {lost} then"
        if message.ranks
        else f"node {message.node} ({name}): {message.reason} {when}"
    )


def hook_ended(message: wire.HookEnded) -> str:
    """How a call of an ``on_interruption`` hook has ended."""
    how = f"has failed ({message.error})" if message.error else "has run"
    return f"rank {message.rank}: its on_interruption hook {how}, in {message.seconds:.1f} s"


def variables_then(before: int, after: int, inseparable: Sequence[str], moved: bool = False) -> str:
    """What becomes of the variables when a pool of `before` ranks has `after`.

    Args:
        inseparable: plugins whose ranks cannot go on when their number changes.
        moved: whether ranks have other GPUs then.
    """
    if moved and not inseparable:
        return "all ranks were started anew, without variables: they have other GPUs now"
    if inseparable:
        names = ", ".join(inseparable)
        return f"all ranks were started anew, without variables: {names} cannot go on with another number of ranks"
    stay = range(min(before, after))
    others = f"{rank_words(range(before, after))} {agreeing(after - before, 'has', 'have')} none"
    if after < before:
        others = f"those of {rank_words(range(after, before))} are gone"
    return f"{rank_words(stay)} {agreeing(len(stay), 'keeps its', 'keep their')} variables, {others}"


def replaced(problems: Mapping[int, str], ranks: Collection[int], world_size: int) -> str:
    """What became of ranks when a process group could not be formed again.

    Args:
        problems: what went wrong on the ranks that are at fault, if that is known.
        ranks: those that are started anew.
    """
    why = "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items())) or "it took too long"
    all_of_them = len(ranks) == world_size
    who = "all ranks were" if all_of_them else f"{rank_words(sorted(ranks))} {agreeing(len(ranks), 'was', 'were')}"
    theirs = "their" if all_of_them or len(ranks) > 1 else "its"
    return f"the process group could not be formed again ({why}): {who} started anew and lost {theirs} variables"


def lost(name: str) -> str:
    """What can be done when all ranks of a pool are out of reach."""
    return f"pool {name!r} is lost: %sky_restart starts all ranks anew, without variables; %sky_down {name} ends it"


def headless(job_id: str, others: Sequence[str], remote: bool) -> str:
    """What can be done with a pool whose first machine is gone, by a notebook that cannot attach to it.

    Args:
        others: the names of its other machines. remote: whether they are reached by name.
    """
    lost = "through that machine its ranks are reached: what they held, and results that nobody has taken, are lost"
    hosts = f" --hosts {','.join(others)}" if remote else ""
    ends = f"; %sky_down {job_id}{hosts} ends what is left on {', '.join(others)}" if others else ""
    return f"{lost}{ends}; %sky_pool makes the pool anew"


def without(lost: Sequence[int], world_size: int, *, replaced: bool = False) -> str:
    """What can be done when the machines of these ranks are gone.

    Args:
        replaced: whether others are rented in their place.
    """
    left = [rank for rank in range(world_size) if rank not in lost]
    there = ",".join(map(str, left))
    keep = (
        f"{rank_words(left)} {agreeing(len(left), 'keeps its', 'keep their')} variables "
        f"(-t {there} runs cells there, %sky_pull NAMES -t {there} brings variables back); "
        if left
        else ""
    )
    if replaced:
        return f"{keep}another machine is being rented in the place of the one that is gone, and cells for its ranks wait for it"
    return f"{keep}%sky_restart tries to reach them again, %sky_down ends the pool"
