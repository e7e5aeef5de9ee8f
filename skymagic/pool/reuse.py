"""Reuse: a rented pool that another notebook of this user has left is found again, instead of a second one being rented."""

from __future__ import annotations

from collections.abc import Collection

from skymagic.errors import PoolError, RequestError
from skymagic.plan.planning import fits
from skymagic.plan.plans import Plan
from skymagic.plan.requests import PoolRequest
from skymagic.pool import keys, records
from skymagic.pool.records import PoolRecord

RENTED = ("aws",)
"""Providers whose machines cost money while nobody uses them."""


def left(request: PoolRequest, name: str, known: Collection[str]) -> PoolRecord | None:
    """The record of a rented pool that serves a request and whose notebook is gone; None where there is none.

    A request without a name takes any that fits, as it does of the pools of its own notebook.

    Args:
        name: what the pool would be called. known: job ids of this notebook's own pools.

    Raises:
        PoolError: one of this name belongs to a notebook that is alive, or cannot be attached to.
        RequestError: one of this name was left, and is another.
    """
    for record in reversed(records.every()):
        named = record.name == name
        if record.provider not in RENTED or record.job_id in known or not (named or request.name is None):
            continue
        if not records.left(record):
            if named:
                raise PoolError(taken(record))
            continue
        try:
            differences = fits(request, _plan(record))
        except PoolError as unknown:
            if named:
                raise PoolError(f"{unknown}; %sky_down {name} ends what is left of it") from None
            continue
        if not differences:
            return record
        if named:
            how = "is stopped" if record.stopped else "which another notebook has left, runs already"
            raise RequestError(
                [f"pool {name!r}{'' if record.stopped else ','} {how} and {each}" for each in differences]
                + [f"end it first (%sky_down {name}), or give the new one another name (%sky_pool NAME …)"]
            )
    return None


def _plan(record: PoolRecord) -> Plan:
    """What a pool was made from. Raises PoolError where that is not known."""
    return keys.read(record.job_id).plan


def taken(record: PoolRecord) -> str:
    """Why a pool of this name is not rented a second time, and what to do."""
    return (
        f"{records.words(record)}: end that notebook, take the pool away from it (%sky_attach {record.name} --take-over), "
        "or give the new one another name (%sky_pool NAME …)"
    )


def claim(record: PoolRecord) -> None:
    """Keep the record of a pool that is about to be rented; of two notebooks that do so at once, one is refused.

    Raises:
        PoolError: a notebook that is alive has a rented pool of this name.
    """
    with records.locked("rented"):
        for other in records.every():
            rival = other.provider in RENTED and other.name == record.name
            if rival and other.process != record.process and not records.left(other):
                raise PoolError(taken(other))
        records.write(record)
