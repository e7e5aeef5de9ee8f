"""What is rented, listed and ended by its tags from any machine with the user's credentials: as text and as plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING, Any

from skymagic.api.running import roughly
from skymagic.display.text import table
from skymagic.errors import PoolError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.pool import records

if TYPE_CHECKING:
    from skymagic.providers.aws.sweep import Tagged, TaggedPool


def look(settings: CloudSettings, name: str | None = None) -> Tagged:
    """What is rented, of all pools or those of a name or job id.

    Raises:
        CloudError: nobody can be asked.
    """
    from skymagic.providers.aws import sweep
    from skymagic.providers.aws.clients import AwsClients

    found = sweep.tagged_pools(AwsClients.of(settings))
    return replace(found, pools=tuple(one for one in found.pools if name in (None, one.name, one.job_id)))


def stop(name: str | None, say: Callable[[str], None], settings: CloudSettings, own: Collection[str] = ()) -> list[str]:
    """End one rented pool, with all that was made for it.

    Args:
        name: its name or job id; None for the only one.
        own: job ids of pools of this process, which end in another way.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        CloudError: nobody can be asked, or not where it may be.
        PoolError: something is left; names it.
    """
    from skymagic.providers.aws import catalogue, sweep
    from skymagic.providers.aws.clients import AwsClients

    clients = AwsClients.of(settings)
    found = sweep.tagged_pools(clients)
    job = sweep.chosen_job(found, name)
    pool = next(one for one in found.pools if one.job_id == job)
    if job in own:
        raise RequestError(f"{pool.name}: of this notebook; %sky_down {pool.name} ends it")
    say(f"ending {_heading(pool)} …")
    if problems := sweep.release_job(clients, job, catalogue.used_regions(clients)):
        raise PoolError(f"not everything of pool {pool.name!r} ({job}) was ended:\n  " + "\n  ".join(problems))
    records.remove(job)
    return [f"pool {pool.name!r} ({job}) is terminated"]


def status_text(found: Tagged, own: Collection[str] = ()) -> str:
    """What was found, for people."""
    blocks = [_pool_text(one, one.job_id in own) for one in found.pools] or ["no pool of yours is rented from EC2"]
    return "\n\n".join([*blocks, *(f"{region}: {reason}" for region, reason in found.unreached.items())])


def _pool_text(pool: TaggedPool, own: bool) -> str:
    now = time()
    rows = [("machine", "type", "GPUs", "zone", "state", "for")]
    rows += [
        (one.id, one.type, one.gpus, one.zone, one.state, "" if one.state == "stopped" else roughly(now - one.launched))
        for one in pool.machines
    ]
    stopped = pool.ends.startswith("stopped")
    lines = [_heading(pool), table(rows), pool.ends if stopped else f"ends itself at {pool.ends} at the latest"]
    how = "" if own else f" {pool.job_id} --provider aws"
    return "\n".join([*lines, f"to end it: %sky_down{how or f' {pool.name}'}"])


def _heading(pool: TaggedPool) -> str:
    return f"pool {pool.name!r} ({pool.job_id}) in {pool.region}, rented by {pool.client}"


def plain(found: Tagged) -> dict[str, Any]:
    """What was found, for programs; the fields stay as they are from version to version. Times are seconds since 1970."""
    return {
        "pools": [
            {
                "name": pool.name,
                "job_id": pool.job_id,
                "client": pool.client,
                "region": pool.region,
                "ends": pool.ends,
                "machines": [vars(one) for one in pool.machines],
            }
            for pool in found.pools
        ],
        "unreached": found.unreached,
    }
