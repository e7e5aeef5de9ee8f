"""The pool of a kernel that executes a notebook as a job on the pool's head: it has the pool as a notebook has that attached to it."""

from __future__ import annotations

import base64
import contextlib
import pickle
from dataclasses import replace
from pathlib import Path

from skymagic.plan.requests import Defaults
from skymagic.pool import Pool, records, registry
from skymagic.pool.keys import PoolKey
from skymagic.providers import head, serving
from skymagic.providers.ssh import SSH
from skymagic.wire import atomic

_pools: list[Pool] = []
"""The one that `enter` has taken up."""
_in_use = contextlib.ExitStack()


def enter(file: str) -> None:
    """Take the pool up, before the notebook's first cell.

    Args:
        file: holds the pool's key, as `packed` makes it.

    Raises:
        PoolError, ProvisionError: it is gone, or does not answer.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    atomic.private_folder(records.folder())  # where the pool says how far its runs were shown
    key: PoolKey = pickle.loads(base64.b64decode(Path(file).read_text()))
    survey, nodes = head.attach(key.plan, key.accesses)

    def gone(pool: Pool) -> None:
        Path(file).with_name("closed").touch()  # by the notebook itself, which goes on
        registry.drop(pool)

    # what is rented is used as hosts are: the head has no credentials of the cloud
    provider = SSH() if key.plan.region else serving(key.plan.request)
    pool = Pool(key.name, provider, survey, shell.user_ns, Defaults(), gone, key.job_id)
    pool.attach(nodes, key)
    registry.adopt(pool)
    _pools.append(pool)
    _in_use.enter_context(pool.in_use())  # between its cells too
    if not key.plan.remote:
        for (
            one
        ) in records.every():  # on this machine the pool's record says who has it: now this process
            if one.job_id == key.job_id:
                records.write(records.taken(one))


def leave() -> None:
    """Leave the pool for others, after the last cell."""
    with contextlib.suppress(Exception):
        _in_use.close()
    for pool in _pools:
        if registry.known(pool.name) and pool in registry.pools():
            with contextlib.suppress(
                Exception
            ):  # whatever is closed no more, ends with this process
                pool.leave()
            registry.forget(pool)


def packed(key: PoolKey, accesses: tuple[head.NodeAccess, ...]) -> str:
    """A pool's key for its head, as text."""
    return base64.b64encode(pickle.dumps(replace(key, accesses=accesses))).decode()
