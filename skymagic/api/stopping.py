"""End pools that are not, or not only, this process's.

Pools are selected by location, among those left by notebooks that are gone, or everything rented is
terminated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from skymagic import providers
from skymagic.api.pool_listing import location_mistakes
from skymagic.errors import CloudError, PoolError, RequestError, SkyError
from skymagic.plan.requests import CloudSettings
from skymagic.pool import launch, records
from skymagic.providers import PoolLocation, RemotePool
from skymagic.providers.aws.clients import is_configured

Say = Callable[[str], None]
"""Callback that receives a line of progress."""
STOPPED_BY_RECORD = ("local", *records.RENTED, *providers.LISTING)
"""Providers whose pools are stopped by their records alone; of others the hosts must be named."""


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
        wrong = location_mistakes(self.hosts, self.provider, self.login)
        return wrong + [mistake for applies, mistake in checks if applies]


def stop_in_location(
    request: DownRequest, settings: CloudSettings, own: Collection[str], say: Say
) -> list[str] | None:
    """End the pools that a request selects by location, and return a line for each action.

    Return None if the request names neither hosts nor a provider.

    Args:
        own: job ids of this process's pools, which end in another way.

    Raises:
        RequestError: the request is ambiguous, or selects a pool of this process.
        SkyError: not everything could be ended; the message lists the rest.
    """
    location = PoolLocation(request.hosts, request.provider, request.login, settings)
    if location.is_here:
        return None
    return _stop(location, request.name, say, select_all=request.all, own=own)


def _stop(
    location: PoolLocation,
    name: str | None,
    say: Say,
    *,
    select_all: bool = False,
    own: Collection[str] = (),
    missing_ok: bool = False,
) -> list[str]:
    """End pools in a location. Raises as `stop_in_location` does, unless none and `missing_ok`."""
    result = providers.find_pools(location)
    if missing_ok and not result.named(name).pools:
        return []
    pools = result.select(name, select_all=select_all)
    if own_names := [pool.name for pool in pools if pool.job_id in own]:
        raise RequestError(
            f"{', '.join(own_names)}: of this notebook; %sky_down {own_names[0]} ends it",
            code="pool-of-notebook",
            names=own_names,
        )
    lines, problems, ended = [], [], set[str]()
    for pool in pools:
        try:
            lines.append(_stop_pool(pool, location, say))
            ended.add(pool.job_id)
        except SkyError as problem:
            problems.append(str(problem))
    records.forget(result.reached, {pool.job_id for pool in result.pools} - ended)
    problems += [f"{source}: {reason}" for source, reason in result.unreached.items()]
    if problems:
        raise PoolError("; ".join([*lines, *problems]))
    return lines


def _stop_pool(pool: RemotePool, location: PoolLocation, say: Say) -> str:
    """End a pool, and remove its record unless it was found on hosts."""
    if location.provider in records.RENTED:  # takes minutes
        say(f"ending pool {pool.name!r} ({pool.job_id}): {pool.where} …")
    line = providers.stop(pool, location)
    if location.provider:
        records.remove(pool.job_id)
    return line


def stop_named(name: str, say: Say) -> list[str]:
    """End a pool of this machine: one that was left, else one whose notebook is open.

    Raises as `stop_on_this_machine` does.
    """
    # In this order: only the record of a pool that was left knows where it runs, and it names
    # rented machines and jobs of a cluster too.
    return stop_without_notebook(name, say) or stop_on_this_machine(name, say)


def stop_on_this_machine(name: str, say: Say, *, missing_ok: bool = False) -> list[str]:
    """End a pool on this machine by name or job id, even if another open notebook uses it.

    Returns:
        A line for each action; an empty list if no pool matches and `missing_ok` is set.

    Raises:
        RequestError: no pool matches, or several do.
        PoolError: not everything could be ended; the message lists the rest.
    """
    return _stop(PoolLocation(), name, say, missing_ok=missing_ok)


def stop_without_notebook(name: str | None, say: Say) -> list[str]:
    """End a pool whose notebook is gone: rented, in a cluster or on this machine.

    The pool is selected by name or job id; without a name, it is the only rented one.

    Returns:
        A line for each action; an empty list if no pool matches.

    Raises:
        RequestError: several pools match.
        SkyError: not everything could be ended, or the provider does not answer; the message lists
            the rest.
    """
    matching = [
        record
        for record in records.readable_records()
        if records.is_left(record)
        and (name is None or name in (record.name, record.job_id))
        and record.provider in (records.RENTED if name is None else STOPPED_BY_RECORD)
    ]
    if len(matching) > 1:  # a pool that its scheduler has ended leaves its record behind
        matching = [
            record
            for record in matching
            if record.provider in records.RENTED or launch.is_still_running(record)
        ]
    if len(matching) > 1:
        listed = "\n".join(map(records.record_text, matching))
        raise RequestError(
            f"several pools were left: say which one\n{listed}",
            code="pool-ambiguous",
            names=[record.job_id for record in matching],
        )
    if not matching:
        return []
    (record,) = matching
    if record.provider == "local":
        return stop_on_this_machine(record.job_id, say)
    pool = RemotePool(record.name, record.job_id, ", ".join(record.hosts))
    return [_stop_pool(pool, launch.location_of(record), say)]


# -- all that is rented ----------------------------------------------------------------------------


def terminate_all_rented(
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

    def report_ending(text: str) -> None:
        ended.append(text)
        say(text)

    if problems := sweep.release_everything(AwsClients.of(settings), report_ending):
        raise PoolError(
            "not everything rented could be terminated:\n  " + "\n  ".join(problems),
            code="not-released",
        )
    # keep the record of a pool that another notebook is renting at this moment
    running = {rent.job for rent in ledger.all_rents() if rent.ended is None}
    for record in records.readable_records():
        if (
            record.provider in records.RENTED
            and records.is_left(record)
            and record.job_id not in running
        ):
            records.remove(record.job_id)
    return ["all of it is terminated"] if ended else ["nothing is rented from EC2"]


def terminate_rented_if_any(say: Say, settings: CloudSettings) -> list[str]:
    """Terminate all rented machines, for a user who ends all pools and may have rented nothing.

    Nothing is done without configured credentials. Invalid credentials are reported in a line
    instead of raised.
    """
    if not is_configured():
        return []
    try:
        return terminate_all_rented(say, settings)
    except CloudError as problem:
        if problem.kind != "credentials":
            raise
        return [f"EC2 was not searched for rented machines: {problem.reason}"]
