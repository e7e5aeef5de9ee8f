"""What ranks wrote, of a pool that runs or of one that has ended: ``%sky_logs`` and ``skymagic logs``."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skymagic.api import notebooks
from skymagic.cluster import Agents, Node, telemetry
from skymagic.display.status import Logs
from skymagic.display.text import last_state, log_lines
from skymagic.errors import PoolError, ProvisionError, RequestError, noted_in
from skymagic.plan.requests import Defaults
from skymagic.plan.units import Selection, rank_words
from skymagic.pool import Pool, keys, making, records, registry, resources
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.pool.status import SharedStatus
from skymagic.wire import processes
from skymagic.wire.agent import WHOLE_LOG
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all
from skymagic.wire.untrusted import sanitized

HEADING = re.compile(r"── cell (?P<cell>\d+), (?:run (?P<run>\d+), )?[\d:]{8} ──")
"""What stands in a log above the first line of each run (`kernels.agent.output`)."""
JOB_WORDS = {
    "none": "has left no log there",
    "running": "is running",
    "done": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "lost": "could not continue",
}
Write = Callable[[str], object]
READ_TIMEOUT = 30.0
"""Seconds in which the agents of a pool must say how their ranks are."""


@dataclass(frozen=True)
class LogsRequest:
    """What is asked for: whose log (None: every rank's), how many of its last lines, whether to go on as it grows.

    Attributes:
        run: the number of one run; cell: of a notebook's cell, which may have had several.
        grep: a regular expression that lines must have.
        output: the variable that keeps them.
        coming: whether the cell, of which the log has nothing yet, is on its way to the ranks.
    """

    rank: Selection | None = None
    lines: int = 50
    follow: bool = False
    pool: str | None = None
    run: int | None = None
    cell: int | None = None
    grep: str | None = None
    output: str | None = None
    coming: Callable[[], bool] = lambda: False


class LogReader:
    """Reads the logs of a pool that a notebook has, over connections of its own, and changes nothing.

    Args:
        key: what leads to the pool's nodes.
        nodes: its machines; what owns them is not closed, because that ends rented ones.

    Raises:
        PoolError: a node cannot be reached.
    """

    def __init__(self, key: PoolKey, nodes: Sequence[Node]) -> None:
        self.world_size = key.plan.topology.world_size
        self._transports: list[Transport] = []
        readable = [
            replace(node, address=address, hostname=hostname, start_agent=partial(self._open, node))
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731  # what only the notebook hears
        self.agents = Agents(readable, nothing, nothing, nothing, nothing, nothing, nothing)
        status = SharedStatus(key.name, key.plan, Defaults(), key.job_id)
        try:
            self.agents.read(resources.rank_specs(status, readable, key.port), READ_TIMEOUT)
        except BaseException as problem:
            self.close()
            if isinstance(problem, ProvisionError):
                raise PoolError(f"pool {key.name!r} cannot be read: {problem}") from problem
            raise

    def _open(self, node: Node, _: Callable[[str], None]) -> Transport:
        """Connect to the agent's socket for readers."""
        transport = node.run(processes.ATTACH, processes.READERS_ONLY, node.access.daemon)
        self._transports.append(transport)
        return transport

    def close(self) -> None:
        """Close the connections; twice is safe."""
        self.agents.leave()
        run_all([transport.close for transport in self._transports])


def open_reader(name: str) -> LogReader:
    """Connect to the agents of a pool by its name or job id; the caller closes it. Raises PoolError."""
    key = keys.attachable(records.named(name).job_id)
    _, nodes = making.attaching_provider(key).attach(key.plan, key.accesses)
    return LogReader(key, nodes)


Readable = Pool | LogReader
"""A pool whose nodes tell logs."""


@dataclass(frozen=True)
class Chosen:
    """What a request means in a pool.

    Attributes:
        runs: their numbers; None where no run was asked for.
    """

    ranks: tuple[int, ...]
    runs: tuple[int, ...] | None
    pattern: re.Pattern[str]

    def label(self, rank: int) -> str:
        """What stands before the lines of a rank."""
        return f"[{rank}] " if len(self.ranks) > 1 else ""

    def matching(self, lines: Sequence[str]) -> list[str]:
        """The lines that are asked for; a bar that was redrawn counts as it stood last."""
        return [line for line in lines if self.pattern.search(last_state(line))]


def show(request: LogsRequest, write: Write) -> None:
    """Write what is asked for; of a pool that runs, with `follow` until the stop button, or the end of the run.

    Raises:
        RequestError: there are no such ranks, no such runs, or it is no regular expression; says all of it, and nothing was read.
        PoolError: there is no such pool, and no log of one.
    """
    kept = registry.last_lines(request.pool)
    if kept is not None:
        name, texts = kept
        _ended(texts, request, write)
        write(
            f"[pool {name!r} has ended; the last lines of each rank are kept while the notebook runs]\n"
        )
        return
    if (record := job_record(request)) is not None:
        show_job(record, request, write)
        return
    found = _ended_elsewhere(request)
    if found is None:
        live(registry.pool_named(request.pool), request, write)
        return
    _ended({0: found.text}, request, write)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.ended))
    write(
        f"[pool {found.name!r} ({found.job_id}) has ended at {when}; what rank 0 wrote last is kept here]\n"
    )


def show_from_outside(request: LogsRequest, write: Write) -> str:
    """The same of a pool that notebooks of this machine have, read over connections of its own; returns the status of the notebook job
    whose log it is, or "". Raises as `show` does."""
    if (record := job_record(request)) is not None:
        return show_job(record, request, write)
    with _outside(request) as (texts, pool):
        if pool is not None:
            live(pool, request, write)
        else:
            _ended(texts, request, write)
    return ""


def plain(request: LogsRequest) -> dict[str, Any]:
    """What is asked for, for programs: the pool, whether it has ended, and by rank its lines; or those of its notebook job. Raises as
    `show` does."""
    if (record := job_record(request)) is not None:
        lines: list[str] = []
        status = show_job(record, request, lines.append)
        text = "".join(lines[:-1])  # the last one tells people how it has ended
        return {
            "pool": request.pool,
            "notebook": record.notebook,
            "status": status,
            "lines": text.splitlines(),
        }
    with _outside(request) as (texts, pool):
        found = _collected(pool, texts, request)
    return {
        "pool": request.pool,
        "ended": pool is None,
        "ranks": {str(rank): list(found.lines[rank]) for rank in found},
    }


def collected(request: LogsRequest) -> Logs:
    """What is asked for, as an object. Raises as `show` does."""
    kept = registry.last_lines(request.pool)
    found = _ended_elsewhere(request)
    texts = kept[1] if kept else {0: found.text} if found else {}
    return _collected(None if texts else registry.pool_named(request.pool), texts, request)


def _ended_elsewhere(request: LogsRequest) -> records.KeptLog | None:
    """What is kept of a pool that has ended, and this process does not know."""
    return (
        records.kept_log(request.pool)
        if request.pool and not registry.known(request.pool)
        else None
    )


def _collected(pool: Readable | None, texts: Mapping[int, str], request: LogsRequest) -> Logs:
    if pool is not None:
        chosen = _chosen_of(pool, request)
        lines = {rank: _last(pool.agents, rank, chosen, request.lines)[0] for rank in chosen.ranks}
    else:
        lines = _lines_of(texts, request)[1]
    return Logs(
        {rank: [sanitized(last_state(line)) for line in found] for rank, found in lines.items()}
    )


@contextlib.contextmanager
def _outside(request: LogsRequest) -> Iterator[tuple[Mapping[int, str], LogReader | None]]:
    """(by rank what is kept of a pool that has ended, what reads one that runs)."""
    name = request.pool or ""
    kept = records.kept_log(name)
    if kept is not None and not any(name in (one.name, one.job_id) for one in records.every()):
        yield {0: kept.text}, None
        return
    with contextlib.closing(open_reader(name)) as pool:
        yield {}, pool


# -- of a pool that runs ---------------------------------------------------------------------------------------------


def live(pool: Readable, request: LogsRequest, write: Write) -> None:
    """Log lines of a pool that runs. Raises as `show` does."""
    if not request.follow:
        _show_last(pool, _chosen_of(pool, request), request, write)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the stop button
        chosen = _awaited(pool, request)
        ends = _show_last(pool, chosen, request, write)
        follow = _follow if chosen.runs is None else _follow_run
        follow(pool.agents, chosen, ends, write)


def _show_last(
    pool: Readable, chosen: Chosen, request: LogsRequest, write: Write
) -> dict[int, int]:
    """Write the last lines that are asked for; where they end, in bytes, by rank."""
    ends = {}
    for rank in chosen.ranks:
        lines, ends[rank] = _last(pool.agents, rank, chosen, request.lines)
        write(_labelled(lines, chosen.label(rank)))
    return ends


def _chosen_of(pool: Readable, request: LogsRequest) -> Chosen:
    """What is asked for of this pool. Raises RequestError with all mistakes."""
    return _chosen(
        request, range(pool.world_size), lambda ranks: telemetry.runs(pool.agents, ranks)
    )


def _awaited(pool: Readable, request: LogsRequest) -> Chosen:
    """What is asked for of this pool, once a cell that is on its way to the ranks has begun."""
    ranks = _chosen_of(pool, replace(request, run=None, cell=None)).ranks
    while True:
        coming = request.coming()
        end = telemetry.last(pool.agents, ranks[0], 1)[1]
        try:
            return _chosen_of(pool, request)
        except RequestError:
            if not coming:
                raise
        telemetry.since(pool.agents, ranks[0], end, 1.0)


def _last(agents: Agents, rank: int, chosen: Chosen, lines: int) -> tuple[list[str], int]:
    """The last lines of a rank; where they end, in bytes."""
    if chosen.runs is None and not chosen.pattern.pattern:
        text, end = telemetry.last(agents, rank, lines)
        return (text.removesuffix("\n").split("\n") if text else []), end
    kept, end = deque[str](maxlen=lines), 0
    for run in chosen.runs or (WHOLE_LOG,):
        rest = ""
        for piece in telemetry.pieces(agents, rank, run):
            *whole, rest = (rest + piece["text"]).split("\n")
            kept.extend(chosen.matching(whole))
            end = piece["end"]
        kept.extend(chosen.matching([rest] if rest else []))
    return list(kept), end


def _follow(agents: Agents, chosen: Chosen, ends: dict[int, int], write: Write) -> None:
    while True:
        for rank in chosen.ranks:
            text, ends[rank] = telemetry.since(agents, rank, ends[rank], 1.0 / len(chosen.ranks))
            write(_labelled(chosen.matching(text.split("\n")[:-1]), chosen.label(rank)))


def _follow_run(agents: Agents, chosen: Chosen, ends: dict[int, int], write: Write) -> None:
    """Go on with the last of these runs, until it is over on all ranks."""
    assert chosen.runs
    rests = dict.fromkeys(chosen.ranks, "")
    while rests:
        for rank in list(rests):
            over, before = False, ends[rank]
            for piece in telemetry.pieces(agents, rank, chosen.runs[-1], before or None):
                *whole, rests[rank] = (rests[rank] + piece["text"]).split("\n")
                ends[rank], over = piece["end"], piece["over"]
                write(_labelled(chosen.matching(whole), chosen.label(rank)))
            if over:
                rest = rests.pop(rank)
                write(_labelled(chosen.matching([rest] if rest else []), chosen.label(rank)))
            elif ends[rank] == before:  # its log tells when there is more
                telemetry.since(agents, rank, ends[rank], 1.0 / len(rests))


def _labelled(lines: Sequence[str], label: str) -> str:
    """Lines of a log as text that is safe to print: a log is read in a terminal as well, and holds what any program there wrote."""
    return sanitized("".join(log_lines(f"{line}\n", label) for line in lines))


# -- of a notebook job -----------------------------------------------------------------------------------------------


def job_record(request: LogsRequest) -> PoolRecord | None:
    """Return the record of a pool that a notebook job has, or had last, if its log is what is asked for; else None."""
    of_ranks = request.rank is not None or request.run is not None or request.cell is not None
    if request.pool is None or of_ranks or registry.known(request.pool):
        return None
    found = [one for one in records.every() if request.pool in (one.name, one.job_id)]
    return found[0] if len(found) == 1 and found[0].notebook else None


def show_job(record: PoolRecord, request: LogsRequest, write: Write) -> str:
    """Write the last lines of a notebook job's log, with `follow` until it has ended; return its status (`wire.notebook`).

    KeyboardInterrupt leaves the job as it is.

    Raises:
        RequestError: `grep` is no regular expression.
        PoolError, ProvisionError: its head cannot be reached.
    """
    pattern = _pattern(request.grep)
    rest = ""
    size: int | None = request.lines  # of the log so far; what comes later is shown whole

    def take(text: str) -> None:
        nonlocal rest, size
        *lines, rest = (rest + text).split("\n")
        matching = [line for line in lines if pattern.search(last_state(line))]
        write(_labelled(matching[-size:] if size else matching, ""))
        size = None

    state = notebooks.follow(record, take, until_end=request.follow)
    take("\n" if rest else "")
    problem = f": {state.problem}" if state.problem else ""
    write(f"[{record.notebook} {JOB_WORDS[state.status]}{problem}]\n")
    return state.status


# -- of a pool that has ended ----------------------------------------------------------------------------------------


def _ended(texts: Mapping[int, str], request: LogsRequest, write: Write) -> None:
    chosen, lines = _lines_of(texts, request)
    for rank in chosen.ranks:
        write(_labelled(lines[rank], chosen.label(rank)))


def _lines_of(
    texts: Mapping[int, str], request: LogsRequest
) -> tuple[Chosen, dict[int, list[str]]]:
    """The lines that are asked for, by rank, of what is kept."""
    lines = {rank: text.removesuffix("\n").split("\n") for rank, text in texts.items()}
    headings = {
        rank: [match for line in some if (match := HEADING.fullmatch(line))]
        for rank, some in lines.items()
    }

    def runs(ranks: Sequence[int]) -> dict[int, int]:
        return {
            int(one["run"]): int(one["cell"])
            for rank in ranks
            for one in headings[rank]
            if one["run"]
        }

    chosen = _chosen(request, sorted(texts), runs)
    found = {
        rank: lines[rank] if chosen.runs is None else list(of_runs(lines[rank], chosen.runs))
        for rank in chosen.ranks
    }
    return chosen, {rank: chosen.matching(some)[-request.lines :] for rank, some in found.items()}


def of_runs(lines: Sequence[str], runs: Collection[int]) -> Iterator[str]:
    """The lines below the headings of these runs; pure."""
    inside = False
    for line in lines:
        if heading := HEADING.fullmatch(line):
            inside = int(heading["run"] or 0) in runs
        elif inside:
            yield line


# -- what is meant ---------------------------------------------------------------------------------------------------


def _chosen(
    request: LogsRequest, there: Sequence[int], runs: Callable[[Sequence[int]], Mapping[int, int]]
) -> Chosen:
    """What is asked for, where a pool has these ranks; `runs` tells run → cell of some of them. Raises RequestError with all mistakes."""
    mistakes: list[str] = []
    ranks = tuple(there)
    with noted_in(mistakes):
        size = max(there, default=-1) + 1
        ranks = (
            tuple(one for one in (request.rank or Selection("all")).ranks(size) if one in there)
            if size
            else ()
        )
    pattern = re.compile("")
    with noted_in(mistakes):
        pattern = _pattern(request.grep)
    chosen: tuple[int, ...] | None = None
    if request.run is not None or request.cell is not None:
        found = runs(ranks)
        chosen = tuple(
            run
            for run, cell in found.items()
            if request.run in (None, run) and request.cell in (None, cell)
        )
        if not chosen:
            mistakes.append(_no_run(request, found))
    if mistakes:
        raise RequestError(mistakes)
    return Chosen(ranks, chosen, pattern)


def _pattern(grep: str | None) -> re.Pattern[str]:
    """Return the regular expression of ``--grep``. Raises RequestError."""
    try:
        return re.compile(grep or "")
    except (re.error, OverflowError, RecursionError) as wrong:
        raise RequestError(f"--grep {grep!r} is not a regular expression: {wrong}") from None


def _no_run(request: LogsRequest, found: Mapping[int, int]) -> str:
    """Why no run is meant, and which there are."""
    if request.cell is None:
        return f"the log has no run {request.run}; {_listed('run', list(found))}"
    if request.run is None:
        return f"the log has no run of cell {request.cell}; {_listed('cell', sorted({*found.values()}))}"
    return f"the log has no run {request.run} of cell {request.cell}"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    """Which there are."""
    if not numbers:
        return "there are none yet"
    return (
        f"there is {rank_words(numbers, noun)}"
        if len(numbers) == 1
        else f"there are {rank_words(numbers, noun)}"
    )
