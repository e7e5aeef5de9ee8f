"""The end of pools that are not, or not alone, this process's: by their place, of notebooks that are gone, all that is rented; and rented
machines stopped with their disks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from skymagic.api import places
from skymagic.display.live import confirmed
from skymagic.errors import CloudError, PoolError, RequestError
from skymagic.plan.plans import monthly_words
from skymagic.plan.requests import CloudSettings
from skymagic.pool import attaching, keys, records, registry
from skymagic.pool.records import PoolRecord
from skymagic.providers import Survey
from skymagic.providers.aws.clients import configured

Say = Callable[[str], None]
"""Gets a line on what is being done."""


@dataclass(frozen=True)
class DownRequest:
    """Pools to end: one by name, the current one (None), or all of them; of those on hosts where any are named, or rented from a provider.
    Whether its machines are stopped with their disks, and whether that is agreed to."""

    name: str | None = None
    all: bool = False
    hosts: tuple[str, ...] = ()
    stop: bool = False
    yes: bool = False
    provider: str | None = None

    def mistakes(self) -> list[str]:
        """What contradicts itself."""
        checks = (
            (self.name and self.all, f"say {self.name} or --all, not both"),
            (self.stop and self.all, "--stop: say which pool, not --all"),
            (self.stop and self.hosts, "--stop works on rented machines, and --hosts names your own machines"),
            (self.provider and self.hosts, places.HOSTS_OR_PROVIDER),
            (
                self.provider and self.all,
                "--all ends all that you have rented without --provider too: leave one of them out",
            ),
            (
                self.provider and self.stop,
                "--stop works only on the machine that rented the pool: leave --provider out there",
            ),
        )
        return [mistake for wrong, mistake in checks if wrong]


def by_place(request: DownRequest, settings: CloudSettings, own: Collection[str], say: Say) -> list[str] | None:
    """End what a request names with its place, or stop its machines; what was done, in lines. None where it names neither.

    Args:
        own: job ids of pools of this process, which end in another way.

    Raises:
        RequestError: it is not clear which pool is meant, it is this process's own, or nobody has agreed.
        PoolError: something is left; names it.
    """
    if request.stop:
        return stop_machines(request.name, request.yes, say)
    if request.hosts:
        return places.end_on_hosts(request.hosts, request.name, request.all, own)
    if request.provider:
        return places.end_rented(request.name, say, settings, own)
    return None


# -- pools of notebooks that are gone --------------------------------------------------------------------------------


def left(name: str | None) -> PoolRecord | None:
    """The record of a rented pool that a notebook has left which is gone: of this name or job id, or the only one; None where there is none.

    One whose machines are stopped must be named.

    Raises:
        RequestError: it is not clear which one is meant.
    """
    return _only(_left(name))


def end_left(name: str | None, say: Say) -> list[str]:
    """End a pool that a notebook has left which is gone, rented or on this machine: of this name or job id, or the only one that is rented.

    Returns:
        What was done, in lines; none where there is no such pool.

    Raises:
        RequestError: it is not clear which one is meant.
        PoolError: something is left, or nobody could be asked; names it.
    """
    record = _only([*_left(name), *(records.left_here(name) if name else ())])
    if record is None:
        return []
    return places.end_on_hosts((), record.job_id, every=False) if record.provider == "local" else _end(record, say)


def _left(name: str | None) -> list[PoolRecord]:
    rented = [one for one in records.every() if one.provider in records.RENTED and records.left(one)]
    return [one for one in rented if name in (one.name, one.job_id) or (name is None and not one.stopped)]


def _only(found: Sequence[PoolRecord]) -> PoolRecord | None:
    if len(found) > 1:
        raise RequestError("several pools were left: say which one\n" + "\n".join(map(records.words, found)))
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
    which = "whose machines are stopped" if record.stopped else "left by another notebook"
    say(f"ending pool {record.name!r} ({record.job_id}), {which} …")
    if problems := sweep.release_job(clients, record.job_id, regions or catalogue.used_regions(clients)):
        raise PoolError(f"not everything in pool {record.name!r} could be stopped:\n  " + "\n  ".join(problems))
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
        if record.provider in records.RENTED and records.left(record) and record.job_id not in running:
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


# -- machines stopped with their disks -------------------------------------------------------------------------------


def stop_machines(name: str | None, yes: bool, say: Say) -> list[str]:
    """Stop the machines of this process's pool, or of one that another notebook has left, and keep their disks; `%sky_pool` starts them again.

    Args:
        name: the pool's; None for the one used last.
        yes: whether the user has agreed already.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: that cannot be done, with all reasons, or nobody has agreed; nothing has changed.
        PoolError: there is no such pool, or not all of its machines are stopped; names them.
    """
    # without a name this process's own pool is meant, if it has one
    record = None if name is None and registry.pools() else left(name)
    if record is None or registry.known(record.name):
        pool = registry.pool_named(name)
        name, monthly = pool.name, _kept(pool.survey, pool.name, yes)
        pool.close()
    elif record.stopped:
        return [f"pool {record.name!r}: {records.stopped_words(record)}"]
    else:
        name, monthly = record.name, _stop_left(record, yes, say)
    cost = f"their disks cost {monthly_words(monthly)} until %sky_down {name} ends them"
    return [f"the machines of pool {name!r} are stopped: {cost}; %sky_pool {name} starts them again"]


def _stop_left(record: PoolRecord, yes: bool, say: Say) -> float:
    """Dollars a month for the machines of a pool that nobody is attached to, once they are stopped."""
    key = keys.read(record.job_id)
    with records.locked(record.job_id):
        survey, _ = attaching.attaching_provider(key).attach(key.plan, key.accesses)
        monthly = _kept(survey, record.name, yes)
        say(f"stopping the machines of pool {record.name!r} ({record.job_id}), left by another notebook …")
        try:
            survey.close()
        finally:
            records.stop(record.job_id, monthly)
    return monthly


def _kept(survey: Survey, name: str, yes: bool) -> float:
    """Have the end of a pool stop its machines; dollars a month. Asks first, for they go on to cost and nothing ends them by itself.

    Raises:
        RequestError: that cannot be done, the answer was no, or nobody is there to ask.
    """
    question = f"{survey.stopping()} (%sky_down {name} ends them, or skymagic down --all from any machine)"
    if not (yes or confirmed(question)):
        raise RequestError(f"{question}: add -y if you mean that")
    survey.keep()
    return survey.monthly or 0.0
