"""A rented pool's machines stopped with their disks, for ``%sky_pool NAME`` to start again: asked for with what that costs."""

from __future__ import annotations

from collections.abc import Callable

from skymagic.api import rented
from skymagic.display.live import confirmed
from skymagic.errors import RequestError
from skymagic.plan.plans import monthly_words
from skymagic.pool import attaching, keys, records, registry
from skymagic.pool.records import PoolRecord
from skymagic.providers import Survey


def stop(name: str | None, yes: bool, say: Callable[[str], None]) -> list[str]:
    """Stop the machines of this process's pool, or of one that another notebook has left, and keep their disks.

    Args:
        name: the pool's; None for the one used last.
        yes: whether the user has agreed already.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: that cannot be done, with all reasons, or nobody has agreed; nothing has changed.
        PoolError: there is no such pool, or not all of its machines are stopped; names them.
    """
    record = None if name is None and registry.pools() else rented.left(name)
    if record is not None and not registry.known(record.name):
        if record.stopped:
            return [f"pool {record.name!r}: {records.stopped_words(record)}"]
        return [_done(record.name, _stop_left(record, yes, say))]
    pool = registry.pool_named(name)
    monthly = _kept(pool.survey, pool.name, yes)
    pool.close()
    return [_done(pool.name, monthly)]


def _stop_left(record: PoolRecord, yes: bool, say: Callable[[str], None]) -> float:
    """Dollars a month for the machines of a pool that nobody is attached to, once they are stopped."""
    key = keys.read(record.job_id)
    with records.locked(record.job_id):
        survey, _ = attaching.attaching_provider(key).attach(key.plan, key.accesses)
        monthly = _kept(survey, record.name, yes)
        say(f"stopping the machines of pool {record.name!r} ({record.job_id}), which another notebook has left …")
        try:
            survey.close()
        finally:
            records.stop(record.job_id, monthly)
    return monthly


def _kept(survey: Survey, name: str, yes: bool) -> float:
    """Have the end of a pool stop its machines; asks first, for they go on to cost and nothing ends them by itself.

    Returns:
        Dollars a month.

    Raises:
        RequestError: that cannot be done, the answer was no, or nobody is there to ask.
    """
    question = f"{survey.stopping()} (%sky_down {name} ends them, or skymagic down --all from any machine)"
    if not (yes or confirmed(question)):
        raise RequestError(f"{question}: add -y if you mean that")
    survey.keep()
    return survey.monthly or 0.0


def _done(name: str, monthly: float) -> str:
    cost = f"their disks cost {monthly_words(monthly)} until %sky_down {name} ends them"
    return f"the machines of pool {name!r} are stopped: {cost}; %sky_pool {name} starts them again"
