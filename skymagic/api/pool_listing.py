"""List a user's pools by location, no matter who started them.

Pools on hosts are found by the files of their agents, pools in cluster jobs by the scheduler, and
pools at EC2 by their tags, from any machine that has SSH access or the credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import time

from skymagic import providers
from skymagic.display.text import table
from skymagic.plan.requests import CloudSettings
from skymagic.plan.units import count, rough_duration
from skymagic.pool import keys, records
from skymagic.providers import PoolLocation, RemotePool, RemotePools


def location_mistakes(hosts: Sequence[str], provider: str | None, login: str | None) -> list[str]:
    """Return a message for each contradiction in the options that name a location."""
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
            *location_mistakes(self.hosts, self.provider, self.login),
            *(
                ["--disk says what is on hosts: leave --provider out"]
                if self.provider and self.disk
                else []
            ),
            *(["--disk is not of one pool: leave its name out"] if self.disk and self.name else []),
        ]


@dataclass(frozen=True)
class PoolListing:
    """Pools found in a location, as text and as plain values."""

    location: PoolLocation
    result: RemotePools

    def text(self, own: Collection[str] = ()) -> str:
        """Return the listing as text; `own` are job ids of this process."""
        result, is_here = self.result, self.location.is_here
        blocks = [self._pool_text(pool, pool.job_id in own) for pool in result.pools]
        blocks = blocks or [
            f"you have no pool {'here that outlives its notebook' if is_here else 'there'}"
        ]
        for host, number in result.unread.items():
            blocks.append(
                f"{host}: {count(number, 'agent')} of another version of skymagic, whose "
                "record cannot be read"
            )
        blocks += [f"{source}: {reason}" for source, reason in result.unreached.items()]
        return "\n\n".join(blocks)

    def _pool_text(self, pool: RemotePool, own: bool) -> str:
        age = f" {rough_duration(time() - pool.started)} ago" if pool.started else ""
        origin = "of this notebook" if own else f"by {pool.client}" if pool.client else ""
        facts = [
            pool.where,
            pool.state,
            f"started {origin}{age}" if age and not own else origin,
            f"ends in {rough_duration(pool.ends - time())} at the latest" if pool.ends else "",
        ]
        lines = [f"pool {pool.name!r} ({pool.job_id}): {'; '.join(filter(None, facts))}"]
        if pool.nodes:
            lines.append(table([pool.nodes[0].columns, *(node.row() for node in pool.nodes)]))
        if pool.nodes_elsewhere:
            lines.append(f"{count(pool.nodes_elsewhere, 'node')} more on hosts that were not named")
        if not own:
            named_so = sum(other.name == pool.name for other in self.result.pools)
            target = pool.job_id if self.location.provider or named_so > 1 else pool.name
            lines.append(f"to end it: %sky_down {target}{self.location.options}")
        return "\n".join(lines)

    def plain(self) -> dict[str, object]:
        """Return the listing as plain values for programs; the fields are stable across versions.

        Times are seconds since 1970.
        """
        return {
            "pools": [pool.plain() for pool in self.result.pools],
            "unreached": self.result.unreached,
            "unreadable": self.result.unread,
        }


def listing(request: StatusRequest, settings: CloudSettings) -> PoolListing:
    """List the pools on the request's hosts (default: this machine), in a cluster, or at EC2.

    Raises:
        RequestError: a host name is invalid.
        PoolError, ProvisionError, CloudError: no host or provider answers; the message gives the
            reasons.
    """
    location = PoolLocation(request.hosts, request.provider, request.login, settings)
    result = providers.find_pools(location)
    # these hosts have reported all their pools: their other records are of pools that have ended
    records.forget(result.reached, [pool.job_id for pool in result.pools])
    return PoolListing(location, result.named(request.name))


@contextmanager
def imported_record(name: str | None, login: str | None) -> Iterator[str]:
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
    location = PoolLocation(provider="slurm", login=login)
    (pool,) = providers.find_pools(location).select(name)
    job_id = pool.job_id
    if records.of_job(job_id) is not None:
        yield job_id
        return
    cluster = Slurm(login)
    try:
        record = records.bring(*cluster.fetch_record(job_id))
        key = keys.read(job_id)
        plan = replace(key.plan, request=replace(key.plan.request, login=login))
        records.write(replace(record, key=replace(key, plan=plan).saved()))
        yield job_id
    except BaseException:
        records.remove(job_id)
        raise
    cluster.fetch_record(job_id, drop=True)
