"""List and remove files of skymagic on the disks of hosts, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skymagic.bootstrap.running import (
    Disk,
    DiskItem,
    clean_script,
    disk_script,
    parse_clean,
    parse_disk,
    removable,
)
from skymagic.display.text import table
from skymagic.errors import PoolError
from skymagic.plan.units import count, rough_duration, size
from skymagic.providers.host_pools import ask

KINDS = {
    "env": "environment",
    "code": "skymagic's code",
    "cache": "cache",
    "python": "interpreters",
}
"""Maps the kind of an item to its display name."""
Disks = tuple[dict[str, Disk], dict[str, str]]
"""Tuple of (host → its disk, host → reason why it could not be read)."""


def read_disks(hosts: Sequence[str]) -> Disks:
    """Read the disks of hosts.

    Raises:
        RequestError: a host name is invalid.
        PoolError: no host could be reached; the message gives the reasons.
    """
    disks, unreached = ask(hosts, lambda _: disk_script(), parse_disk)
    if not disks:
        raise PoolError(
            "; ".join(f"{host}: {reason}" for host, reason in unreached.items()),
            code="unreached",
            names=unreached,
        )
    return disks, unreached


def text(disks: Disks) -> str:
    """Return the items on each host as text."""
    blocks = [_disk_text(host, disk) for host, disk in disks[0].items()]
    return "\n\n".join([*blocks, *(f"{host}: {reason}" for host, reason in disks[1].items())])


def _disk_text(host: str, disk: Disk) -> str:
    total = sum(item.nbytes for item in disk.items)
    heading = f"{host}: {size(total)} in {disk.folder}, {size(disk.free)} free"
    if not disk.items:
        return f"{host}: nothing in {disk.folder}"
    rows = [_row(disk, item) for item in sorted(disk.items, key=lambda item: -item.nbytes)]
    unused = removable(disk, include_all=False)
    lines = [heading, table([("what", "size", "last used", "", ""), *rows])]
    if unused:
        lines.append(
            f"not used for 30 days: {size(sum(item.nbytes for item in unused))}; to remove "
            f"it: skymagic down --clean --hosts {host}"
        )
    return "\n".join(lines)


def _row(disk: Disk, item: DiskItem) -> tuple[object, ...]:
    users = disk.users(item)
    state = f"in use by {', '.join(users)}" if users else "" if item.ready else "not ready"
    when = (
        f"{rough_duration(disk.running.clock - item.used)} ago"
        if item.kind in ("env", "code")
        else ""
    )
    return KINDS[item.kind], size(item.nbytes), when, item.contents, state


def clean(hosts: Sequence[str], every: bool, dry_run: bool) -> tuple[list[str], dict[str, str]]:
    """Remove files that no pool has used for 30 days, or all that are not in use now.

    Returns:
        (lines that say what was removed on each host, host → reason why files remain).

    Raises:
        RequestError: a host name is invalid.
        PoolError: no host could be reached; the message gives the reasons.
    """
    disks, problems = read_disks(hosts)
    items_by_host = {host: removable(disk, every) for host, disk in disks.items()}
    if dry_run:
        return [
            f"{host}: {_summary(items)} would be removed" for host, items in items_by_host.items()
        ], problems
    removed, failed = ask(
        items_by_host, lambda host: clean_script(items_by_host[host]), parse_clean
    )
    lines = []
    for host, deleted in removed.items():
        lines.append(
            f"{host}: "
            f"{_summary([item for item in items_by_host[host] if item.path in deleted])} removed"
        )
        if remaining := [item for item in items_by_host[host] if item.path not in deleted]:
            problems[host] = f"{_summary(remaining)} could not be removed"
    return lines, problems | failed


def _summary(items: Sequence[DiskItem]) -> str:
    """Return "2 environments, values (5.1 GB)", or "nothing"."""
    kinds = [item.kind for item in items]
    envs = kinds.count("env")
    nouns = [count(envs, "environment")] if envs else []
    nouns += [KINDS[kind] for kind in KINDS if kind in kinds and kind != "env"]
    return (
        f"{', '.join(nouns)} ({size(sum(item.nbytes for item in items))})" if items else "nothing"
    )


def plain(disks: Disks) -> dict[str, object]:
    """Return the items as plain values for programs; the fields are stable across versions."""
    return {
        "hosts": {
            host: {
                "folder": disk.folder,
                "free": disk.free,
                "items": [{**asdict(item), "pools": disk.users(item)} for item in disk.items],
            }
            for host, disk in disks[0].items()
        },
        "unreached": disks[1],
    }
