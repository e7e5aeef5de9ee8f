"""What skymagic keeps on the disks of hosts, and its removal: as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skymagic.api.places import roughly
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
from skymagic.plan.units import count, size
from skymagic.providers.found import ask

KINDS = {
    "env": "environment",
    "code": "skymagic's code",
    "cache": "cache",
    "python": "interpreters",
}
"""Kind of an item → how it is called."""
Disks = tuple[dict[str, Disk], dict[str, str]]
"""(host → what is there, host → why it could not be asked)."""


def look(hosts: Sequence[str]) -> Disks:
    """What is on hosts.

    Raises:
        RequestError: a host's name is none.
        PoolError: no host could be asked; says why.
    """
    disks, unreached = ask(hosts, lambda _: disk_script(), parse_disk)
    if not disks:
        raise PoolError("; ".join(f"{host}: {reason}" for host, reason in unreached.items()))
    return disks, unreached


def text(disks: Disks) -> str:
    """What is there, for people."""
    blocks = [_disk_text(host, disk) for host, disk in disks[0].items()]
    return "\n\n".join([*blocks, *(f"{host}: {reason}" for host, reason in disks[1].items())])


def _disk_text(host: str, disk: Disk) -> str:
    whole = sum(item.nbytes for item in disk.items)
    heading = f"{host}: {size(whole)} in {disk.folder}, {size(disk.free)} free"
    if not disk.items:
        return f"{host}: nothing in {disk.folder}"
    rows = [_row(disk, item) for item in sorted(disk.items, key=lambda one: -one.nbytes)]
    unused = removable(disk, every=False)
    lines = [heading, table([("what", "size", "last used", "", ""), *rows])]
    if unused:
        lines.append(
            f"not used for 30 days: {size(sum(item.nbytes for item in unused))}; to remove it: skymagic down --clean --hosts {host}"
        )
    return "\n".join(lines)


def _row(disk: Disk, item: DiskItem) -> tuple[object, ...]:
    users = disk.users(item)
    state = f"in use by {', '.join(users)}" if users else "" if item.ready else "not ready"
    when = f"{roughly(disk.running.clock - item.used)} ago" if item.kind in ("env", "code") else ""
    return KINDS[item.kind], size(item.nbytes), when, item.contents, state


def clean(hosts: Sequence[str], every: bool, dry_run: bool) -> tuple[list[str], dict[str, str]]:
    """Remove what no pool has used for 30 days, or all that none uses now.

    Returns:
        (what was removed on each host, in lines; host → why something is left there).

    Raises:
        RequestError: a host's name is none.
        PoolError: no host could be asked; says why.
    """
    disks, problems = look(hosts)
    chosen = {host: removable(disk, every) for host, disk in disks.items()}
    if dry_run:
        return [
            f"{host}: {_words(items)} would be removed" for host, items in chosen.items()
        ], problems
    gone, failed = ask(chosen, lambda host: clean_script(chosen[host]), parse_clean)
    lines = []
    for host, places in gone.items():
        lines.append(
            f"{host}: {_words([item for item in chosen[host] if item.place in places])} removed"
        )
        if left := [item for item in chosen[host] if item.place not in places]:
            problems[host] = f"{_words(left)} could not be removed"
    return lines, problems | failed


def _words(items: Sequence[DiskItem]) -> str:
    """ "2 environments, values (5.1 GB)"; "nothing"."""
    kinds = [item.kind for item in items]
    envs = kinds.count("env")
    named = [count(envs, "environment")] if envs else []
    named += [KINDS[kind] for kind in KINDS if kind in kinds and kind != "env"]
    return (
        f"{', '.join(named)} ({size(sum(item.nbytes for item in items))})" if items else "nothing"
    )


def plain(disks: Disks) -> dict[str, Any]:
    """What is there, for programs; the fields stay as they are from version to version."""
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
