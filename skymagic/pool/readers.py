"""Pools of other notebooks that are read from this process, by name: the one that was begun last comes last."""

from __future__ import annotations

from typing import Any

from skymagic import providers
from skymagic.errors import PoolError
from skymagic.pool import keys, records
from skymagic.pool.reader import Reader
from skymagic.providers.provider import Attachable
from skymagic.wire.record import identity

_readers: dict[str, Reader] = {}


def find(name: str | None) -> Reader | None:
    """What reads a pool of this name, or the one that was begun last; None where there is none.

    Raises:
        PoolError: the pool is gone; it is dropped.
    """
    reader = _readers.get(name) if name is not None else next(reversed(_readers.values()), None)
    if reader is None or reader.gone is None:
        return reader
    stop(reader.name)
    raise PoolError(f"pool {reader.name!r}, which was read here, has ended or cannot be reached: {reader.gone}")


def every() -> list[Reader]:
    """All of them. Raises as `find` does."""
    return [reader for name in list(_readers) if (reader := find(name)) is not None]


def held(name: str) -> bool:
    """Whether a notebook that is alive has a pool of this name, or job id, and it is not this one. Raises as `records.named`."""
    record = records.named(name)
    return not (records.left(record) or record.process == identity())


def read(name: str) -> Reader:
    """Read a pool that another notebook of this user has made from here, beside that one, which keeps it.

    Args:
        name: the pool's, or its job id.

    Raises:
        PoolError: there is no such pool, its key is not to be used, or it does not answer.
    """
    reader = opened(name)
    stop(reader.name)
    _readers[reader.name] = reader
    return reader


def opened(name: str) -> Reader:
    """The same; the caller closes it."""
    record = records.named(name)
    key = keys.attachable(record.job_id)
    _, nodes = attachable(key).attach(key.plan, key.accesses)
    return Reader(record, key, nodes)


def attachable(key: keys.PoolKey) -> Any:
    """The provider of a pool that can be attached. Raises PoolError for others."""
    provider = providers.serving(key.plan.request)
    if not isinstance(provider, Attachable):
        raise PoolError(f"pools of --provider {key.plan.provider} cannot be attached")
    return provider


def stop(name: str) -> None:
    """Read a pool of this name no longer; twice is safe."""
    if (reader := _readers.pop(name, None)) is not None:
        reader.close()


def stop_all() -> None:
    """Read none any longer."""
    for name in list(_readers):
        stop(name)
