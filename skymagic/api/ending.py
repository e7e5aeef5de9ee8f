"""End pools that are not, or not only, this process's.

Pools are selected by place, among those left by notebooks that are gone, or everything rented is
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from skymagic import providers
from skymagic.api import places
from skymagic.errors import CloudError, PoolError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.pool import keys, records
from skymagic.pool.records import PoolRecord
from skymagic.providers import found as on_hosts
from skymagic.providers.aws.clients import configured

Say = Callable[[str], None]
"""Callback that receives a line of progress."""


@dataclass(frozen=True)
class DownRequest:
    """Pools to end: one by name, the current one (None), or all of them.

    With hosts, the pools on these hosts; with a provider, those allocated by it.

    Attributes:
        clean: end no pool, but remove files from the hosts that no pool has used for 30 days, or
            with `all` those not in use now.
        dry_run: only report what `clean` would remove.
    """

    name: str | None = None
    all: bool = False
    hosts: tuple[str, ...] = ()
    provider: str | None = None
    login: str | None = None
    clean: bool = False
    dry_run: bool = False

    def mistakes(self) -> list[str]:
        """Return a message for each contradiction in the request."""
        if self.clean:
            cleaning = (
                (not self.hosts, "--clean: say where, as in --hosts gpu1,gpu2"),
                (self.name, f"--clean ends no pool: leave {self.name} out"),
                (self.provider or self.login, "--clean is for hosts: leave --provider out"),
            )
            return [mistake for applies, mistake in cleaning if applies]
        checks = (
            (self.dry_run, "--dry-run shows what --clean would remove: add --clean"),
            (self.name and self.all, f"say {self.name} or --all, not both"),
            (
                self.provider and self.all,
                "--all ends all that you have rented without --provider too: leave one of them out",
            ),
        )
        wrong = places.place_mistakes(self.hosts, self.provider, self.login)
        return wrong + [mistake for applies, mistake in checks if applies]


def by_place(
    request: DownRequest, settings: CloudSettings, own: Collection[str], say: Say
) -> list[str] | None:
    """End the pools that a request selects by place, and return a line for each action.

    Return None if the request names neither hosts nor a provider.

    Args:
        own: job ids of this process's pools, which end in another way.

    Raises:
        RequestError: the request is ambiguous, or selects a pool of this process.
        PoolError: not everything could be ended; the message lists the rest.
    """
    if request.hosts:
        return places.end_on_hosts(request.hosts, request.name, request.all, own)
    if request.provider in providers.LISTING:
        return places.end_in_cluster(request.provider, request.name, own, request.login)
    if request.provider:
        return places.end_rented(request.name, say, settings, own)
    return None


# -- pools of notebooks that are gone --------------------------------------------------------------


def left(name: str | None) -> PoolRecord | None:
    """Return the record of a rented pool whose notebook is gone, or None.

    The pool is selected by name or job id; without a name it must be the only one.

    Raises:
        RequestError: several pools match.
    """
    return _only(_left(name))


def end_left(name: str | None, say: Say) -> list[str]:
    """End a pool whose notebook is gone: rented, in a cluster or on this machine.

    The pool is selected by name or job id; without a name, it is the only rented one.

    Returns:
        A line for each action; an empty list if no pool matches.

    Raises:
        RequestError: several pools match.
        PoolError: not everything could be ended, or the provider does not answer; the message lists
            the rest.
    """
    record = _only(
        [*_left(name), *([*records.left_here(name), *_left_in_clusters(name)] if name else ())]
    )
    if record is None:
        return []
    if record.provider in providers.LISTING:
        providers.listing(record.provider, _login(record)).end(record.job_id)
        records.remove(record.job_id)
        return [f"pool {record.name!r} is stopped"]
    return (
        places.end_on_hosts((), record.job_id, every=False)
        if record.provider == "local"
        else _end(record, say)
    )


def end_on_this_machine(name: str) -> list[str]:
    """End a pool on this machine by name or job id, even if another open notebook uses it.

    Returns:
        A line for each action; an empty list if no pool matches.

    Raises:
        RequestError: several pools match.
        PoolError: not everything could be ended; the message lists the rest.
    """
    running = on_hosts.find(()).pools
    if not any(name in (pool.name, pool.job_id) for pool in running):
        return []
    return places.end_on_hosts((), name, every=False)


def _left(name: str | None) -> list[PoolRecord]:
    rented = [
        record
        for record in records.every()
        if record.provider in records.RENTED and records.left(record)
    ]
    return [record for record in rented if name in (record.name, record.job_id) or name is None]


def _left_in_clusters(name: str) -> list[PoolRecord]:
    """Return the records of cluster pools of this name or job id whose notebook is gone.

    If several match, keep those that their schedulers still list: a pool ended by its scheduler
    leaves its record behind.
    """
    matching = [
        record
        for record in records.every()
        if record.provider in providers.LISTING
        and name in (record.name, record.job_id)
        and records.left(record)
    ]
    if len(matching) < 2:
        return matching
    schedulers = {(record.provider, _login(record)) for record in matching}
    running = {
        pool.job_id for scheduler in schedulers for pool in providers.listing(*scheduler).pools()
    }
    return [record for record in matching if record.job_id in running]


def _login(record: PoolRecord) -> str | None:
    """Return the login node through which a pool was made, or None if unknown or not used."""
    try:
        return keys.read(record.job_id).plan.request.login
    except PoolError:
        return None


def _only(found: Sequence[PoolRecord]) -> PoolRecord | None:
    if len(found) > 1:
        raise RequestError(
            "several pools were left: say which one\n" + "\n".join(map(records.words, found)),
            code="pool-ambiguous",
        )
    return found[0] if found else None


def _end(record: PoolRecord, say: Say) -> list[str]:
    """End a rented pool that a notebook has left, without attaching to it."""
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    try:
        plan = keys.read(record.job_id).plan
        settings, regions = plan.request.cloud, [plan.region]
    except PoolError:  # never ready, or made by another version: it may be in any region
        settings, regions = CloudSettings(), []
    clients = AwsClients.of(settings)
    say(f"ending pool {record.name!r} ({record.job_id}), left by another notebook …")
    if problems := sweep.release_job(
        clients, record.job_id, regions or catalogue.used_regions(clients)
    ):
        raise PoolError(
            f"not everything in pool {record.name!r} could be stopped:\n  " + "\n  ".join(problems),
            code="not-released",
            names=[record.name],
        )
    records.remove(record.job_id)
    return [f"pool {record.name!r} is down"]


# -- all that is rented ----------------------------------------------------------------------------


def everything_rented(
    say: Say,
    settings: CloudSettings = CloudSettings(),  # noqa: B008  # it is frozen
) -> list[str]:
    """Terminate all machines that the user has rented, in all regions, with their resources.

    Returns:
        A line for each action.

    Raises:
        PoolError: not everything could be terminated, or a region does not answer; the message
            lists the rest.
    """
    from skymagic.providers.aws import ledger, sweep
    from skymagic.providers.aws.clients import AwsClients

    ended: list[str] = []

    def heard(text: str) -> None:
        ended.append(text)
        say(text)

    if problems := sweep.release_everything(AwsClients.of(settings), heard):
        raise PoolError(
            "not everything rented could be terminated:\n  " + "\n  ".join(problems),
            code="not-released",
        )
    # keep the record of a pool that another notebook is renting at this moment
    running = {rent.job for rent in ledger.all_rents() if rent.ended is None}
    for record in records.every():
        if (
            record.provider in records.RENTED
            and records.left(record)
            and record.job_id not in running
        ):
            records.remove(record.job_id)
    return ["all of it is terminated"] if ended else ["nothing is rented from EC2"]


def everything_rented_if_any(say: Say, settings: CloudSettings) -> list[str]:
    """Terminate all rented machines, for a user who ends all pools and may have rented nothing.

    Nothing is done without configured credentials. Invalid credentials are reported in a line
    instead of raised.
    """
    if not configured():
        return []
    try:
        return everything_rented(say, settings)
    except CloudError as problem:
        if problem.kind != "credentials":
            raise
        return [f"EC2 was not searched for rented machines: {problem.reason}"]
