"""A rented pool's machines stopped with their disks, for ``%sky_pool NAME`` to start again: asked for with what that costs."""

from __future__ import annotations

from collections.abc import Callable

from skymagic.api import rented
from skymagic.display.question import confirmed
from skymagic.errors import RequestError
from skymagic.plan.plans import monthly_words
from skymagic.pool import keys, readers, records, registry
from skymagic.pool.records import PoolRecord


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
    record = None if name is None and registry.every() else rented.left(name)
    if record is not None and not registry.known(record.name):
        if record.stopped:
            return [f"pool {record.name!r}: {records.stopped_words(record)}"]
        monthly = _stop_left(record, yes, say)
        return [_done(record.name, monthly)]
    pool = registry.find(name)
    _agreed(pool.name, pool.stopping(), yes)
    pool.keep()
    monthly = pool.monthly or 0.0
    pool.close()
    return [_done(pool.name, monthly)]


def _stop_left(record: PoolRecord, yes: bool, say: Callable[[str], None]) -> float:
    """Dollars a month for the machines of a pool that nobody is attached to, once they are stopped."""
    key = keys.read(record.job_id)
    with records.locked(record.job_id):
        survey, _ = readers.attachable(key).attach(key.plan, key.accesses)
        _agreed(record.name, survey.stopping(), yes)
        say(f"stopping the machines of pool {record.name!r} ({record.job_id}), which another notebook has left …")
        survey.keep()
        monthly = survey.monthly or 0.0
        try:
            survey.close()
        finally:
            records.stop(record.job_id, monthly)
    return monthly


def _agreed(name: str, words: str, yes: bool) -> None:
    """Ask before something costs that nothing ends by itself. Raises RequestError where the answer was no, or nobody is there to ask."""
    question = f"{words} (%sky_down {name} ends them, or skymagic down --all from any machine)"
    if not (yes or confirmed(question)):
        raise RequestError(f"{question}: add -y if you mean that")


def _done(name: str, monthly: float) -> str:
    cost = f"their disks cost {monthly_words(monthly)} until %sky_down {name} ends them"
    return f"the machines of pool {name!r} are stopped: {cost}; %sky_pool {name} starts them again"
