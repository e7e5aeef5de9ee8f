"""Debug logs of skymagic's own processes, collected from all nodes of a pool.

Used by ``%sky_logs --debug`` and ``skymagic logs --debug``. The entries of all processes are merged
by time, as far as the clocks of the machines agree (``%sky_check`` measures that).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from skymagic.api.logs import LogsRequest, grep_pattern
from skymagic.cluster import Node
from skymagic.errors import PoolError, RequestError, collect_mistakes
from skymagic.pool import debugging, keys, launch, records, registry
from skymagic.wire import debug_entries, processes
from skymagic.wire.codec import Transport
from skymagic.wire.debug_entries import Entries, Entry, ReadEntries
from skymagic.wire.debug_log import OLDER
from skymagic.wire.threads import run_all
from skymagic.wire.untrusted import sanitized

TIMEOUT = 60.0
"""Seconds for the replies of all nodes."""
NOTHING = (
    "no debug log of this pool was found: %config SkyMagic.log_level = 'DEBUG' writes one from now "
    "on, SKYMAGIC_LOG=DEBUG in the environment from the start"
)


def from_notebook(request: LogsRequest) -> list[str]:
    """Return the requested last entries of a pool of this notebook, oldest first.

    Raises:
        RequestError: all mistakes of the request.
        PoolError: the pool does not exist.
    """
    check(request)
    if request.pool and not registry.is_registered(request.pool):
        return from_outside(request)
    pool = registry.pool_named(request.pool, ended=True)
    nodes = pool.agents.nodes if pool.resources.has_agents else ()
    return _lines(request, pool.name, pool.job_id, nodes, here=not pool.plan.remote)


def from_outside(request: LogsRequest) -> list[str]:
    """Return the requested last entries of a pool that another notebook of this user has started.

    That notebook may have died. Raises as `from_notebook` does.
    """
    check(request)
    name = request.pool or ""
    record = records.latest(name)
    if record is None:
        log = records.kept_log(name)
        if log is None:
            raise PoolError(f"no pool {name!r} was started from here", code="no-pool", names=[name])
        return _lines(request, log.name, log.job_id, (), here=False)
    if record.provider == "local":
        return _lines(request, record.name, record.job_id, (), here=True)
    with launch.machines(keys.attachable(record.job_id)) as nodes:
        return _lines(request, record.name, record.job_id, nodes, here=False)


def plain(lines: Sequence[str]) -> dict[str, object]:
    """Return entries as plain values, for programs."""
    return {"entries": list(lines)}


def check(request: LogsRequest) -> None:
    """Raise RequestError with all mistakes of a request for debug logs."""
    mistakes = [
        f"--debug shows all processes of the pool: leave {option} out"
        for option, is_given in (
            ("-t", request.rank is not None),
            ("--run", request.run is not None),
            ("--cell", request.cell is not None),
            ("--follow", request.follow),
        )
        if is_given
    ]
    with collect_mistakes(mistakes):
        grep_pattern(request.grep)
    if mistakes:
        raise RequestError(mistakes)


def _lines(
    request: LogsRequest, name: str, job_id: str, nodes: Sequence[Node], *, here: bool
) -> list[str]:
    """Return the last entries as text, after a line for each node that could not be read."""
    pattern = request.grep or ""
    sources = [_of_pool(path, name) for path in _notebook_files(job_id)]
    problems: list[str] = []
    if here:
        sources += debug_entries.node_entries(job_id, 0)
    else:
        for node, reply in zip(nodes, _ask(nodes, job_id, request.lines, pattern), strict=True):
            if isinstance(reply, Entries):
                sources.append(map(Entry, reply.texts, reply.processes))
            else:
                first = (str(reply).splitlines() or [""])[0] or type(reply).__name__
                problems.append(f"[node {node.index}] its debug logs could not be read: {first}")
    entries = debug_entries.last(sources, request.lines, pattern)
    lines = [*problems, *map(str, entries)]
    return [sanitized(line) for line in lines or [NOTHING]]


def _notebook_files(job_id: str) -> list[Path]:
    """List the files of this machine's notebooks and commands that mention a pool."""
    mark = f"job={job_id}".encode()
    paths = []
    for path in debugging.folder().glob("*.log"):
        older = path.with_name(f"{path.name}{OLDER}")
        if any(mark in part.read_bytes() for part in (path, older) if part.exists()):
            paths.append(path)
    return paths


def _of_pool(path: Path, name: str) -> Iterator[Entry]:
    """Yield a notebook's entries, without those of its other pools."""
    process = path.name.partition("-")[0]
    for entry in debug_entries.read(path, process):
        pool = re.search(r" pool=(\S+)", entry.text)
        if pool is None or pool[1] == name:
            yield entry


def _ask(
    nodes: Sequence[Node], job_id: str, count: int, pattern: str
) -> list[Entries | BaseException]:
    """Ask all nodes at once for their last entries."""
    opened: list[Transport] = []
    try:
        return run_all(
            [
                partial(_ask_node, node, ReadEntries(job_id, node.index, count, pattern), opened)
                for node in nodes
            ],
            timeout=TIMEOUT,
        )
    finally:
        # also of nodes that have not answered: their threads are blocked in a read
        run_all([transport.close for transport in opened], timeout=TIMEOUT)


def _ask_node(node: Node, request: ReadEntries, opened: list[Transport]) -> Entries:
    transport = node.run(processes.DEBUG_ENTRIES)
    opened.append(transport)
    transport.write(debug_entries.encode(request))
    try:
        reply, _ = next(debug_entries.messages(transport.read, noise=True))
    except EOFError:
        raise OSError(transport.complaint() or "its reader ended without a reply") from None
    assert isinstance(reply, Entries)
    return reply
