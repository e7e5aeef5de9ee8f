"""What of the user's pools runs on hosts of theirs, and its end, from any machine that may log in there: as text and as plain values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from skymagic.display.text import table
from skymagic.errors import PoolError, RequestError
from skymagic.plan.units import count, duration_text, rank_words
from skymagic.pool import records
from skymagic.providers.found import Found, FoundNode, FoundPool, chosen, end, find


def look(hosts: Sequence[str], name: str | None = None) -> Found:
    """What runs there, of all pools or those of a name; on this machine where no hosts are named.

    Raises:
        RequestError: a host's name is none.
        PoolError: no host could be asked; says why.
    """
    found = find(hosts)
    if not found.reached:
        raise PoolError("; ".join(f"{host}: {reason}" for host, reason in found.unreached.items()))
    records.forget(found.reached, [one.job_id for one in found.pools])
    return replace(found, pools=tuple(one for one in found.pools if name in (None, one.name, one.job_id)))


def stop(hosts: Sequence[str], name: str | None, every: bool, own: Collection[str] = ()) -> list[str]:
    """End pools there; on this machine where no hosts are named.

    Args:
        name: a pool's name or job id; None for the only one.
        every: all of them.
        own: job ids of pools of this process, which end in another way.

    Returns:
        What was done, in lines.

    Raises:
        RequestError: it is not clear which pool is meant, or it is this process's own.
        PoolError: something is left; names it.
    """
    found = find(hosts)
    pools = chosen(found, name, every)
    if mine := [one.name for one in pools if one.job_id in own]:
        raise RequestError(f"{', '.join(mine)}: of this notebook; %sky_down {mine[0]} ends it")
    left = {**found.unreached, **end(pools, here=found.here)}
    lines = [_ended(pool, left) for pool in pools]
    records.forget(set(found.reached) - set(left), {one.job_id for one in found.pools} - {one.job_id for one in pools})
    if left:
        raise PoolError("; ".join([*lines, *(f"{host}: {reason}" for host, reason in left.items())]))
    return lines


def _ended(pool: FoundPool, left: Collection[str]) -> str:
    hosts = [one.host for one in pool.nodes if one.host not in left]
    text = f"pool {pool.name!r} ({pool.job_id}) was ended on {', '.join(hosts) or 'no host'}"
    if pool.elsewhere:
        text += f"; {count(pool.elsewhere, 'node')} of it {'is' if pool.elsewhere == 1 else 'are'} on hosts that were not named"
    return text


def status_text(found: Found, own: Collection[str] = ()) -> str:
    """What was found, for people."""
    blocks = [_pool_text(pool, pool.job_id in own, found.here) for pool in found.pools]
    blocks = blocks or [f"no pool of yours runs {'here that outlives its notebook' if found.here else 'there'}"]
    for host, number in found.unread.items():
        blocks.append(f"{host}: {count(number, 'agent')} of another version of skymagic, whose record cannot be read")
    blocks += [f"{host}: {reason}" for host, reason in found.unreached.items()]
    return "\n\n".join(blocks)


def _pool_text(pool: FoundPool, own: bool, here: bool) -> str:
    first = pool.nodes[0]
    whose = "of this notebook" if own else f"started by {first.record.client or 'somebody'}"
    age = roughly(first.clock - min(node.record.started for node in pool.nodes))
    rows = [("host", "node", "ranks", "GPUs", "state"), *map(_row, pool.nodes)]
    lines = [f"pool {pool.name!r} ({pool.job_id}), {whose} {age} ago", table(rows)]
    if pool.elsewhere:
        lines.append(f"{count(pool.elsewhere, 'node')} more on hosts that were not named")
    if not own:
        hosts = ",".join(dict.fromkeys(node.host for node in pool.nodes))
        lines.append(f"to end it: %sky_down {pool.name}" + ("" if here else f" --hosts {hosts}"))
    return "\n".join(lines)


def _row(node: FoundNode) -> tuple[object, ...]:
    record = node.record
    ranks = sorted(map(int, record.ranks))
    devices = _numbers(record.devices, "GPU")
    return node.host, record.node, _numbers(ranks, "rank"), devices, state(node)


def _numbers(numbers: Sequence[int], noun: str) -> str:
    return rank_words(numbers, noun).partition(" ")[2] if numbers else "-"


def state(node: FoundNode) -> str:
    """What a node does, and when it ends by itself: "idle for 12m; its notebook is away for 1h; ends in 18m"."""
    record, now = node.record, node.clock
    busy = f"a cell runs for {roughly(now - record.busy_since)}" if record.busy_since else ""
    words = [busy or f"idle for {roughly(now - (record.idle_since or record.started))}"]
    if record.away_since:
        words.append(f"its notebook is away for {roughly(now - record.away_since)}")
    ends = _ends(node)
    if ends is not None:
        words.append(f"ends in {roughly(ends - now)}")
    return "; ".join(words)


def _ends(node: FoundNode) -> float | None:
    """When it ends by itself if nothing else happens, by the node's clock."""
    record = node.record
    limits = [record.started + record.max_lifetime] if record.max_lifetime is not None else []
    if not record.busy_since and record.idle_timeout is not None:
        limits.append(record.idle_since + record.idle_timeout)
    if not record.busy_since and record.away_since and record.detached_timeout is not None:
        limits.append(max(record.idle_since, record.away_since) + record.detached_timeout)
    return min(limits, default=None)


def roughly(seconds: float) -> str:
    """A duration to two units: 2h10m, 4m10s, 0s."""
    whole = max(0, round(seconds))
    for unit, fine in ((86400, 3600), (3600, 60)):
        if whole >= unit:
            return duration_text(whole // fine * fine)
    return duration_text(whole) if whole else "0s"


def plain(found: Found) -> dict[str, Any]:
    """What was found, for programs; the fields stay as they are from version to version. Times are seconds since 1970."""
    return {
        "pools": [
            {
                "name": pool.name,
                "job_id": pool.job_id,
                "client": pool.nodes[0].record.client,
                "version": pool.nodes[0].record.version,
                "started": pool.nodes[0].record.started,
                "nodes_elsewhere": pool.elsewhere,
                "nodes": [_plain_node(node) for node in pool.nodes],
            }
            for pool in found.pools
        ],
        "unreached": found.unreached,
        "unreadable": found.unread,
    }


def _plain_node(node: FoundNode) -> dict[str, Any]:
    record = node.record
    return {
        "host": node.host,
        "node": record.node,
        "ranks": record.ranks,
        "devices": list(record.devices),
        "busy_since": record.busy_since or None,
        "idle_since": record.idle_since or None,
        "away_since": record.away_since or None,
        "ends": _ends(node),
        "clock": node.clock,
    }
