"""Texts and pictures of a pool; pure.

The pool panel, a status row for each rank, and sentences on ranks that are added, released, lost or
restarted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from skymagic.cluster import Agents
from skymagic.data.capture.names import cell_names
from skymagic.data.namespace import Namespace
from skymagic.display.panel import UNNAMED, NodeView, PoolView, RankUse, StartStep
from skymagic.plan import gpus
from skymagic.plan.plans import Topology
from skymagic.plan.units import duration_text, rank_words, verb_form
from skymagic.pool.status import SharedStatus, State
from skymagic.run.state import Report
from skymagic.wire import agent as wire

if TYPE_CHECKING:
    from skymagic.data.shipping.bindings import Bindings, Manifest
    from skymagic.run.state import RunSpec


WAS_ENDED = (
    "was ended while this run was under way, and its variables are gone: recreate it with %sky_pool"
)
WAS_RECREATED = (
    "was recreated while this run was under way, and its variables are gone: run it again"
)


def stopped_runs(runs: Sequence[RunSpec]) -> str:
    """Describe the runs that ended with their pool: "cell 3 on ranks 0, 1 was stopped".

    Runs of the same cell are named together. Without runs, the text is empty.
    """
    ranks: dict[str, set[int]] = {}
    for run in runs:
        job, number = run.order.job, run.order.execution_count
        kind = "cell" if job == "cell" else f"the {job} of cell"
        ranks.setdefault(f"{kind} {number}", set()).update(run.ranks)
    phrases = [f"{name} on {rank_words(sorted(cell_ranks))}" for name, cell_ranks in ranks.items()]
    return (
        f"{' and '.join(phrases)} {verb_form(len(phrases), 'was', 'were')} stopped"
        if phrases
        else ""
    )


def rows(topology: Topology, agents: Agents, state: State) -> list[tuple[object, ...]]:
    """Return a row for each rank: rank, node, host, process ID, state."""
    # "degraded" is said of the pool: the ranks that it still has are ready
    pool_word = "ready" if state is State.DEGRADED else state.value
    table: list[tuple[object, ...]] = []
    for number, rank in sorted(agents.ranks.items()):
        word = "ended" if rank.exited else pool_word if rank.ready else "starting"
        index = agents.specs[number][0]
        # the node's state outweighs the rank's, of which nothing new is known then
        word = "reclaimed" if index in agents.ending else word
        word = "gone" if index in agents.gone else "reconnecting" if index in agents.away else word
        table.append((number, topology.node_of(number), rank.hostname, rank.pid, word))
    return table


def interruption(message: wire.InterruptionNotice, name: str, now: float) -> str:
    """Describe what will happen to a machine."""
    if message.at is None:
        return f"node {message.node} ({name}): {message.reason}"
    when = (
        f"in {max(0.0, message.at - now):.0f} s, at "
        f"{time.strftime('%H:%M:%S', time.localtime(message.at))}"
    )
    lost = f"{rank_words(message.ranks)} {verb_form(len(message.ranks), 'is', 'are')} lost"
    return (
        f"node {message.node} ({name}): {message.reason} {when}; {lost} then"
        if message.ranks
        else f"node {message.node} ({name}): {message.reason} {when}"
    )


def hook_ended(message: wire.HookEnded) -> str:
    """Describe how a call of an ``on_interruption`` hook ended."""
    result = f"has failed ({message.error})" if message.error else "has run"
    return f"rank {message.rank}: its on_interruption hook {result}, in {message.seconds:.1f} s"


def variables_then(before: int, after: int, inseparable: Sequence[str], moved: bool = False) -> str:
    """Describe what happens to the variables when a pool of `before` ranks gets `after` ranks.

    Args:
        inseparable: plugins whose ranks cannot continue when the world size changes.
        moved: True if ranks get other GPUs.
    """
    if moved and not inseparable:
        return "all ranks were restarted, without variables: they have other GPUs now"
    if inseparable:
        names = ", ".join(inseparable)
        return (
            f"all ranks were restarted, without variables: {names} cannot continue with a "
            "different number of ranks"
        )
    remaining = range(min(before, after))
    rest_text = (
        f"{rank_words(range(before, after))} {verb_form(after - before, 'has', 'have')} none"
    )
    if after < before:
        rest_text = f"those of {rank_words(range(after, before))} are gone"
    keep = verb_form(len(remaining), "keeps its", "keep their")
    return f"{rank_words(remaining)} {keep} variables, {rest_text}"


def replaced_words(problems: Mapping[int, str], ranks: Collection[int], world_size: int) -> str:
    """Describe what happened to ranks when a process group could not be formed again.

    Args:
        problems: the errors of the ranks at fault, if known.
        ranks: the ranks that are restarted.
    """
    reasons = (
        "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items()))
        or "it took too long"
    )
    all_of_them = len(ranks) == world_size
    subject = (
        "all ranks were"
        if all_of_them
        else f"{rank_words(sorted(ranks))} {verb_form(len(ranks), 'was', 'were')}"
    )
    possessive = "their" if all_of_them or len(ranks) > 1 else "its"
    return (
        f"the process group could not be formed again ({reasons}): {subject} restarted and lost "
        f"{possessive} variables"
    )


def suggest_after_loss(name: str) -> str:
    """Suggest what to do when all ranks of a pool are unreachable."""
    return (
        f"pool {name!r} is lost: %sky_restart restarts all ranks without variables; %sky_down "
        f"{name} ends it"
    )


def suggest_without_ranks(lost: Sequence[int], world_size: int, *, replaced: bool = False) -> str:
    """Suggest what to do when the machines of these ranks are gone, in one line for a note.

    Args:
        replaced: True if replacements are requested.
    """
    return "; ".join(suggestions_without_ranks(lost, world_size, replaced=replaced))


def suggestions_without_ranks(
    lost: Sequence[int], world_size: int, *, replaced: bool = False
) -> list[str]:
    """Suggest what to do when the machines of these ranks are gone, one sentence per error line."""
    remaining = [rank for rank in range(world_size) if rank not in lost]
    targets = ",".join(map(str, remaining))
    kept_text = (
        f"{rank_words(remaining)} {verb_form(len(remaining), 'keeps its', 'keep their')} variables "
        f"(-t {targets} runs cells there, %sky_pull NAMES -t {targets} brings variables back)"
    )
    remedy = "%sky_restart tries to reach them again, %sky_down ends the pool"
    if replaced:
        remedy = "a replacement is requested, and cells for its ranks wait for it"
    return [kept_text, remedy] if remaining else [remedy]


def missing_names(report: Report, bindings: Bindings, source: str) -> list[str]:
    """Suggest how to copy names that ranks missed in a run and another rank has, a line per name.

    Args:
        source: the cell as plain Python; other names that it uses and the ranks lack are copied by
            the same command.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for number, rank in sorted(report.ranks.items()):
        name = rank.failure.missing if rank.failure is not None else ""
        if name and name not in bindings.names(number):
            ranks_by_name.setdefault(name, []).append(number)
    return [
        line
        for name, ranks in ranks_by_name.items()
        if (line := _missing_name(name, ranks, bindings, source))
    ]


def _missing_name(name: str, ranks: list[int], bindings: Bindings, source: str) -> str:
    origin = next(
        (rank for rank in bindings.recorded_ranks() if name in bindings.names(rank)), None
    )
    if origin is None:
        return ""
    common = frozenset.intersection(*map(bindings.names, ranks))
    used = sorted(cell_names(source).loads - {name}, key=source.find)
    names = [
        name,
        *(other for other in used if other not in common and bindings.has_rebound(origin, other)),
    ]
    lack = f"{'has' if len(ranks) == 1 else 'have'} no {name}"
    if bindings.replaced.issuperset(ranks):
        predicate = f"{'was' if len(ranks) == 1 else 'were'} replaced and {lack}"
    else:
        predicate = f"{lack}, which rank {origin} has"
    return f"{rank_words(ranks)} {predicate}: {clone_command(ranks, origin, names)}"


def replaced_value_warnings(
    manifest: Manifest, bindings: Bindings, ranks: Sequence[int], namespace: Namespace
) -> list[str]:
    """Warn if replaced ranks get the notebook's value of a name that other ranks have rebound.

    Modules are not named: an imported module is the same on all ranks.

    Args:
        namespace: the notebook's variables.
    """
    replaced = [rank for rank in ranks if rank in bindings.replaced]
    targets: dict[str, list[int]] = {}
    origin = -1
    for bundle in manifest.orders.bundles if replaced else ():
        for name in bundle.names:
            if isinstance(namespace.get(name), ModuleType):
                continue
            owner = next(
                (rank for rank in bindings.recorded_ranks() if bindings.has_rebound(rank, name)),
                None,
            )
            receivers = [
                rank for rank in replaced if bundle.ranks is not None and rank in bundle.ranks
            ]
            if owner is not None and owner not in (bundle.ranks or ranks) and receivers:
                targets[name], origin = receivers, owner
    if not targets:
        return []
    ranks_to = sorted(set().union(*targets.values()))
    verb = "gets" if len(ranks_to) == 1 else "get"
    return [
        f"{rank_words(ranks_to)} {'was' if len(ranks_to) == 1 else 'were'} replaced and {verb} the "
        f"notebook's {', '.join(targets)}, where "
        f"rank {origin} has its own: {clone_command(ranks_to, origin, targets)}"
    ]


def clone_command(ranks: Iterable[int], source: int, names: Iterable[str]) -> str:
    """Return the command that copies a rank's variables to other ranks."""
    return f"%sky_clone {','.join(map(str, ranks))} --from {source} {' '.join(names)}"


Rows = Sequence[tuple[object, ...]]
"""For each rank: rank, node, host, process ID, state; see `messages.rows`."""


def pool_view(
    pool: SharedStatus,
    rows: Rows,
    use: Mapping[int, RankUse] = MappingProxyType({}),
    seconds: float = 0.0,
) -> PoolView:
    """Build the view of a running pool.

    Args:
        use: resource usage by rank, if it was measured.
        seconds: seconds since the pool got its machines.
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
    """Build the view of a pool that is starting; a single line once that is over."""
    is_over = pool.state not in (State.NEW, State.STARTING)
    is_ready = pool.state in (State.READY, State.RUNNING)
    state = (
        f"ready in {seconds:.1f} s"
        if is_ready
        else "not started"
        if is_over
        else f"{steps[UNNAMED].step if UNNAMED in steps else 'starting'} …"
    )
    return PoolView(
        pool.name,
        about(pool),
        state,
        () if is_over else node_views(pool, rows, steps),
        ended=is_over,
    )


def about(pool: SharedStatus, seconds: float = 0.0) -> tuple[str, ...]:
    """Describe a pool: provider, size, devices, plugins, price, and approximate cost so far."""
    plan = pool.plan
    per_node = " per node" if plan.topology.nodes > 1 else ""
    spent = f", about ${plan.price * seconds / 3600:.2f} so far" if plan.price and seconds else ""
    hosts = ", ".join(plan.hosts) if len(plan.hosts) <= 4 else f"{plan.hosts[0]} … {plan.hosts[-1]}"
    parts = (
        plan.provider,
        f"{plan.size} on {hosts}",
        f"{gpus.kinds(plan.devices[0])}{per_node}" if plan.devices and plan.devices[0] else "",
        f"in {plan.request.container}" if plan.request.container else "",
        ", ".join(spec.name for spec in plan.request.plugins),
        f"${plan.price:.2f} per hour{spent}" if plan.price else "",
        time_left(plan.ends),
    )
    return tuple(filter(None, parts))


def time_left(ends: float | None) -> str:
    """Return the time until the machines are taken back: "1h30m left"; "" if they never are."""
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
    """Build the views of a pool's nodes with their ranks.

    All nodes on this machine share one view. Before there are ranks, only the machines are shown.
    """
    entries = [
        (int(str(rank)), node if pool.plan.remote else 0, str(host), str(word))
        for rank, node, host, _, word in rows
    ]
    if not entries:
        return tuple(_without_ranks(pool, steps))
    views = []
    for _, group in groupby(entries, key=lambda row: row[1]):
        members = list(group)
        ranks = tuple((rank, word) for rank, _, _, word in members)
        running = sum(word != "starting" for _, word in ranks)
        waiting = pool.state is State.STARTING and running < len(ranks)
        step, share = (
            (f"{running} of {len(ranks)} ranks", running / len(ranks)) if waiting else ("", None)
        )
        group_use = {rank: use[rank] for rank, _ in ranks if rank in use}
        views.append(
            NodeView(members[0][2], ranks, "starting" if waiting else "", step, share, group_use)
        )
    return tuple(views)


def _without_ranks(pool: SharedStatus, steps: Mapping[str, StartStep]) -> Iterator[NodeView]:
    """Iterate over machines in preparation: the plan's machines, or the rented ones so far."""
    hosts = [name for name in steps if name != UNNAMED]
    for host in dict.fromkeys(hosts if pool.plan.region and hosts else [*pool.plan.hosts, *hosts]):
        step = steps.get(host) or steps.get(UNNAMED)
        yield (
            NodeView(host, (), step.phase, step.step, step.share)
            if step
            else NodeView(host, phase="starting")
        )
