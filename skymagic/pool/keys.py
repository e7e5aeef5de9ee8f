"""Keys, which let another notebook of this user attach to a pool whose notebook was killed.

A key holds the secrets of the pool's daemons and everything else that the notebook knew: its plan,
where its nodes are. It is stored in the pool's record for as long as the pool lives.
"""

from __future__ import annotations

import base64
import pickle
import platform
import sys
from dataclasses import dataclass
from typing import Any

import skymagic
from skymagic.errors import PoolError
from skymagic.plan.plans import Plan
from skymagic.pool import records
from skymagic.pool.records import SavedKey


@dataclass(frozen=True)
class PoolKey:
    """Everything another notebook needs to attach to a pool, besides its record.

    Attributes:
        accesses: for each machine, how to reach its agent (`cluster.Node.access`).
        addresses: for each machine, the address for the other machines, and its own hostname.
        port: a free port on the head for process groups.
    """

    plan: Plan
    accesses: tuple[Any, ...]
    addresses: tuple[tuple[str, str], ...]
    port: int

    def saved(self) -> SavedKey:
        """Return the key as a record stores it."""
        pickled = base64.b64encode(pickle.dumps(self)).decode()
        return SavedKey(skymagic.__version__, platform.python_version(), sys.executable, pickled)


def read(job_id: str) -> PoolKey:
    """Read the key of a pool.

    Raises:
        PoolError: the key is missing, other users could have written it, or another version of
            skymagic wrote it; the message names the next step.
    """
    return _unpacked(_saved(job_id), job_id)


def attachable(job_id: str) -> PoolKey:
    """Read the key of a pool whose ranks run this notebook's Python.

    Values and functions are pickled between them.

    Raises:
        PoolError: as for `read`, or the ranks run another Python, which the message names.
    """
    saved = _saved(job_id)
    own = platform.python_version()
    # With another version of skymagic, `_unpacked` below names that version, and the Python that
    # comes with it may be another one too.
    if saved.version == skymagic.__version__ and saved.minor != own.split(".")[:2]:
        raise PoolError(
            f"the ranks of {job_id} run Python {saved.python}, and this is Python {own}: attach "
            f"with Python {'.'.join(saved.minor)}, as {saved.interpreter} is; {_otherwise(job_id)}",
            code="other-python",
            names=[job_id],
        )
    return _unpacked(saved, job_id)


def _saved(job_id: str) -> SavedKey:
    try:
        saved = records.private(job_id).key
    except records.UNREADABLE as problem:
        # only an OSError has `strerror`
        reason = getattr(problem, "strerror", None) or "its record is damaged"
        raise PoolError(
            f"the key of {job_id} is not here ({reason}): {_otherwise(job_id)}",
            code="key-missing",
            names=[job_id],
        ) from None
    if saved is None:
        raise PoolError(
            f"the key of {job_id} is not here: the pool never became ready, or an earlier version "
            f"of skymagic wrote its record; {_otherwise(job_id)}",
            code="key-missing",
            names=[job_id],
        )
    return saved


def _unpacked(saved: SavedKey, job_id: str) -> PoolKey:
    # Checked before the key is unpickled: its classes are ours, and differ between versions.
    if saved.version != skymagic.__version__:
        raise PoolError(
            f"{job_id} was made by skymagic {saved.version or '?'}, and this is "
            f"{skymagic.__version__}: attach with that version; {_otherwise(job_id)}",
            code="other-version",
            names=[job_id],
        )
    try:
        key = pickle.loads(base64.b64decode(saved.pickle, validate=True))
    # a damaged pickle may raise anything
    except Exception as problem:
        raise PoolError(
            f"the key of {job_id} is damaged ({type(problem).__name__}): {_otherwise(job_id)}",
            code="key-damaged",
            names=[job_id],
        ) from None
    if not isinstance(key, PoolKey):
        raise PoolError(
            f"the key of {job_id} is damaged: {_otherwise(job_id)}",
            code="key-damaged",
            names=[job_id],
        )
    return key


def _otherwise(job_id: str) -> str:
    return f"%sky_status --hosts … shows what runs, %sky_down {job_id} --hosts … ends it"
