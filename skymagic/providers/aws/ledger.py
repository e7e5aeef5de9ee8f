"""Record of rented machines and their cost.

One file per launch, kept over restarts of notebooks until a month after the launch ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label
from skymagic.wire import atomic

RETENTION = 31 * 86400.0
# approximate dollars per GB and hour of a gp3 disk: 0.08 a month in us-east-1 (2026-11)
DISK_PRICE = 0.08 / 730
ADDRESS_PRICE = 0.005
"""Price of a public address in dollars per hour."""


@dataclass(frozen=True)
class Rent:
    """Cost of the machines of one launch.

    Attributes:
        number: index of the launch within its pool.
        machines: number of machines.
        price: dollars per hour for all machines; None if unknown.
        beside: approximate additional cost of disks and public addresses, in dollars per hour.
        started: start in seconds since 1970.
        bound: latest time at which they end themselves, in seconds since 1970.
        ended: time of release; None while unknown.
        exact: True if `ended` is exact to the minute.
    """

    job: str
    number: int
    pool: str
    machine: str
    machines: int
    price: float | None
    beside: float
    started: float
    bound: float
    ended: float | None = None
    exact: bool = True
    part: int = 0
    """Distinguishes machines of a launch that ended before the others."""

    def seconds(self, now: float) -> float:
        """Return the maximum time that the machines have existed, in seconds."""
        return max(0.0, (min(now, self.bound) if self.ended is None else self.ended) - self.started)

    def may_run(self, now: float) -> bool:
        """Return True if the machines may still exist."""
        return self.ended is None and now < self.bound


def rent(
    offer: MachineOffer,
    count: int,
    settings: CloudSettings,
    label: Label,
    number: int,
    disks: float,
) -> Rent:
    """Return the rent of machines that run from now on.

    Args:
        disks: dollars per hour for their disks: GB times `DISK_PRICE`.
    """
    # machines with several network cards use one address, the head's
    addresses = 0 if settings.use_private_ips else count if offer.cards == 1 else 1
    price = None if offer.price is None else offer.price * count
    return Rent(
        label.job,
        number,
        label.pool,
        offer.instance_type,
        count,
        price,
        disks + addresses * ADDRESS_PRICE,
        time.time(),
        label.ends,
    )


def last_launch(job: str) -> int:
    """Return the highest launch number of a pool; 0 without launches."""
    return max((entry.number for entry in all_rents() if entry.job == job), default=0)


def write(rent: Rent) -> None:
    """Store a rent. Does nothing if the home folder is not writable."""
    atomic.keep(_path(rent), json.dumps(asdict(rent)).encode())


def _path(rent: Rent) -> Path:
    return (
        atomic.state_folder("costs")
        / f"{rent.job}-{rent.number}{f'.{rent.part}' if rent.part else ''}.json"
    )


def mark_lost(job: str, count: int) -> None:
    """Record that some machines of a pool have ended while the others continue.

    Counts them against the pool's oldest launches, because all have the same price.
    """
    now = time.time()
    for entry in all_rents():
        if entry.job != job or entry.ended is not None or not count:
            continue
        ended = min(count, entry.machines)
        parts = [
            other.part for other in all_rents() if (other.job, other.number) == (job, entry.number)
        ]
        if ended == entry.machines:
            write(replace(entry, ended=now))
        else:
            write(replace(_split_off(entry, ended), ended=now, part=1 + max(parts)))
            write(_split_off(entry, entry.machines - ended))
        count -= ended


def _split_off(rent: Rent, machines: int) -> Rent:
    part = machines / rent.machines
    price = None if rent.price is None else rent.price * part
    return replace(rent, machines=machines, price=price, beside=rent.beside * part)


def end(job: str, *, exact: bool = True) -> None:
    """Record that a pool's machines were released now, or were found to be gone. Twice is safe."""
    now = time.time()
    for entry in all_rents():
        if entry.job == job and entry.ended is None:
            write(replace(entry, ended=min(now, entry.bound), exact=exact))


def all_rents() -> list[Rent]:
    """Return all stored rents, the oldest first. Deletes those that ended long ago."""
    rents = sorted(_read(), key=lambda rent: rent.started)
    old = {
        entry
        for entry in rents
        if entry.seconds(time.time()) + entry.started < time.time() - RETENTION
    }
    for entry in old:
        with contextlib.suppress(OSError):
            _path(entry).unlink(missing_ok=True)
    return [entry for entry in rents if entry not in old]


def _read() -> Iterator[Rent]:
    with contextlib.suppress(OSError):
        for path in atomic.state_folder("costs").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield Rent(**json.loads(path.read_text("utf-8")))
