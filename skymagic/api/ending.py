"""The end of pools that are not, or not alone, this process's: by their place, of notebooks that are gone, and all that is rented."""

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
"""Gets a line on what is being done."""


@dataclass(frozen=True)
class DownRequest:
    """Pools to end: one by name, the current one (None), or all of them; of those on hosts where any are named, or rented from a provider.

    Attributes:
        clean: end no pool, and remove files from the hosts that no pool has used for 30 days, or with `all` those that none uses now.
        dry_run: only say what `clean` would remove.
    """

    name: str | None = None
    all: bool = False
    hosts: tuple[str, ...] = ()
    provider: str | None = None
    login: str | None = None
    clean: bool = False
    dry_run: bool = False

    def mistakes(self) -> list[str]:
        """What contradicts itself."""
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
    """End what a request names with its place; what was done, in lines. None where it names neither.

    Args:
        own: job ids of pools of this process, which end in another way.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        PoolError: something is left; names it.
    """
    if request.hosts:
        return places.end_on_hosts(request.hosts, request.name, request.all, own)
    if request.provider in providers.LISTING:
        return places.end_in_cluster(request.provider, request.name, own, request.login)
    if request.provider:
        return places.end_rented(request.name, say, settings, own)
    return None


# -- pools of notebooks that are gone --------------------------------------------------------------------------------


def left(name: str | None) -> PoolRecord | None:
    """The record of a rented pool that a notebook has left which is gone: of this name or job id, or the only one; None where there is none.

    Raises:
        RequestError: it is not clear which one is meant.
    """
    return _only(_left(name))


def end_left(name: str | None, say: Say) -> list[str]:
    """End a pool that a notebook has left which is gone, rented, of a cluster or on this machine: of this name or job id, or the only one
    that is rented.

    Returns:
        What was done, in lines; none where there is no such pool.

    Raises:
        RequestError: it is not clear which one is meant.
        PoolError: something is left, or nobody could be asked; names it.
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
    """End a pool on this machine, of this name or job id, whoever has it: another notebook that is still open, too.

    Returns:
        What was done, in lines; none where there is no such pool.

    Raises:
        RequestError: it is not clear which one is meant.
        PoolError: something is left; names it.
    """
    running = on_hosts.find(()).pools
    if not any(name in (pool.name, pool.job_id) for pool in running):
        return []
    return places.end_on_hosts((), name, every=False)


def _left(name: str | None) -> list[PoolRecord]:
    rented = [
        one for one in records.every() if one.provider in records.RENTED and records.left(one)
    ]
    return [one for one in rented if name in (one.name, one.job_id) or name is None]


def _left_in_clusters(name: str) -> list[PoolRecord]:
    """Records of such pools; of several those that their schedulers know still, for what they end themselves leaves its record."""
    there = [
        one
        for one in records.every()
        if one.provider in providers.LISTING
        and name in (one.name, one.job_id)
        and records.left(one)
    ]
    if len(there) < 2:
        return there
    asked = {(one.provider, _login(one)) for one in there}
    running = {pool.job_id for place in asked for pool in providers.listing(*place).pools()}
    return [one for one in there if one.job_id in running]


def _login(record: PoolRecord) -> str | None:
    """The login node through which a pool was made; None for none, or where nobody knows."""
    try:
        return keys.read(record.job_id).plan.request.login
    except PoolError:
        return None


def _only(found: Sequence[PoolRecord]) -> PoolRecord | None:
    if len(found) > 1:
        raise RequestError(
            "several pools were left: say which one\n" + "\n".join(map(records.words, found))
        )
    return found[0] if found else None


def _end(record: PoolRecord, say: Say) -> list[str]:
    """End a rented pool that a notebook has left, without attaching to it."""
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    try:
        plan = keys.read(record.job_id).plan
        settings, regions = plan.request.cloud, [plan.region]
    except PoolError:  # it was never ready, or another version has made it: it may be anywhere
        settings, regions = CloudSettings(), []
    clients = AwsClients.of(settings)
    say(f"ending pool {record.name!r} ({record.job_id}), left by another notebook …")
    if problems := sweep.release_job(
        clients, record.job_id, regions or catalogue.used_regions(clients)
    ):
        raise PoolError(
            f"not everything in pool {record.name!r} could be stopped:\n  " + "\n  ".join(problems)
        )
    records.remove(record.job_id)
    return [f"pool {record.name!r} is down"]


# -- all that is rented ----------------------------------------------------------------------------------------------


def everything_rented(say: Say, settings: CloudSettings = CloudSettings()) -> list[str]:  # noqa: B008  # it is frozen
    """End all machines that the user has rented, in all regions, with all that was made for them.

    Returns:
        What was done, in lines.

    Raises:
        PoolError: something is left, or nobody could be asked; names it.
    """
    from skymagic.providers.aws import ledger, sweep
    from skymagic.providers.aws.clients import AwsClients

    ended: list[str] = []

    def heard(text: str) -> None:
        ended.append(text)
        say(text)

    if problems := sweep.release_everything(AwsClients.of(settings), heard):
        raise PoolError("not everything rented could be terminated:\n  " + "\n  ".join(problems))
    # a pool that another notebook rents at this very moment keeps its record
    running = {one.job for one in ledger.every() if one.ended is None}
    for record in records.every():
        if (
            record.provider in records.RENTED
            and records.left(record)
            and record.job_id not in running
        ):
            records.remove(record.job_id)
    return ["all of it is terminated"] if ended else ["nothing is rented from EC2"]


def everything_rented_if_any(say: Say, settings: CloudSettings) -> list[str]:
    """The same for a user who ends all pools and may have rented nothing: without credentials that are good, only a line says so."""
    if not configured():
        return []
    try:
        return everything_rented(say, settings)
    except CloudError as problem:
        if problem.kind != "credentials":
            raise
        return [f"EC2 was not searched for rented machines: {problem.reason}"]
