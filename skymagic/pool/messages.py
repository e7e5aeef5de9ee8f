"""A pool as it is shown: its picture, a row for each rank, and what it says of ranks that grow, shrink, are gone or were started again; pure."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

from skymagic.cluster import Agents
from skymagic.data.capture.names import cell_names
from skymagic.display.panel import UNNAMED, NodeView, PoolView, RankUse, StartStep
from skymagic.plan import gpus
from skymagic.plan.plans import Topology
from skymagic.plan.units import agreeing, duration_text, rank_words
from skymagic.pool.status import SharedStatus, State
from skymagic.run.report import Report
from skymagic.wire import agent as wire

if TYPE_CHECKING:
    from skymagic.data.shipping.bindings import Bindings, Manifest
    from skymagic.run.report import RunSpec


WAS_ENDED = (
    "was ended while this run was under way, and its variables are gone: recreate it with %sky_pool"
)
WAS_RECREATED = (
    "was recreated while this run was under way, and its variables are gone: run it again"
)


def stopped_runs(runs: Sequence[RunSpec]) -> str:
    """Name the runs that ended with their pool, in a clause: "cell 3 on ranks 0, 1 was stopped"; "" for none.

    The calls of one cell are named together.
    """
    ranks: dict[str, set[int]] = {}
    for run in runs:
        kind = "cell" if run.job == "cell" else f"the {run.job} of cell"
        ranks.setdefault(f"{kind} {run.execution_count}", set()).update(run.ranks)
    named = [f"{name} on {rank_words(sorted(where))}" for name, where in ranks.items()]
    return f"{' and '.join(named)} {agreeing(len(named), 'was', 'were')} stopped" if named else ""


def rows(topology: Topology, agents: Agents, state: State) -> list[tuple[object, ...]]:
    """A row for each rank: rank, node, host, process id, state."""
    of_all = "ready" if state is State.DEGRADED else state.value
    found: list[tuple[object, ...]] = []
    for number, rank in sorted(agents.ranks.items()):
        word = "ended" if rank.exited else of_all if rank.ready else "starting"
        index = agents.specs[number][0]
        word = "reclaimed" if index in agents.ending else word
        word = "gone" if index in agents.gone else "reconnecting" if index in agents.away else word
        found.append((number, topology.node_of(number), rank.hostname, rank.pid, word))
    return found


def interruption(message: wire.InterruptionNotice, name: str, now: float) -> str:
    """What will become of a machine."""
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
        return "all ranks were restarted, without variables: they have other GPUs now"
    if inseparable:
        names = ", ".join(inseparable)
        return f"all ranks were restarted, without variables: {names} cannot continue with a different number of ranks"
    stay = range(min(before, after))
    others = f"{rank_words(range(before, after))} {agreeing(after - before, 'has', 'have')} none"
    if after < before:
        others = f"those of {rank_words(range(after, before))} are gone"
    return (
        f"{rank_words(stay)} {agreeing(len(stay), 'keeps its', 'keep their')} variables, {others}"
    )


def replaced_words(problems: Mapping[int, str], ranks: Collection[int], world_size: int) -> str:
    """What became of ranks when a process group could not be formed again.

    Args:
        problems: what went wrong on the ranks that are at fault, if that is known.
        ranks: those that are started anew.
    """
    why = (
        "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items()))
        or "it took too long"
    )
    all_of_them = len(ranks) == world_size
    who = (
        "all ranks were"
        if all_of_them
        else f"{rank_words(sorted(ranks))} {agreeing(len(ranks), 'was', 'were')}"
    )
    theirs = "their" if all_of_them or len(ranks) > 1 else "its"
    return f"the process group could not be formed again ({why}): {who} restarted and lost {theirs} variables"


def lost(name: str) -> str:
    """What can be done when all ranks of a pool are out of reach."""
    return f"pool {name!r} is lost: %sky_restart restarts all ranks without variables; %sky_down {name} ends it"


def headless(job_id: str, others: Sequence[str], remote: bool) -> str:
    """What can be done with a pool whose first machine is gone, by a notebook that cannot attach to it.

    Args:
        others: the names of its other machines. remote: whether they are reached by name.
    """
    lost = "its ranks are reached through that machine: their variables and uncollected results are lost"
    hosts = f" --hosts {','.join(others)}" if remote else ""
    ends = f"; %sky_down {job_id}{hosts} ends what is left on {', '.join(others)}" if others else ""
    return f"{lost}{ends}; recreate the pool with %sky_pool"


def without(lost: Sequence[int], world_size: int, *, replaced: bool = False) -> str:
    """What can be done when the machines of these ranks are gone, in one line: for a note.

    Args:
        replaced: whether others are requested in their place.
    """
    return "; ".join(ways_without(lost, world_size, replaced=replaced))


def ways_without(lost: Sequence[int], world_size: int, *, replaced: bool = False) -> list[str]:
    """Return what can be done when the machines of these ranks are gone, a sentence each: for an error's lines."""
    left = [rank for rank in range(world_size) if rank not in lost]
    there = ",".join(map(str, left))
    keep = (
        f"{rank_words(left)} {agreeing(len(left), 'keeps its', 'keep their')} variables "
        f"(-t {there} runs cells there, %sky_pull NAMES -t {there} brings variables back)"
    )
    again = "%sky_restart tries to reach them again, %sky_down ends the pool"
    if replaced:
        again = "a replacement is requested, and cells for its ranks wait for it"
    return [keep, again] if left else [again]


def missing_names(report: Report, bindings: Bindings, source: str) -> list[str]:
    """A line for each name that ranks missed in a run, and another rank has: how to get it from there.

    Args:
        source: the cell, as plain Python: what else it uses that they lack is copied in one go.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for number, rank in sorted(report.ranks.items()):
        outcome = rank.outcome or {}
        name = outcome.get("missing")
        if name and name not in bindings.names(number):
            ranks_by_name.setdefault(name, []).append(number)
    return [
        line
        for name, ranks in ranks_by_name.items()
        if (line := _missing_name(name, ranks, bindings, source))
    ]


def _missing_name(name: str, ranks: list[int], bindings: Bindings, source: str) -> str:
    origin = next((rank for rank in bindings.known() if name in bindings.names(rank)), None)
    if origin is None:
        return ""
    held = frozenset.intersection(*map(bindings.names, ranks))
    used = sorted(cell_names(source).loads - {name}, key=source.find)
    names = [
        name,
        *(each for each in used if each not in held and bindings.has_rebound(origin, each)),
    ]
    have = f"{'has' if len(ranks) == 1 else 'have'} no {name}"
    if bindings.replaced.issuperset(ranks):
        what = f"{'was' if len(ranks) == 1 else 'were'} replaced and {have}"
    else:
        what = f"{have}, which rank {origin} has"
    return f"{rank_words(ranks)} {what}: {clone_command(ranks, origin, names)}"


def sent_instead(manifest: Manifest, bindings: Bindings, ranks: Sequence[int]) -> list[str]:
    """A line where replaced ranks get the notebook's value of a name of which the others have their own."""
    new = [rank for rank in ranks if rank in bindings.replaced]
    names: dict[str, list[int]] = {}
    origin = -1
    for bundle in manifest.orders.get("bundles", ()) if new else ():
        for name in bundle["names"]:
            theirs = next(
                (rank for rank in bindings.known() if bindings.has_rebound(rank, name)), None
            )
            getting = [
                rank for rank in new if bundle["ranks"] is not None and rank in bundle["ranks"]
            ]
            if theirs is not None and theirs not in (bundle["ranks"] or ranks) and getting:
                names[name], origin = getting, theirs
    if not names:
        return []
    to = sorted(set().union(*names.values()))
    get = "gets" if len(to) == 1 else "get"
    return [
        f"{rank_words(to)} {'was' if len(to) == 1 else 'were'} replaced and {get} the notebook's {', '.join(names)}, where "
        f"rank {origin} has its own: {clone_command(to, origin, names)}"
    ]


def clone_command(ranks: Iterable[int], source: int, names: Iterable[str]) -> str:
    """The line that copies a rank's variables to other ranks."""
    return f"%sky_clone {','.join(map(str, ranks))} --from {source} {' '.join(names)}"


Rows = Sequence[tuple[object, ...]]
"""For each rank: rank, node, host, process id, state; see `messages.rows`."""


def pool_view(
    pool: SharedStatus,
    rows: Rows,
    use: Mapping[int, RankUse] = MappingProxyType({}),
    seconds: float = 0.0,
) -> PoolView:
    """A pool between its start and its end.

    Args:
        use: by rank what it uses, where that was measured.
        seconds: for which its machines have been there.
    """
    machines = () if pool.state is State.DECLARED else node_views(pool, rows, {}, use)
    return PoolView(
        pool.name,
        about(pool, seconds),
        pool.state.value,
        machines,
        ended=pool.state is State.STOPPED,
    )


def starting_view(
    pool: SharedStatus, rows: Rows, seconds: float, steps: Mapping[str, StartStep]
) -> PoolView:
    """A pool that starts; a line when that is over."""
    over = pool.state not in (State.NEW, State.STARTING)
    good = pool.state in (State.READY, State.RUNNING)
    state = (
        f"ready in {seconds:.1f} s"
        if good
        else "not started"
        if over
        else f"{steps[UNNAMED].step if UNNAMED in steps else 'starting'} …"
    )
    return PoolView(
        pool.name, about(pool), state, () if over else node_views(pool, rows, steps), ended=over
    )


def about(pool: SharedStatus, seconds: float = 0.0) -> tuple[str, ...]:
    """Where it is, how large, with what, at which price, and about what it has cost after so many seconds."""
    plan = pool.plan
    each = " per node" if plan.topology.nodes > 1 else ""
    spent = f", about ${plan.price * seconds / 3600:.2f} so far" if plan.price and seconds else ""
    hosts = ", ".join(plan.hosts) if len(plan.hosts) <= 4 else f"{plan.hosts[0]} … {plan.hosts[-1]}"
    words = (
        plan.provider,
        f"{plan.size} on {hosts}",
        f"{gpus.kinds(plan.devices[0])}{each}" if plan.devices and plan.devices[0] else "",
        ", ".join(spec.name for spec in plan.request.plugins),
        f"${plan.price:.2f} per hour{spent}" if plan.price else "",
        time_left(plan.ends),
    )
    return tuple(filter(None, words))


def time_left(ends: float | None) -> str:
    """Until the machines are taken back, in minutes; "" where nobody takes them."""
    if ends is None:
        return ""
    minutes = (ends - time.time()) // 60
    return f"{duration_text(minutes * 60)} left" if minutes >= 1 else "less than a minute left"


def node_views(
    pool: SharedStatus,
    rows: Rows,
    steps: Mapping[str, StartStep],
    use: Mapping[int, RankUse] = MappingProxyType({}),
) -> tuple[NodeView, ...]:
    """Nodes of a pool with their ranks; nodes of this machine are one, and before there are ranks the machines are shown alone."""
    known = [
        (int(str(rank)), node if pool.plan.remote else 0, str(host), str(word))
        for rank, node, host, _, word in rows
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
        found.append(
            NodeView(mine[0][2], ranks, "starting" if waiting else "", words, share, mine_use)
        )
    return tuple(found)


def _without_ranks(pool: SharedStatus, steps: Mapping[str, StartStep]) -> Iterator[NodeView]:
    """Machines that are being made ready: those of the plan, or, of rented ones, those that were given."""
    named = [name for name in steps if name != UNNAMED]
    for host in dict.fromkeys(named if pool.plan.region and named else [*pool.plan.hosts, *named]):
        step = steps.get(host) or steps.get(UNNAMED)
        yield (
            NodeView(host, (), step.phase, step.step, step.share)
            if step
            else NodeView(host, phase="starting")
        )
