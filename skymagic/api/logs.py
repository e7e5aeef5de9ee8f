"""Output of ranks, of a running pool or one that has ended.

Used by ``%sky_logs`` and ``skymagic logs``.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skymagic.api import notebooks
from skymagic.cluster import Agents, Node, telemetry
from skymagic.display.status import Logs
from skymagic.display.text import last_state, log_lines
from skymagic.errors import PoolError, ProvisionError, RequestError, collect_mistakes
from skymagic.plan.requests import Defaults
from skymagic.plan.units import Selection, rank_words
from skymagic.pool import Pool, keys, launch, records, registry, resources
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.pool.status import SharedStatus
from skymagic.wire import processes
from skymagic.wire.agent import WHOLE_LOG
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all
from skymagic.wire.untrusted import sanitized

HEADING = re.compile(r"── cell (?P<cell>\d+), (?:run (?P<run>\d+), )?[\d:]{8} ──")
"""Heading in a log above the first line of each run (`kernels.agent.output`)."""
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
"""Seconds within which a pool's agents must report the state of their ranks."""


@dataclass(frozen=True)
class LogsRequest:
    """Request for log lines: which ranks (None: all), how many last lines, and whether to follow.

    Attributes:
        run: number of a run.
        cell: number of a cell of the notebook, which may have had several runs.
        grep: regular expression that lines must match.
        output: variable that receives the lines.
        debug: the debug logs of skymagic's own processes instead (`api.debug_logs`).
        coming: returns True while a cell that the log does not show yet is on its way to the ranks.
    """

    rank: Selection | None = None
    lines: int = 50
    follow: bool = False
    pool: str | None = None
    run: int | None = None
    cell: int | None = None
    grep: str | None = None
    output: str | None = None
    debug: bool = False
    coming: Callable[[], bool] = lambda: False


class LogReader:
    """Read-only access to the logs of a pool that a notebook has, over separate connections.

    Args:
        record: record of the pool.
        key: addresses and credentials of its nodes.
        nodes: its machines. Their owner is not closed, because that would terminate rented ones.

    Raises:
        PoolError: a node cannot be reached.
    """

    def __init__(self, record: PoolRecord, key: PoolKey, nodes: Sequence[Node]) -> None:
        self.world_size = key.plan.topology.world_size
        self._transports: list[Transport] = []
        readable = [
            replace(node, address=address, hostname=hostname, start_agent=partial(self._open, node))
            for node, (address, hostname) in zip(nodes, key.addresses, strict=True)
        ]
        ignore: Callable[..., None] = lambda *_: None  # noqa: E731  # what only the notebook hears
        self.agents = Agents(readable, ignore, ignore, ignore, ignore, ignore, ignore, ignore)
        status = SharedStatus(record.name, key.plan, Defaults(), record.job_id)
        try:
            self.agents.read(resources.rank_specs(status, readable, key.port), READ_TIMEOUT)
        except BaseException as problem:
            self.close()
            if isinstance(problem, ProvisionError):
                raise PoolError(
                    f"pool {record.name!r} cannot be read: {problem}",
                    code="attach",
                    names=[record.name],
                ) from problem
            raise

    def _open(self, node: Node, _: Callable[[str], None]) -> Transport:
        """Connect to the agent's socket for readers."""
        transport = node.run(processes.ATTACH, processes.READERS_ONLY, node.access.daemon)
        self._transports.append(transport)
        return transport

    def close(self) -> None:
        """Close the connections; calling it twice is safe."""
        self.agents.leave()
        run_all([transport.close for transport in self._transports])


def open_reader(name: str) -> LogReader:
    """Connect to the agents of a pool by its name or job id.

    The caller closes the reader. Raises PoolError.
    """
    record = records.named(name)
    key = keys.attachable(record.job_id)
    _, nodes = launch.attaching_provider(key).attach(key.plan, key.accesses)
    return LogReader(record, key, nodes)


Readable = Pool | LogReader
"""A pool whose logs can be read from its nodes."""


@dataclass(frozen=True)
class SelectedLogs:
    """A request resolved against the ranks and runs of a pool.

    Attributes:
        runs: numbers of the selected runs; None if the request does not restrict them.
    """

    ranks: tuple[int, ...]
    runs: tuple[int, ...] | None
    pattern: re.Pattern[str]

    def label(self, rank: int) -> str:
        """Return the prefix of a rank's lines."""
        return f"[{rank}] " if len(self.ranks) > 1 else ""

    def matching(self, lines: Sequence[str]) -> list[str]:
        """Return the lines that match the pattern.

        A redrawn progress bar is matched by its final state.
        """
        return [line for line in lines if self.pattern.search(last_state(line))]


def show(request: LogsRequest, write: Write) -> None:
    """Write the requested lines.

    With `follow`, a running pool is followed until the stop button or the end of the run.

    Raises:
        RequestError: ranks or runs do not exist, or the regular expression is invalid; the message
            lists all mistakes, and nothing was read.
        PoolError: neither such a pool nor a log of one exists.
    """
    last_lines = registry.last_lines(request.pool)
    if last_lines is not None:
        name, texts = last_lines
        _ended(texts, request, write)
        write(
            f"[pool {name!r} has ended; the last lines of each rank are kept while the "
            "notebook runs]\n"
        )
        return
    if (record := job_record(request)) is not None:
        show_job(record, request, write)
        return
    kept_log = _ended_elsewhere(request)
    if kept_log is None:
        live(registry.pool_named(request.pool), request, write)
        return
    _ended({0: kept_log.text}, request, write)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept_log.ended))
    write(
        f"[pool {kept_log.name!r} ({kept_log.job_id}) has ended at {when}; what rank 0 "
        "wrote last is kept here]\n"
    )


def show_from_outside(request: LogsRequest, write: Write) -> str:
    """Write the requested lines of a pool of this machine's notebooks, over separate connections.

    Return the status of the notebook job whose log it is, or "". Raises as `show` does.
    """
    if (record := job_record(request)) is not None:
        return show_job(record, request, write)
    with _outside(request) as (texts, pool):
        if pool is not None:
            live(pool, request, write)
        else:
            _ended(texts, request, write)
    return ""


@dataclass(frozen=True)
class RankLines:
    """Lines of a pool's ranks, as ``skymagic logs --json`` prints them."""

    pool: str | None
    ended: bool
    ranks: Mapping[str, Sequence[str]]
    """Lines by rank number."""


@dataclass(frozen=True)
class JobLines:
    """Lines of the notebook job on a pool, as ``skymagic logs --json`` prints them."""

    pool: str | None
    notebook: str
    status: str
    lines: Sequence[str]


def report(request: LogsRequest) -> RankLines | JobLines:
    """Return the requested lines, or those of the pool's notebook job, for programs.

    Raises as `show` does.
    """
    if (record := job_record(request)) is not None:
        lines: list[str] = []
        status = show_job(record, request, lines.append)
        text = "".join(lines[:-1])  # the last line reports the outcome to people
        return JobLines(request.pool, record.notebook, status, text.splitlines())
    with _outside(request) as (texts, pool):
        logs = _collected(pool, texts, request)
    return RankLines(
        pool=request.pool,
        ended=pool is None,
        ranks={str(rank): list(logs.lines[rank]) for rank in logs},
    )


def collected(request: LogsRequest) -> Logs:
    """Return the requested lines as an object. Raises as `show` does."""
    last_lines = registry.last_lines(request.pool)
    kept_log = _ended_elsewhere(request)
    texts = last_lines[1] if last_lines else {0: kept_log.text} if kept_log else {}
    return _collected(None if texts else registry.pool_named(request.pool), texts, request)


def _ended_elsewhere(request: LogsRequest) -> records.KeptLog | None:
    """Return the kept log of an ended pool that this process does not know, or None."""
    return (
        records.kept_log(request.pool)
        if request.pool and not registry.is_registered(request.pool)
        else None
    )


def _collected(pool: Readable | None, texts: Mapping[int, str], request: LogsRequest) -> Logs:
    if pool is not None:
        selection = _chosen_of(pool, request)
        lines = {
            rank: _last(pool.agents, rank, selection, request.lines)[0] for rank in selection.ranks
        }
    else:
        lines = _lines_of(texts, request)[1]
    return Logs(
        {
            rank: [sanitized(last_state(line)) for line in rank_lines]
            for rank, rank_lines in lines.items()
        }
    )


@contextlib.contextmanager
def _outside(request: LogsRequest) -> Iterator[tuple[Mapping[int, str], LogReader | None]]:
    """Yield (kept texts by rank of an ended pool, reader of a running one)."""
    name = request.pool or ""
    kept_log = records.kept_log(name)
    if kept_log is not None and not any(
        name in (record.name, record.job_id) for record in records.readable_records()
    ):
        yield {0: kept_log.text}, None
        return
    with contextlib.closing(open_reader(name)) as pool:
        yield {}, pool


# -- of a pool that runs ---------------------------------------------------------------------------


def live(pool: Readable, request: LogsRequest, write: Write) -> None:
    """Write log lines of a running pool. Raises as `show` does."""
    if not request.follow:
        _show_last(pool, _chosen_of(pool, request), request, write)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the stop button
        selection = _awaited(pool, request)
        ends = _show_last(pool, selection, request, write)
        follow = _follow if selection.runs is None else _follow_run
        follow(pool.agents, selection, ends, write)


def _show_last(
    pool: Readable, matching: SelectedLogs, request: LogsRequest, write: Write
) -> dict[int, int]:
    """Write the requested last lines, and return their end by rank, in bytes."""
    ends = {}
    for rank in matching.ranks:
        lines, ends[rank] = _last(pool.agents, rank, matching, request.lines)
        write(_labelled(lines, matching.label(rank)))
    return ends


def _chosen_of(pool: Readable, request: LogsRequest) -> SelectedLogs:
    """Resolve the request against this pool. Raises RequestError with all mistakes."""
    return _chosen(
        request, range(pool.world_size), lambda ranks: telemetry.runs(pool.agents, ranks)
    )


def _awaited(pool: Readable, request: LogsRequest) -> SelectedLogs:
    """Resolve the request once a cell that is on its way to the ranks has started."""
    ranks = _chosen_of(pool, replace(request, run=None, cell=None)).ranks
    while True:
        coming = request.coming()
        log_end = telemetry.last_lines(pool.agents, ranks[0], 1)[1]
        try:
            return _chosen_of(pool, request)
        except RequestError:
            if not coming:
                raise
        telemetry.output_since(pool.agents, ranks[0], log_end, 1.0)


def _last(agents: Agents, rank: int, matching: SelectedLogs, lines: int) -> tuple[list[str], int]:
    """Return the last lines of a rank, and their end in bytes."""
    if matching.runs is None and not matching.pattern.pattern:
        text, end = telemetry.last_lines(agents, rank, lines)
        return (text.removesuffix("\n").split("\n") if text else []), end
    last_lines, end = deque[str](maxlen=lines), 0
    for run in matching.runs or (WHOLE_LOG,):
        partial_line = ""
        for piece in telemetry.pieces(agents, rank, run):
            *complete_lines, partial_line = (partial_line + piece.text).split("\n")
            last_lines.extend(matching.matching(complete_lines))
            end = piece.end
        last_lines.extend(matching.matching([partial_line] if partial_line else []))
    return list(last_lines), end


def _follow(agents: Agents, matching: SelectedLogs, ends: dict[int, int], write: Write) -> None:
    while True:
        for rank in matching.ranks:
            text, ends[rank] = telemetry.output_since(
                agents, rank, ends[rank], 1.0 / len(matching.ranks)
            )
            write(_labelled(matching.matching(text.split("\n")[:-1]), matching.label(rank)))


def _follow_run(agents: Agents, matching: SelectedLogs, ends: dict[int, int], write: Write) -> None:
    """Follow the last of the selected runs until it has ended on all ranks."""
    assert matching.runs
    partial_lines = dict.fromkeys(matching.ranks, "")
    while partial_lines:
        for rank in list(partial_lines):
            over, previous_end = False, ends[rank]
            for piece in telemetry.pieces(agents, rank, matching.runs[-1], previous_end or None):
                *complete_lines, partial_lines[rank] = (partial_lines[rank] + piece.text).split(
                    "\n"
                )
                ends[rank], over = piece.end, piece.over
                write(_labelled(matching.matching(complete_lines), matching.label(rank)))
            if over:
                partial_line = partial_lines.pop(rank)
                write(
                    _labelled(
                        matching.matching([partial_line] if partial_line else []),
                        matching.label(rank),
                    )
                )
            elif ends[rank] == previous_end:  # no new output: wait for more
                telemetry.output_since(agents, rank, ends[rank], 1.0 / len(partial_lines))


def _labelled(lines: Sequence[str], label: str) -> str:
    """Return log lines as text that is safe to print.

    A log holds what any program on the node wrote, and is also read in a terminal.
    """
    return sanitized("".join(log_lines(f"{line}\n", label) for line in lines))


# -- of a notebook job -----------------------------------------------------------------------------


def job_record(request: LogsRequest) -> PoolRecord | None:
    """Return the record of a pool if the log of its notebook job is requested, or None.

    The job may have ended.
    """
    of_ranks = request.rank is not None or request.run is not None or request.cell is not None
    if request.pool is None or of_ranks or registry.is_registered(request.pool):
        return None
    matching = [
        record
        for record in records.readable_records()
        if request.pool in (record.name, record.job_id)
    ]
    return matching[0] if len(matching) == 1 and matching[0].notebook else None


def show_job(record: PoolRecord, request: LogsRequest, write: Write) -> str:
    """Write the last lines of a notebook job's log, and return its status (`wire.notebook`).

    With `follow`, continue until the job has ended. KeyboardInterrupt leaves the job running.

    Raises:
        RequestError: `grep` is not a valid regular expression.
        PoolError, ProvisionError: the head cannot be reached.
    """
    pattern = grep_pattern(request.grep)
    partial_line = ""
    size: int | None = request.lines  # applies to the log so far; later lines are all shown

    def take(text: str) -> None:
        nonlocal partial_line, size
        *lines, partial_line = (partial_line + text).split("\n")
        matching = [line for line in lines if pattern.search(last_state(line))]
        write(_labelled(matching[-size:] if size else matching, ""))
        size = None

    state = notebooks.follow(record, take, until_end=request.follow)
    take("\n" if partial_line else "")
    problem = f": {state.problem}" if state.problem else ""
    write(f"[{record.notebook} {JOB_WORDS[state.status]}{problem}]\n")
    return state.status


# -- of a pool that has ended ----------------------------------------------------------------------


def _ended(texts: Mapping[int, str], request: LogsRequest, write: Write) -> None:
    selection, lines = _lines_of(texts, request)
    for rank in selection.ranks:
        write(_labelled(lines[rank], selection.label(rank)))


def _lines_of(
    texts: Mapping[int, str], request: LogsRequest
) -> tuple[SelectedLogs, dict[int, list[str]]]:
    """Return the resolved request, and the requested lines of kept texts by rank."""
    lines = {rank: text.removesuffix("\n").split("\n") for rank, text in texts.items()}
    headings = {
        rank: [match for line in rank_lines if (match := HEADING.fullmatch(line))]
        for rank, rank_lines in lines.items()
    }

    def runs(ranks: Sequence[int]) -> dict[int, int]:
        return {
            int(heading["run"]): int(heading["cell"])
            for rank in ranks
            for heading in headings[rank]
            if heading["run"]
        }

    selection = _chosen(request, sorted(texts), runs)
    selected = {
        rank: lines[rank] if selection.runs is None else list(of_runs(lines[rank], selection.runs))
        for rank in selection.ranks
    }
    return selection, {
        rank: selection.matching(rank_lines)[-request.lines :]
        for rank, rank_lines in selected.items()
    }


def of_runs(lines: Sequence[str], runs: Collection[int]) -> Iterator[str]:
    """Yield the lines below the headings of these runs; pure."""
    inside = False
    for line in lines:
        if heading := HEADING.fullmatch(line):
            inside = int(heading["run"] or 0) in runs
        elif inside:
            yield line


# -- what is meant ---------------------------------------------------------------------------------


def _chosen(
    request: LogsRequest,
    available: Sequence[int],
    runs: Callable[[Sequence[int]], Mapping[int, int]],
) -> SelectedLogs:
    """Resolve a request against the ranks of a pool; `runs` returns run → cell for given ranks.

    Raises RequestError with all mistakes.
    """
    mistakes: list[str] = []
    ranks = tuple(available)
    with collect_mistakes(mistakes):
        size = max(available, default=-1) + 1
        ranks = (
            tuple(
                rank for rank in (request.rank or Selection("all")).ranks(size) if rank in available
            )
            if size
            else ()
        )
    pattern = re.compile("")
    with collect_mistakes(mistakes):
        pattern = grep_pattern(request.grep)
    selected_runs: tuple[int, ...] | None = None
    if request.run is not None or request.cell is not None:
        cells_by_run = runs(ranks)
        selected_runs = tuple(
            run
            for run, cell in cells_by_run.items()
            if request.run in (None, run) and request.cell in (None, cell)
        )
        if not selected_runs:
            mistakes.append(_no_run(request, cells_by_run))
    if mistakes:
        raise RequestError(mistakes)
    return SelectedLogs(ranks, selected_runs, pattern)


def grep_pattern(grep: str | None) -> re.Pattern[str]:
    """Return the regular expression of ``--grep``. Raises RequestError."""
    try:
        return re.compile(grep or "")
    except (re.error, OverflowError, RecursionError) as wrong:
        raise RequestError(f"--grep {grep!r} is not a regular expression: {wrong}") from None


def _no_run(request: LogsRequest, runs: Mapping[int, int]) -> str:
    """Return a message that no run matches, with the existing ones."""
    if request.cell is None:
        return f"the log has no run {request.run}; {_listed('run', list(runs))}"
    if request.run is None:
        return (
            f"the log has no run of cell {request.cell}; "
            f"{_listed('cell', sorted({*runs.values()}))}"
        )
    return f"the log has no run {request.run} of cell {request.cell}"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    """Return a sentence that lists the existing runs or cells."""
    if not numbers:
        return "there are none yet"
    return (
        f"there is {rank_words(numbers, noun)}"
        if len(numbers) == 1
        else f"there are {rank_words(numbers, noun)}"
    )
