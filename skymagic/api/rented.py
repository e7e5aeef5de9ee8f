"""What is rented, ended from any machine with the user's credentials, by its tags alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymagic.api import running
from skymagic.errors import CloudError, PoolError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.pool import keys, records
from skymagic.pool.records import PoolRecord
from skymagic.providers.aws.clients import configured


def stop_with_the_rest(say: Callable[[str], None], settings: CloudSettings) -> list[str]:
    """As `stop`, for who ends all pools and may have rented nothing: without credentials that are good, only a line says so."""
    if not configured():
        return []
    try:
        return stop(say, settings)
    except CloudError as problem:
        if problem.kind != "credentials":
            raise
        return [f"what is rented from EC2 was not looked for: {problem.reason}"]


def left(name: str | None) -> PoolRecord | None:
    """The record of a rented pool that a notebook has left which is gone: of this name or job id, or the only one; None where there is none.

    One whose machines are stopped must be named.

    Raises:
        RequestError: it is not clear which one is meant.
    """
    return _only(_left(name))


def end_left(name: str | None, say: Callable[[str], None]) -> list[str]:
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
    return running.stop((), record.job_id, every=False) if record.provider == "local" else stop_left(record, say)


def _left(name: str | None) -> list[PoolRecord]:
    rented = [one for one in records.every() if one.provider in records.RENTED and records.left(one)]
    return [one for one in rented if name in (one.name, one.job_id) or (name is None and not one.stopped)]


def _only(found: Sequence[PoolRecord]) -> PoolRecord | None:
    if len(found) > 1:
        raise RequestError("several pools were left: say which one\n" + "\n".join(map(records.words, found)))
    return found[0] if found else None


def stop_left(record: PoolRecord, say: Callable[[str], None]) -> list[str]:
    """End a rented pool that a notebook has left, without attaching to it.

    Returns:
        What was done, in lines.

    Raises:
        PoolError: something is left, or nobody could be asked; names it.
    """
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    try:
        plan = keys.read(record.job_id).plan
        settings, places = plan.request.cloud, [plan.region]
    except PoolError:  # it was never ready, or another version has made it: it may be anywhere
        settings, places = CloudSettings(), []
    clients = AwsClients.of(settings)
    which = "whose machines are stopped" if record.stopped else "which another notebook has left"
    say(f"ending pool {record.name!r} ({record.job_id}), {which} …")
    if problems := sweep.release_job(clients, record.job_id, places or catalogue.used_regions(clients)):
        raise PoolError(f"not everything of pool {record.name!r} was ended:\n  " + "\n  ".join(problems))
    records.remove(record.job_id)
    return [f"pool {record.name!r} is stopped"]


def stop(say: Callable[[str], None], settings: CloudSettings = CloudSettings()) -> list[str]:  # noqa: B008  # it is frozen
    """End all machines that the user has rented, in all regions, with all that was made for them.

    Returns:
        What was done, in lines.

    Raises:
        PoolError: something is left, or nobody could be asked; names it.
    """
    from skymagic.providers.aws import ledger, sweep
    from skymagic.providers.aws.clients import AwsClients

    clients = AwsClients.of(settings)
    ended: list[str] = []

    def heard(text: str) -> None:
        ended.append(text)
        say(text)

    problems = sweep.release_everything(clients, heard)
    if problems:
        raise PoolError("not everything that is rented was ended:\n  " + "\n  ".join(problems))
    going_on = {one.job for one in ledger.every() if one.ended is None}
    for record in records.every():
        if record.provider in records.RENTED and records.left(record) and record.job_id not in going_on:
            records.remove(record.job_id)
    return ["all of it is terminated"] if ended else ["nothing is rented from EC2"]
