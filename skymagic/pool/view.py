"""A pool as it is shown: from its plan and the states of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from skymagic.display.panel import UNNAMED, NodeView, PoolView, RankUse, StartStep
from skymagic.plan import gpus
from skymagic.pool.states import State
from skymagic.pool.status import Status

Rows = Sequence[tuple[object, ...]]
"""For each rank: rank, node, host, process id, state; see `messages.rows`."""


def view(pool: Status, rows: Rows, use: Mapping[int, RankUse] = MappingProxyType({}), seconds: float = 0.0) -> PoolView:
    """A pool between its start and its end.

    Args:
        use: by rank what it uses, where that was measured.
        seconds: for which its machines have been there.
    """
    machines = () if pool.state is State.DECLARED else nodes(pool, rows, {}, use)
    return PoolView(pool.name, about(pool, seconds), pool.state.value, machines, ended=pool.state is State.STOPPED)


def starting(pool: Status, rows: Rows, seconds: float, steps: Mapping[str, StartStep]) -> PoolView:
    """A pool that starts; a line when that is over.

    Args:
        seconds: that the start took, once it is over.
        steps: by node, what was done there last.
    """
    over = pool.state not in (State.NEW, State.STARTING)
    good = pool.state in (State.READY, State.RUNNING)
    state = (
        f"ready in {seconds:.1f} s"
        if good
        else "not started"
        if over
        else f"{steps[UNNAMED].step if UNNAMED in steps else 'starting'} …"
    )
    return PoolView(pool.name, about(pool), state, () if over else nodes(pool, rows, steps), ended=over)


def about(pool: Status, seconds: float = 0.0) -> tuple[str, ...]:
    """Where it is, how large, with what, at which price, and about what it has cost after so many seconds."""
    plan = pool.plan
    each = " per node" if plan.topology.nodes > 1 else ""
    spent = f", about ${plan.price * seconds / 3600:.2f} so far" if plan.price and seconds else ""
    words = (
        plan.provider,
        f"{plan.size} on {_few(plan.hosts)}",
        f"{gpus.kinds(plan.devices[0])}{each}" if plan.devices and plan.devices[0] else "",
        ", ".join(spec.name for spec in plan.request.plugins),
        f"${plan.price:.2f} per hour{spent}" if plan.price else "",
    )
    return tuple(filter(None, words))


def _few(hosts: tuple[str, ...]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{hosts[0]} … {hosts[-1]}"


def nodes(
    pool: Status, rows: Rows, steps: Mapping[str, StartStep], use: Mapping[int, RankUse] = MappingProxyType({})
) -> tuple[NodeView, ...]:
    """Its nodes with their ranks; those of this machine as one, and before there are ranks the machines alone."""
    known = [
        (int(str(rank)), node if pool.plan.remote else 0, str(host), str(word)) for rank, node, host, _, word in rows
    ]
    if not known:
        return tuple(_without_ranks(pool, steps))
    found = []
    for _, group in groupby(known, key=lambda row: row[1]):
        mine = list(group)
        ranks = tuple((rank, word) for rank, _, _, word in mine)
        up = sum(word != "starting" for _, word in ranks)
        waiting = pool.state is State.STARTING and up < len(ranks)
        words, share = (f"{up} of {len(ranks)} ranks", up / len(ranks)) if waiting else ("", None)
        mine_use = {rank: use[rank] for rank, _ in ranks if rank in use}
        found.append(NodeView(mine[0][2], ranks, "starting" if waiting else "", words, share, mine_use))
    return tuple(found)


def _without_ranks(pool: Status, steps: Mapping[str, StartStep]) -> Iterator[NodeView]:
    """Machines that are being made ready: those of the plan, or, of rented ones, those that were given."""
    named = [name for name in steps if name != UNNAMED]
    for host in dict.fromkeys(named if pool.plan.region and named else [*pool.plan.hosts, *named]):
        step = steps.get(host) or steps.get(UNNAMED)
        yield NodeView(host, (), step.phase, step.step, step.share) if step else NodeView(host, phase="starting")
