"""Logs of ranks, for running pools and for pools that have ended; and logs of notebook jobs.

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
from skymagic.cluster.agents import AgentObserver
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
JOB_PREDICATES = {
    "none": "has left no log there",
    "running": "is running",
    "done": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "lost": "could not continue",
}
"""Predicate of the sentence about a notebook job, by its status (`wire.notebook`)."""
Write = Callable[[str], object]
"""Function that prints text as it is, without adding a newline."""
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
        cell_pending: returns True while a cell is on its way to the ranks, and so not in the logs
            yet.
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
    cell_pending: Callable[[], bool] = lambda: False


class LogReader:
    """Read-only access to the logs of another process's pool, over separate connections.

    Args:
        record: record of the pool.
        key: addresses and credentials of its nodes.
        nodes: its machines, as the provider's `attach` returned them. The survey that came with
            them is never closed, because that would terminate rented machines.

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
        # the notebook that has the pool handles events: a reader ignores them
        self.agents = Agents(readable, AgentObserver())
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
        """Close the connections. Safe to call twice."""
        self.agents.leave()
        run_all([transport.close for transport in self._transports])


def open_reader(name: str) -> LogReader:
    """Connect to the agents of a pool, given its name or job ID.

    The caller closes the reader. Raises PoolError.
    """
    record = records.named(name)
    key = keys.attachable(record.job_id)
    _, nodes = launch.attaching_provider(key).attach(key.plan, key.accesses)
    return LogReader(record, key, nodes)


Readable = Pool | LogReader
"""A pool whose logs can be read from its nodes."""


@dataclass(frozen=True)
class LogSelection:
    """A request resolved against the ranks and runs of a pool.

    Attributes:
        ranks: numbers of the selected ranks.
        runs: numbers of the selected runs; None if the request does not restrict them.
        pattern: pattern that lines must match.
    """

    ranks: tuple[int, ...]
    runs: tuple[int, ...] | None
    pattern: re.Pattern[str]

    def label(self, rank: int) -> str:
        """Return the prefix of a rank's lines."""
        return f"[{rank}] " if len(self.ranks) > 1 else ""

    def filter(self, lines: Sequence[str]) -> list[str]:
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
        _write_ended(texts, request, write)
        write(
            f"[pool {name!r} has ended; the last lines of each rank are kept while the "
            "notebook runs]\n"
        )
        return
    if (record := job_record(request)) is not None:
        show_job(record, request, write)
        return
    kept_log = _log_kept_elsewhere(request)
    if kept_log is None:
        write_running(registry.pool_named(request.pool), request, write)
        return
    _write_ended({0: kept_log.text}, request, write)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept_log.ended))
    write(
        f"[pool {kept_log.name!r} ({kept_log.job_id}) ended at {when}; the last output of rank 0 "
        "is kept on this machine]\n"
    )


def show_from_outside(request: LogsRequest, write: Write) -> str:
    """Write the requested lines of a pool that another process of this machine has.

    Return the status of the notebook job whose log it is, or "". Raises as `show` does.
    """
    if (record := job_record(request)) is not None:
        return show_job(record, request, write)
    with _open_from_outside(request) as (texts, pool):
        if pool is not None:
            write_running(pool, request, write)
        else:
            _write_ended(texts, request, write)
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
    with _open_from_outside(request) as (texts, pool):
        logs = _read_lines(pool, texts, request)
    return RankLines(
        pool=request.pool,
        ended=pool is None,
        ranks={str(rank): list(logs.lines[rank]) for rank in logs},
    )


def collect(request: LogsRequest) -> Logs:
    """Return the requested lines as an object. Raises as `show` does."""
    last_lines = registry.last_lines(request.pool)
    kept_log = _log_kept_elsewhere(request)
    texts = last_lines[1] if last_lines else {0: kept_log.text} if kept_log else {}
    return _read_lines(None if texts else registry.pool_named(request.pool), texts, request)


def _log_kept_elsewhere(request: LogsRequest) -> records.KeptLog | None:
    """Return the kept log of an ended pool that this process does not know, or None."""
    return (
        records.kept_log(request.pool)
        if request.pool and not registry.is_registered(request.pool)
        else None
    )


def _read_lines(pool: Readable | None, texts: Mapping[int, str], request: LogsRequest) -> Logs:
    if pool is not None:
        selection = _select_in_pool(pool, request)
        lines = {
            rank: _last_lines(pool.agents, rank, selection, request.lines)
            for rank in selection.ranks
        }
    else:
        lines = _select_kept_lines(texts, request)[1]
    return Logs(
        {
            rank: [sanitized(last_state(line)) for line in rank_lines]
            for rank, rank_lines in lines.items()
        }
    )


@contextlib.contextmanager
def _open_from_outside(
    request: LogsRequest,
) -> Iterator[tuple[Mapping[int, str], LogReader | None]]:
    """Yield kept texts by rank and None for an ended pool, {} and a reader for a running one."""
    name = request.pool or ""
    kept_log = records.kept_log(name)
    if kept_log is not None and not any(
        name in (record.name, record.job_id) for record in records.readable_records()
    ):
        yield {0: kept_log.text}, None
        return
    with contextlib.closing(open_reader(name)) as pool:
        yield {}, pool


# -- running pools ---------------------------------------------------------------------------------


@dataclass
class LogPosition:
    """Read position in a rank's log."""

    end: int = 0
    """Number of bytes read."""
    partial_line: str = ""
    """Text of the last line, if it is incomplete so far."""

    def add(self, text: str, end: int) -> list[str]:
        """Add text that follows, and return the lines that are complete now."""
        *complete_lines, self.partial_line = (self.partial_line + text).split("\n")
        self.end = end
        return complete_lines

    def finish(self) -> list[str]:
        """Return the incomplete line, if any: nothing will be added to it."""
        lines, self.partial_line = [self.partial_line] if self.partial_line else [], ""
        return lines


def write_running(pool: Readable, request: LogsRequest, write: Write) -> None:
    """Write log lines of a running pool. Raises as `show` does."""
    if not request.follow:
        selection = _select_in_pool(pool, request)
        for rank in selection.ranks:
            lines = _last_lines(pool.agents, rank, selection, request.lines)
            write(_printable(lines, selection.label(rank)))
        return
    with contextlib.suppress(KeyboardInterrupt):  # the stop button
        selection = _select_once_started(pool, request)
        positions = {}
        for rank in selection.ranks:
            lines, positions[rank] = _read_last(pool.agents, rank, selection, request.lines)
            write(_printable(lines, selection.label(rank)))
        follow = _follow if selection.runs is None else _follow_run
        try:
            follow(pool.agents, selection, positions, write)
        finally:
            for rank, position in positions.items():
                write(_printable(selection.filter(position.finish()), selection.label(rank)))


def _select_in_pool(pool: Readable, request: LogsRequest) -> LogSelection:
    """Resolve the request against this pool. Raises RequestError with all mistakes."""
    return _select(
        request, range(pool.world_size), lambda ranks: telemetry.runs(pool.agents, ranks)
    )


def _select_once_started(pool: Readable, request: LogsRequest) -> LogSelection:
    """Resolve the request once a cell that is on its way to the ranks has started."""
    ranks = _select_in_pool(pool, replace(request, run=None, cell=None)).ranks
    while True:
        is_pending = request.cell_pending()
        log_end = telemetry.last_lines(pool.agents, ranks[0], 1)[1]
        try:
            return _select_in_pool(pool, request)
        except RequestError:
            if not is_pending:
                raise
        # wait up to a second for new output, which may begin with the heading of the run
        telemetry.output_since(pool.agents, ranks[0], log_end, 1.0)


def _read_last(
    agents: Agents, rank: int, selection: LogSelection, lines: int
) -> tuple[list[str], LogPosition]:
    """Return the last complete lines of a rank, and the position after them."""
    position = LogPosition()
    if selection.runs is None and not selection.pattern.pattern:
        return position.add(*telemetry.last_lines(agents, rank, lines)), position
    last_lines = deque[str](maxlen=lines)
    for run in selection.runs or (WHOLE_LOG,):
        last_lines.extend(selection.filter(position.finish()))  # the previous run's last line
        for piece in telemetry.pieces(agents, rank, run):
            last_lines.extend(selection.filter(position.add(piece.text, piece.end)))
    return list(last_lines), position


def _last_lines(agents: Agents, rank: int, selection: LogSelection, lines: int) -> list[str]:
    """Return the last lines of a rank, including an incomplete one."""
    complete_lines, position = _read_last(agents, rank, selection, lines)
    return list(deque([*complete_lines, *selection.filter(position.finish())], maxlen=lines))


def _follow(
    agents: Agents, selection: LogSelection, positions: Mapping[int, LogPosition], write: Write
) -> None:
    while True:
        for rank, position in positions.items():
            lines = position.add(
                *telemetry.output_since(agents, rank, position.end, 1.0 / len(positions))
            )
            write(_printable(selection.filter(lines), selection.label(rank)))


def _follow_run(
    agents: Agents, selection: LogSelection, positions: Mapping[int, LogPosition], write: Write
) -> None:
    """Follow the last of the selected runs until it has ended on all ranks."""
    assert selection.runs
    unfinished = dict(positions)
    while unfinished:
        for rank, position in list(unfinished.items()):
            # a position of 0 becomes None, the beginning of the run
            is_over, previous_end = False, position.end
            for piece in telemetry.pieces(agents, rank, selection.runs[-1], previous_end or None):
                lines = position.add(piece.text, piece.end)
                write(_printable(selection.filter(lines), selection.label(rank)))
                is_over = piece.over
            if is_over:
                del unfinished[rank]
                write(_printable(selection.filter(position.finish()), selection.label(rank)))
            elif position.end == previous_end:  # no new output: wait for more
                telemetry.output_since(agents, rank, position.end, 1.0 / len(unfinished))


def _printable(lines: Sequence[str], label: str) -> str:
    """Return log lines as text that is safe to print.

    A log holds what any program on the node wrote, and is also read in a terminal.
    """
    return sanitized("".join(log_lines(f"{line}\n", label) for line in lines))


# -- notebook jobs ---------------------------------------------------------------------------------


def job_record(request: LogsRequest) -> PoolRecord | None:
    """Return the record of a pool if the log of its notebook job is requested, or None.

    The job may have ended.
    """
    asks_for_ranks = request.rank is not None or request.run is not None or request.cell is not None
    if request.pool is None or asks_for_ranks or registry.is_registered(request.pool):
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
        PoolError, ProvisionError: the pool's head, which runs the job, cannot be reached.
    """
    pattern = grep_pattern(request.grep)
    partial_line = ""
    line_limit: int | None = request.lines  # applies to the log so far; later lines are all shown

    def take(text: str) -> None:
        nonlocal partial_line, line_limit
        *lines, partial_line = (partial_line + text).split("\n")
        matching = [line for line in lines if pattern.search(last_state(line))]
        write(_printable(matching[-line_limit:] if line_limit else matching, ""))
        line_limit = None

    state = notebooks.follow(record, take, until_end=request.follow)
    take("\n" if partial_line else "")
    problem = f": {state.problem}" if state.problem else ""
    write(f"[{record.notebook} {JOB_PREDICATES[state.status]}{problem}]\n")
    return state.status


# -- ended pools -----------------------------------------------------------------------------------


def _write_ended(texts: Mapping[int, str], request: LogsRequest, write: Write) -> None:
    selection, lines = _select_kept_lines(texts, request)
    for rank in selection.ranks:
        write(_printable(lines[rank], selection.label(rank)))


def _select_kept_lines(
    texts: Mapping[int, str], request: LogsRequest
) -> tuple[LogSelection, dict[int, list[str]]]:
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

    selection = _select(request, sorted(texts), runs)
    selected = {
        rank: lines[rank]
        if selection.runs is None
        else list(lines_of_runs(lines[rank], selection.runs))
        for rank in selection.ranks
    }
    return selection, {
        rank: selection.filter(rank_lines)[-request.lines :]
        for rank, rank_lines in selected.items()
    }


def lines_of_runs(lines: Sequence[str], runs: Collection[int]) -> Iterator[str]:
    """Yield the lines below the headings of these runs."""
    inside = False
    for line in lines:
        if heading := HEADING.fullmatch(line):
            inside = int(heading["run"] or 0) in runs
        elif inside:
            yield line


# -- resolving a request ---------------------------------------------------------------------------


def _select(
    request: LogsRequest,
    available: Sequence[int],
    runs: Callable[[Sequence[int]], Mapping[int, int]],
) -> LogSelection:
    """Resolve a request against the ranks of a pool; `runs` returns run → cell for given ranks.

    Raises RequestError with all mistakes.
    """
    mistakes: list[str] = []
    ranks = tuple(available)
    with collect_mistakes(mistakes):
        world_size = max(available, default=-1) + 1
        ranks = (
            tuple(
                rank
                for rank in (request.rank or Selection("all")).ranks(world_size)
                if rank in available
            )
            if world_size
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
            mistakes.append(_explain_no_run(request, cells_by_run))
    if mistakes:
        raise RequestError(mistakes)
    return LogSelection(ranks, selected_runs, pattern)


def grep_pattern(grep: str | None) -> re.Pattern[str]:
    """Return the regular expression of ``--grep``. Raises RequestError."""
    try:
        return re.compile(grep or "")
    except (re.error, OverflowError, RecursionError) as problem:
        raise RequestError(f"--grep {grep!r} is not a regular expression: {problem}") from None


def _explain_no_run(request: LogsRequest, runs: Mapping[int, int]) -> str:
    """Return the message that no run matches, which lists the runs that exist."""
    if request.cell is None:
        return f"the log has no run {request.run}; {_list_existing('run', list(runs))}"
    if request.run is None:
        return (
            f"the log has no run of cell {request.cell}; "
            f"{_list_existing('cell', sorted({*runs.values()}))}"
        )
    return f"the log has no run {request.run} of cell {request.cell}"


def _list_existing(noun: str, numbers: Sequence[int]) -> str:
    """Return a sentence that lists the existing runs or cells."""
    if not numbers:
        return "there are none yet"
    return (
        f"there is {rank_words(numbers, noun)}"
        if len(numbers) == 1
        else f"there are {rank_words(numbers, noun)}"
    )
