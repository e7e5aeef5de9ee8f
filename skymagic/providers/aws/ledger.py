"""What has been rented and what it cost: a file for each launch, kept over restarts of notebooks until a month after its end."""

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

KEPT_SECONDS = 31 * 86400.0
DISK_PRICE = (
    0.08 / 730
)  # dollars per GB and hour of a gp3 disk, about: 0.08 a month in us-east-1 (2026-11)
ADDRESS_PRICE = 0.005
"""Dollars per hour of a public address."""


@dataclass(frozen=True)
class Rent:
    """The machines of one launch.

    Attributes:
        number: of the launch among those of its pool. machines: how many.
        price: dollars per hour of all machines; None where nobody tells it. beside: of their disks and public addresses, about.
        started: seconds since 1970. bound: when they end by themselves at the latest.
        ended: when they were given back; None while that is not known.
        exact: whether that is known to the minute.
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
    """Counts those of a launch that ended before the others."""

    def seconds(self, now: float) -> float:
        """How long they have been there, at most."""
        return max(0.0, (min(now, self.bound) if self.ended is None else self.ended) - self.started)

    def runs(self, now: float) -> bool:
        """Whether they may be there still."""
        return self.ended is None and now < self.bound


def rent(
    offer: MachineOffer,
    count: int,
    settings: CloudSettings,
    label: Label,
    number: int,
    disks: float,
) -> Rent:
    """What machines cost that run from now on.

    Args:
        disks: dollars per hour of their disks: GB times `DISK_PRICE`.
    """
    # those with several network cards take one address, the head's
    addresses = 0 if settings.use_private_ips else count if offer.cards == 1 else 1
    price = None if offer.price is None else offer.price * count
    return Rent(
        label.job, number, label.pool, offer.instance_type, count, price, disks + addresses * ADDRESS_PRICE, time.time(),
        label.ends,
    )  # fmt: skip


def launches(job: str) -> int:
    """The highest number among the launches of a pool; 0 without any."""
    return max((one.number for one in every() if one.job == job), default=0)


def write(one: Rent) -> None:
    """Keep it; a home that cannot be written keeps none."""
    atomic.keep(_path(one), json.dumps(asdict(one)).encode())


def _path(one: Rent) -> Path:
    return (
        atomic.state_folder("costs")
        / f"{one.job}-{one.number}{f'.{one.part}' if one.part else ''}.json"
    )


def lose(job: str, count: int) -> None:
    """So many machines of a pool have ended, and the others go on: of its oldest launches, for they all are of one price."""
    now = time.time()
    for one in every():
        if one.job != job or one.ended is not None or not count:
            continue
        gone, parts = (
            min(count, one.machines),
            [each.part for each in every() if (each.job, each.number) == (job, one.number)],
        )
        if gone == one.machines:
            write(replace(one, ended=now))
        else:
            write(replace(_share(one, gone), ended=now, part=1 + max(parts)))
            write(_share(one, one.machines - gone))
        count -= gone


def _share(one: Rent, machines: int) -> Rent:
    part = machines / one.machines
    price = None if one.price is None else one.price * part
    return replace(one, machines=machines, price=price, beside=one.beside * part)


def end(job: str, *, exact: bool = True) -> None:
    """The machines of a pool were given back now, or were found to be gone; twice is safe."""
    now = time.time()
    for one in every():
        if one.job == job and one.ended is None:
            write(replace(one, ended=min(now, one.bound), exact=exact))


def every() -> list[Rent]:
    """All that are kept, the oldest first; those that ended long ago are removed."""
    found = sorted(_read(), key=lambda one: one.started)
    old = {
        one for one in found if one.seconds(time.time()) + one.started < time.time() - KEPT_SECONDS
    }
    for one in old:
        with contextlib.suppress(OSError):
            _path(one).unlink(missing_ok=True)
    return [one for one in found if one not in old]


def _read() -> Iterator[Rent]:
    with contextlib.suppress(OSError):
        for path in atomic.state_folder("costs").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield Rent(**json.loads(path.read_text("utf-8")))
