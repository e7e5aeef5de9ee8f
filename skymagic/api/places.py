"""List and end a user's pools by place, no matter who started them.

Pools on hosts are found by the files of their agents, pools in cluster jobs by the scheduler, and
pools at EC2 by their tags. They can be listed, as text and as plain values, and ended from any
machine that has SSH access or the credentials.
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
    """Return a message for each contradiction in the options that name a place."""
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
    """Pools to show: one by name, or all of them.

    They are those on the given hosts, allocated by a provider, or in a cluster seen from its login
    node; or the disks of the hosts are shown. `output` names the variable that receives the result.
    """

    name: str | None = None
    hosts: tuple[str, ...] = ()
    disk: bool = False
    output: str | None = None
    provider: str | None = None
    login: str | None = None
    cost: bool = False
    """Show current costs and those of the last month, as recorded on this machine."""

    def mistakes(self) -> list[str]:
        """Return a message for each contradiction in the request."""
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
    """List the pools on the request's hosts (default: this machine), in a cluster, or rented.

    Raises:
        RequestError: a host name is invalid.
        PoolError: no host could be reached; the message gives the reasons.
        CloudError: AWS cannot be reached.
    """
    if request.provider in providers.LISTING:
        pools = providers.listing(request.provider, request.login).pools()
        return ClusterListing(
            [pool for pool in pools if request.name in (None, pool.name, pool.job_id)]
        )
    if request.provider:
        from skymagic.providers.aws import sweep
        from skymagic.providers.aws.clients import AwsClients

        return TagListing(sweep.tagged_pools(AwsClients.of(settings), request.name))
    inventory = on_hosts.find(request.hosts)
    if not inventory.reached:
        raise PoolError(
            "; ".join(f"{host}: {reason}" for host, reason in inventory.unreached.items()),
            code="unreached",
            names=inventory.unreached,
        )
    # these hosts have reported all their pools: their other records are of pools that have ended
    records.forget(inventory.reached, [pool.job_id for pool in inventory.pools])
    name = request.name
    return HostListing(
        replace(
            inventory,
            pools=tuple(pool for pool in inventory.pools if name in (None, pool.name, pool.job_id)),
        )
    )


# -- on hosts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostListing:
    """Pools found on hosts."""

    found: Found

    @property
    def unreached(self) -> dict[str, str]:
        """Host → reason why it could not be reached."""
        return self.found.unreached

    def text(self, own: Collection[str] = ()) -> str:
        """Return the listing as text; `own` are job ids of this process."""
        inventory = self.found
        blocks = [_pool_text(pool, pool.job_id in own, inventory.here) for pool in inventory.pools]
        blocks = blocks or [
            f"you have no pool {'here that outlives its notebook' if inventory.here else 'there'}"
        ]
        for host, number in inventory.unread.items():
            blocks.append(
                f"{host}: {count(number, 'agent')} of another version of skymagic, whose "
                "record cannot be read"
            )
        return "\n\n".join(
            [*blocks, *(f"{host}: {reason}" for host, reason in inventory.unreached.items())]
        )

    def plain(self) -> dict[str, Any]:
        """Return the listing as plain values for programs; the fields are stable across versions.

        Times are seconds since 1970.
        """
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
    """End pools on hosts, or on this machine if no hosts are given.

    Args:
        name: name or job id of a pool; None for the only one.
        every: end all of them.
        own: job ids of this process's pools, which end in another way.

    Returns:
        A line for each action.

    Raises:
        RequestError: the request is ambiguous, or selects a pool of this process.
        PoolError: not everything could be ended; the message lists the rest.
    """
    inventory = on_hosts.find(hosts)
    pools = on_hosts.chosen(inventory, name, every)
    if own_names := [pool.name for pool in pools if pool.job_id in own]:
        raise RequestError(
            f"{', '.join(own_names)}: of this notebook; %sky_down {own_names[0]} ends it",
            code="pool-of-notebook",
            names=own_names,
        )
    command = "%sky_down" if live.in_ipython() else "skymagic down"
    ended_by = f"`{command}` on {gethostname()}"
    unreached = {**inventory.unreached, **on_hosts.end(pools, ended_by, here=inventory.here)}
    lines = [_ended(pool, unreached) for pool in pools]
    records.forget(
        set(inventory.reached) - set(unreached),
        {pool.job_id for pool in inventory.pools} - {pool.job_id for pool in pools},
    )
    if unreached:
        raise PoolError(
            "; ".join([*lines, *(f"{host}: {reason}" for host, reason in unreached.items())]),
            code="unreached",
            names=unreached,
        )
    return lines


def _ended(pool: FoundPool, left: Collection[str]) -> str:
    hosts = [node.host for node in pool.nodes if node.host not in left]
    text = f"pool {pool.name!r} ({pool.job_id}) is down on {', '.join(hosts) or 'no host'}"
    if pool.elsewhere:
        text += (
            f"; {count(pool.elsewhere, 'node')} of it "
            f"{'is' if pool.elsewhere == 1 else 'are'} on hosts that were not named"
        )
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
    """Return a node's activity and when it ends by itself.

    Example: "idle for 12m; its notebook is away for 1h; ends in 18m".
    """
    record, now = node.record, node.clock
    busy = f"a cell runs for {roughly(now - record.busy_since)}" if record.busy_since else ""
    parts = [busy or f"idle for {roughly(now - (record.idle_since or record.started))}"]
    if record.away_since:
        parts.append(f"its notebook is away for {roughly(now - record.away_since)}")
    ends = _ends(node)
    if ends is not None:
        parts.append(f"ends in {roughly(ends - now)}")
    return "; ".join(parts)


def _ends(node: FoundNode) -> float | None:
    """Return the time, on the node's clock, when it ends if nothing else happens, or None."""
    record = node.record
    limits = [record.started + record.max_lifetime] if record.max_lifetime is not None else []
    if not record.busy_since and record.idle_timeout is not None:
        limits.append(record.idle_since + record.idle_timeout)
    if not record.busy_since and record.away_since and record.detached_timeout is not None:
        limits.append(max(record.idle_since, record.away_since) + record.detached_timeout)
    return min(limits, default=None)


def roughly(seconds: float) -> str:
    """Return a duration in at most two units: 2h10m, 4m10s, 0s."""
    total = max(0, round(seconds))
    for unit, fine in ((86400, 3600), (3600, 60)):
        if total >= unit:
            return duration_text(total // fine * fine)
    return duration_text(total) if total else "0s"


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


# -- in jobs of a cluster --------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterListing:
    """Pools that a cluster's scheduler lists."""

    pools: Sequence[ListedPool]
    unreached: Mapping[str, str] = field(default_factory=dict)

    def text(self, own: Collection[str] = ()) -> str:
        """Return the listing as text; `own` are job ids of this process."""
        rows = [
            (
                pool.name,
                pool.job_id,
                pool.where,
                pool.state,
                roughly(pool.ends - time()) if pool.ends else "-",
            )
            for pool in self.pools
        ]
        heading = ("pool", "job id", "runs in", "state", "time left")
        hint = (
            "to end one: %sky_down JOB-ID --provider NAME"
            if {pool.job_id for pool in self.pools} - set(own)
            else ""
        )
        return (
            "\n".join(filter(None, (table([heading, *rows]), hint)))
            if rows
            else "none of your pools runs there"
        )

    def plain(self) -> dict[str, Any]:
        """Return the listing as plain values for programs; the fields are stable across versions.

        Times are seconds since 1970.
        """
        return {"pools": [vars(pool) for pool in self.pools], "unreached": {}}


def end_in_cluster(
    provider: str, name: str | None, own: Collection[str] = (), login: str | None = None
) -> list[str]:
    """End one pool that a cluster's scheduler lists.

    Args:
        name: its name or job id; None for the only one.
        own: job ids of this process's pools, which end in another way.
        login: the cluster's login node, if this machine is not one.

    Returns:
        A line for each action.

    Raises:
        RequestError: the request is ambiguous, or selects a pool of this process.
        ProvisionError: the scheduler does not answer, or the job keeps running.
    """
    cluster = providers.listing(provider, login)
    pool = _only(cluster, name, provider)
    if pool.job_id in own:
        raise RequestError(
            f"{pool.name}: of this notebook; %sky_down {pool.name} ends it",
            code="pool-of-notebook",
            names=[pool.name],
        )
    cluster.end(pool.job_id)
    records.remove(pool.job_id)
    return [f"pool {pool.name!r} ({pool.job_id}) is ended: {pool.where}"]


def _only(cluster: Listable, name: str | None, provider: str) -> ListedPool:
    pools = cluster.pools()
    matching = [pool for pool in pools if name in (None, pool.name, pool.job_id)]
    if len(matching) != 1:
        listed = ", ".join(f"{pool.job_id} ({pool.where})" for pool in matching or pools) or "none"
        raise RequestError(
            f"{len(matching)} of your pools match: say which one; --provider {provider} has "
            f"{listed}",
            code="pool-ambiguous",
        )
    return matching[0]


@contextmanager
def brought(name: str | None, login: str | None) -> Iterator[str]:
    """Yield the name of a pool to attach to, with its record available on this machine.

    A missing record is copied from the login node's home, and deleted there once the pool is
    attached.

    Raises:
        RequestError: the request is ambiguous.
        ProvisionError: the login node does not answer, or has no record of the pool.
        PoolError: the pool was made by another version of skymagic.
    """
    from skymagic.providers.slurm import Slurm

    if login is None:
        yield name or ""
        return
    cluster = Slurm(login)
    job_id = _only(cluster, name, "slurm").job_id
    if any(record.job_id == job_id for record in records.every()):
        yield job_id
        return
    try:
        record = records.bring(*cluster.carried(job_id))
        key = keys.read(job_id)
        plan = replace(key.plan, request=replace(key.plan.request, login=login))
        records.write(replace(record, key=replace(key, plan=plan).saved()))
        yield job_id
    except BaseException:
        records.remove(job_id)
        raise
    cluster.carried(job_id, drop=True)


# -- at EC2, by tags -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TagListing:
    """Rented pools."""

    found: Tagged

    @property
    def unreached(self) -> dict[str, str]:
        """Region → reason why it could not be reached."""
        return self.found.unreached

    def text(self, own: Collection[str] = ()) -> str:
        """Return the listing as text; `own` are job ids of this process."""
        tagged = self.found
        blocks = [_rented_text(pool, pool.job_id in own) for pool in tagged.pools] or [
            "you have no pool on EC2"
        ]
        return "\n\n".join(
            [*blocks, *(f"{region}: {reason}" for region, reason in tagged.unreached.items())]
        )

    def plain(self) -> dict[str, Any]:
        """Return the listing as plain values for programs; the fields are stable across versions.

        Times are seconds since 1970.
        """
        pools = [
            {**vars(pool), "machines": [vars(machine) for machine in pool.machines]}
            for pool in self.found.pools
        ]
        return {"pools": pools, "unreached": self.found.unreached}


def end_rented(
    name: str | None, say: Callable[[str], None], settings: CloudSettings, own: Collection[str] = ()
) -> list[str]:
    """End one rented pool with all resources created for it.

    Args:
        name: its name or job id; None for the only one.
        own: job ids of this process's pools, which end in another way.

    Returns:
        A line for each action.

    Raises:
        RequestError: the request is ambiguous, or selects a pool of this process.
        CloudError: AWS, or a region that may hold the pool, cannot be reached.
        PoolError: not everything could be ended; the message lists the rest.
    """
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    clients = AwsClients.of(settings)
    pool = sweep.chosen_pool(sweep.tagged_pools(clients), name)
    if pool.job_id in own:
        raise RequestError(
            f"{pool.name}: of this notebook; %sky_down {pool.name} ends it",
            code="pool-of-notebook",
            names=[pool.name],
        )
    say(f"ending {_heading(pool)} …")
    if problems := sweep.release_job(clients, pool.job_id, catalogue.used_regions(clients)):
        listed = "\n  ".join(problems)
        raise PoolError(
            f"not everything in pool {pool.name!r} ({pool.job_id}) could be stopped:\n  {listed}",
            code="not-released",
            names=[pool.name],
        )
    records.remove(pool.job_id)
    return [f"pool {pool.name!r} ({pool.job_id}) is down"]


def _rented_text(pool: TaggedPool, own: bool) -> str:
    now = time()
    rows = [("machine", "type", "GPUs", "zone", "state", "for")]
    rows += [
        (
            machine.id,
            machine.type,
            machine.gpus,
            machine.zone,
            machine.state,
            roughly(now - machine.launched),
        )
        for machine in pool.machines
    ]
    ends = f"ends itself at {pool.ends} at the latest"
    target = pool.name if own else f"{pool.job_id} --provider aws"
    return "\n".join([_heading(pool), table(rows), ends, f"to end it: %sky_down {target}"])


def _heading(pool: TaggedPool) -> str:
    return f"pool {pool.name!r} ({pool.job_id}) in {pool.region}, rented by {pool.client}"
