"""Where pools of a user run, whoever started them: on hosts, found by what agents have written there, in jobs of a cluster, found by its
scheduler, or at EC2, found by their tags.

Both are listed as text and as plain values, and ended, from any machine that may log in there or has the credentials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from socket import gethostname
from time import time
from typing import TYPE_CHECKING, Any

from skymagic import providers
from skymagic.display import live
from skymagic.display.text import table
from skymagic.errors import PoolError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.plan.units import count, duration_text, rank_words
from skymagic.pool import keys, records
from skymagic.providers import Listable, ListedPool
from skymagic.providers import found as on_hosts
from skymagic.providers.found import Found, FoundNode, FoundPool

if TYPE_CHECKING:
    from skymagic.providers.aws.sweep import Tagged, TaggedPool


def place_mistakes(hosts: Sequence[str], provider: str | None, login: str | None) -> list[str]:
    """What contradicts itself in how a place is named."""
    checks = (
        (
            provider and hosts,
            "--hosts names your own machines, --provider rented ones: use one of them",
        ),
        (
            login and provider != "slurm",
            "--login is the way to a Slurm cluster: add --provider slurm",
        ),
    )
    return [mistake for wrong, mistake in checks if wrong]


@dataclass(frozen=True)
class StatusRequest:
    """Pools to show: one by name, or all of them; those on hosts where any are named, or what is on their disks, or those rented from a
    provider, or of a cluster, seen from its login node; and the variable that keeps what is shown."""

    name: str | None = None
    hosts: tuple[str, ...] = ()
    disk: bool = False
    output: str | None = None
    provider: str | None = None
    login: str | None = None
    cost: bool = False
    """Show what pools cost now and have cost within a month, as this machine has kept it."""

    def mistakes(self) -> list[str]:
        """What contradicts itself."""
        if self.cost and (self.hosts or self.provider or self.login or self.disk):
            return ["--cost is of all pools of this machine's notebooks: leave the place out"]
        return [
            *place_mistakes(self.hosts, self.provider, self.login),
            *(
                ["--disk says what is on hosts: leave --provider out"]
                if self.provider and self.disk
                else []
            ),
            *(["--disk is not of one pool: leave its name out"] if self.disk and self.name else []),
        ]


def look(
    request: StatusRequest, settings: CloudSettings
) -> HostListing | ClusterListing | TagListing:
    """What runs on the request's hosts (on this machine where none are named), in jobs of a cluster, or is rented.

    Raises:
        RequestError: a host's name is none.
        PoolError: no host could be asked; says why. CloudError: AWS cannot be asked.
    """
    if request.provider in providers.LISTING:
        pools = providers.listing(request.provider, request.login).pools()
        return ClusterListing(
            [one for one in pools if request.name in (None, one.name, one.job_id)]
        )
    if request.provider:
        from skymagic.providers.aws import sweep
        from skymagic.providers.aws.clients import AwsClients

        return TagListing(sweep.tagged_pools(AwsClients.of(settings), request.name))
    found = on_hosts.find(request.hosts)
    if not found.reached:
        raise PoolError("; ".join(f"{host}: {reason}" for host, reason in found.unreached.items()))
    # these hosts have told all that they run: other records of theirs are of pools that have ended
    records.forget(found.reached, [one.job_id for one in found.pools])
    name = request.name
    return HostListing(
        replace(
            found, pools=tuple(one for one in found.pools if name in (None, one.name, one.job_id))
        )
    )


# -- on hosts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostListing:
    """What was found on hosts."""

    found: Found

    @property
    def unreached(self) -> dict[str, str]:
        """Host → why it could not be asked."""
        return self.found.unreached

    def text(self, own: Collection[str] = ()) -> str:
        """For people; `own` are job ids of this process."""
        found = self.found
        blocks = [_pool_text(pool, pool.job_id in own, found.here) for pool in found.pools]
        blocks = blocks or [
            f"you have no pool {'here that outlives its notebook' if found.here else 'there'}"
        ]
        for host, number in found.unread.items():
            blocks.append(
                f"{host}: {count(number, 'agent')} of another version of skymagic, whose record cannot be read"
            )
        return "\n\n".join(
            [*blocks, *(f"{host}: {reason}" for host, reason in found.unreached.items())]
        )

    def plain(self) -> dict[str, Any]:
        """For programs; the fields stay as they are from version to version. Times are seconds since 1970."""
        return {
            "pools": [
                {
                    "name": pool.name,
                    "job_id": pool.job_id,
                    "client": pool.nodes[0].record.client,
                    "version": pool.nodes[0].record.version,
                    "started": pool.nodes[0].record.started,
                    "nodes_elsewhere": pool.elsewhere,
                    "nodes": [_plain_node(node) for node in pool.nodes],
                }
                for pool in self.found.pools
            ],
            "unreached": self.found.unreached,
            "unreadable": self.found.unread,
        }


def end_on_hosts(
    hosts: Sequence[str], name: str | None, every: bool, own: Collection[str] = ()
) -> list[str]:
    """End pools on hosts; on this machine where none are named.

    Args:
        name: a pool's name or job id; None for the only one.
        every: all of them.
        own: job ids of pools of this process, which end in another way.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        PoolError: something is left; names it.
    """
    found = on_hosts.find(hosts)
    pools = on_hosts.chosen(found, name, every)
    if mine := [one.name for one in pools if one.job_id in own]:
        raise RequestError(f"{', '.join(mine)}: of this notebook; %sky_down {mine[0]} ends it")
    command = "%sky_down" if live.in_ipython() else "skymagic down"
    who = f"`{command}` on {gethostname()}"
    left = {**found.unreached, **on_hosts.end(pools, who, here=found.here)}
    lines = [_ended(pool, left) for pool in pools]
    records.forget(
        set(found.reached) - set(left),
        {one.job_id for one in found.pools} - {one.job_id for one in pools},
    )
    if left:
        raise PoolError(
            "; ".join([*lines, *(f"{host}: {reason}" for host, reason in left.items())])
        )
    return lines


def _ended(pool: FoundPool, left: Collection[str]) -> str:
    hosts = [one.host for one in pool.nodes if one.host not in left]
    text = f"pool {pool.name!r} ({pool.job_id}) is down on {', '.join(hosts) or 'no host'}"
    if pool.elsewhere:
        text += f"; {count(pool.elsewhere, 'node')} of it {'is' if pool.elsewhere == 1 else 'are'} on hosts that were not named"
    return text


def _pool_text(pool: FoundPool, own: bool, here: bool) -> str:
    first = pool.nodes[0]
    whose = "of this notebook" if own else f"started by {first.record.client or 'somebody'}"
    age = roughly(first.clock - min(node.record.started for node in pool.nodes))
    rows = [("host", "node", "ranks", "GPUs", "state"), *map(_row, pool.nodes)]
    lines = [f"pool {pool.name!r} ({pool.job_id}), {whose} {age} ago", table(rows)]
    if pool.elsewhere:
        lines.append(f"{count(pool.elsewhere, 'node')} more on hosts that were not named")
    if not own:
        hosts = ",".join(dict.fromkeys(node.host for node in pool.nodes))
        lines.append(f"to end it: %sky_down {pool.name}" + ("" if here else f" --hosts {hosts}"))
    return "\n".join(lines)


def _row(node: FoundNode) -> tuple[object, ...]:
    record = node.record
    ranks = _numbers(sorted(map(int, record.ranks)), "rank")
    return node.host, record.node, ranks, _numbers(record.devices, "GPU"), state(node)


def _numbers(numbers: Sequence[int], noun: str) -> str:
    return rank_words(numbers, noun).partition(" ")[2] if numbers else "-"


def state(node: FoundNode) -> str:
    """What a node does, and when it ends by itself: "idle for 12m; its notebook is away for 1h; ends in 18m"."""
    record, now = node.record, node.clock
    busy = f"a cell runs for {roughly(now - record.busy_since)}" if record.busy_since else ""
    words = [busy or f"idle for {roughly(now - (record.idle_since or record.started))}"]
    if record.away_since:
        words.append(f"its notebook is away for {roughly(now - record.away_since)}")
    ends = _ends(node)
    if ends is not None:
        words.append(f"ends in {roughly(ends - now)}")
    return "; ".join(words)


def _ends(node: FoundNode) -> float | None:
    """When it ends by itself if nothing else happens, by the node's clock."""
    record = node.record
    limits = [record.started + record.max_lifetime] if record.max_lifetime is not None else []
    if not record.busy_since and record.idle_timeout is not None:
        limits.append(record.idle_since + record.idle_timeout)
    if not record.busy_since and record.away_since and record.detached_timeout is not None:
        limits.append(max(record.idle_since, record.away_since) + record.detached_timeout)
    return min(limits, default=None)


def roughly(seconds: float) -> str:
    """A duration to two units: 2h10m, 4m10s, 0s."""
    whole = max(0, round(seconds))
    for unit, fine in ((86400, 3600), (3600, 60)):
        if whole >= unit:
            return duration_text(whole // fine * fine)
    return duration_text(whole) if whole else "0s"


def _plain_node(node: FoundNode) -> dict[str, Any]:
    record = node.record
    return {
        "host": node.host,
        "node": record.node,
        "ranks": record.ranks,
        "devices": list(record.devices),
        "busy_since": record.busy_since or None,
        "idle_since": record.idle_since or None,
        "away_since": record.away_since or None,
        "ends": _ends(node),
        "clock": node.clock,
    }


# -- in jobs of a cluster --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterListing:
    """What a cluster's scheduler knows of."""

    pools: Sequence[ListedPool]
    unreached: Mapping[str, str] = field(default_factory=dict)

    def text(self, own: Collection[str] = ()) -> str:
        """For people; `own` are job ids of this process."""
        rows = [
            (
                one.name,
                one.job_id,
                one.where,
                one.state,
                roughly(one.ends - time()) if one.ends else "-",
            )
            for one in self.pools
        ]
        heading = ("pool", "job id", "runs in", "state", "time left")
        ends = (
            "to end one: %sky_down JOB-ID --provider NAME"
            if {one.job_id for one in self.pools} - set(own)
            else ""
        )
        return (
            "\n".join(filter(None, (table([heading, *rows]), ends)))
            if rows
            else "none of your pools runs there"
        )

    def plain(self) -> dict[str, Any]:
        """For programs; the fields stay as they are from version to version. Times are seconds since 1970."""
        return {"pools": [vars(one) for one in self.pools], "unreached": {}}


def end_in_cluster(
    provider: str, name: str | None, own: Collection[str] = (), login: str | None = None
) -> list[str]:
    """End one pool that a cluster's scheduler knows of.

    Args:
        name: its name or job id; None for the only one. own: job ids of pools of this process, which end in another way.
        login: the cluster's login node, where this is not one.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        ProvisionError: nobody answers, or it goes on.
    """
    cluster = providers.listing(provider, login)
    pool = _only(cluster, name, provider)
    if pool.job_id in own:
        raise RequestError(f"{pool.name}: of this notebook; %sky_down {pool.name} ends it")
    cluster.end(pool.job_id)
    records.remove(pool.job_id)
    return [f"pool {pool.name!r} ({pool.job_id}) is ended: {pool.where}"]


def _only(cluster: Listable, name: str | None, provider: str) -> ListedPool:
    pools = cluster.pools()
    found = [one for one in pools if name in (None, one.name, one.job_id)]
    if len(found) != 1:
        listed = ", ".join(f"{one.job_id} ({one.where})" for one in found or pools) or "none"
        raise RequestError(
            f"{len(found)} of your pools match: say which one; --provider {provider} has {listed}"
        )
    return found[0]


@contextmanager
def brought(name: str | None, login: str | None) -> Iterator[str]:
    """The name of a pool to attach to, with its record and its key on this machine. Where they are not here, they are copied from the
    login node's home, and deleted there once the pool is attached to.

    Raises:
        RequestError: it is not clear which pool is meant. ProvisionError: nobody answers, or nothing of it is there.
        PoolError: another version of skymagic has made it.
    """
    from skymagic.providers.slurm import Slurm

    if login is None:
        yield name or ""
        return
    cluster = Slurm(login)
    job_id = _only(cluster, name, "slurm").job_id
    if any(one.job_id == job_id for one in records.every()):
        yield job_id
        return
    try:
        record, text, state = cluster.carried(job_id)
        records.bring(record, text, state)
        key = keys.read(job_id)
        request = replace(key.plan.request, login=login)
        keys.write(replace(key, plan=replace(key.plan, request=request)))
        yield job_id
    except BaseException:
        records.remove(job_id)
        raise
    cluster.carried(job_id, drop=True)


# -- at EC2, by tags -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TagListing:
    """What is rented."""

    found: Tagged

    @property
    def unreached(self) -> dict[str, str]:
        """Region → why it could not be asked."""
        return self.found.unreached

    def text(self, own: Collection[str] = ()) -> str:
        """For people; `own` are job ids of this process."""
        found = self.found
        blocks = [_rented_text(one, one.job_id in own) for one in found.pools] or [
            "you have no pool on EC2"
        ]
        return "\n\n".join(
            [*blocks, *(f"{region}: {reason}" for region, reason in found.unreached.items())]
        )

    def plain(self) -> dict[str, Any]:
        """For programs; the fields stay as they are from version to version. Times are seconds since 1970."""
        pools = [
            {**vars(pool), "machines": [vars(one) for one in pool.machines]}
            for pool in self.found.pools
        ]
        return {"pools": pools, "unreached": self.found.unreached}


def end_rented(
    name: str | None, say: Callable[[str], None], settings: CloudSettings, own: Collection[str] = ()
) -> list[str]:
    """End one rented pool, with all that was made for it.

    Args:
        name: its name or job id; None for the only one.
        own: job ids of pools of this process, which end in another way.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        CloudError: nobody can be asked, or not where it may be.
        PoolError: something is left; names it.
    """
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    clients = AwsClients.of(settings)
    pool = sweep.chosen_pool(sweep.tagged_pools(clients), name)
    if pool.job_id in own:
        raise RequestError(f"{pool.name}: of this notebook; %sky_down {pool.name} ends it")
    say(f"ending {_heading(pool)} …")
    if problems := sweep.release_job(clients, pool.job_id, catalogue.used_regions(clients)):
        listed = "\n  ".join(problems)
        raise PoolError(
            f"not everything in pool {pool.name!r} ({pool.job_id}) could be stopped:\n  {listed}"
        )
    records.remove(pool.job_id)
    return [f"pool {pool.name!r} ({pool.job_id}) is down"]


def _rented_text(pool: TaggedPool, own: bool) -> str:
    now = time()
    rows = [("machine", "type", "GPUs", "zone", "state", "for")]
    rows += [
        (one.id, one.type, one.gpus, one.zone, one.state, roughly(now - one.launched))
        for one in pool.machines
    ]
    ends = f"ends itself at {pool.ends} at the latest"
    which = pool.name if own else f"{pool.job_id} --provider aws"
    return "\n".join([_heading(pool), table(rows), ends, f"to end it: %sky_down {which}"])


def _heading(pool: TaggedPool) -> str:
    return f"pool {pool.name!r} ({pool.job_id}) in {pool.region}, rented by {pool.client}"
