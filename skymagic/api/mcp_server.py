"""Pools as tools of a coding agent: a server of the Model Context Protocol.

``skymagic mcp`` starts it; it speaks over standard input and output, and ends with its client. Each
tool returns what a command of ``skymagic`` prints with ``--json``. Tools that end or replace
something want the pool's name a second time, as a confirmation. Secrets of a pool are masked in
all results.

::

    agent ── stdio ──▶ MCPServer ──▶ Tools.status, Tools.logs, … ──▶ the API's functions
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from IPython.core.inputtransformer2 import TransformerManager

from skymagic.api import logs, notebooks, pool_listing, positions, stopping
from skymagic.display.screen import Screen
from skymagic.errors import PoolError, RankError, RequestError, SkyError
from skymagic.jobs import cell as cells
from skymagic.plan.masking import masked_command, without_colours
from skymagic.plan.requests import CloudSettings, Defaults, RunRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool, keys, launch, records, registry
from skymagic.run.state import Limits
from skymagic.wire.typed import JsonObject
from skymagic.wire.untrusted import print_sanitized, sanitized

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

logger = logging.getLogger(__name__)

INSTRUCTIONS = """\
skymagic runs cells of a notebook on pools: processes ("ranks", one per GPU) on some machines.
Start with `status` or `pools`. If a cell hangs, `stacks` says where each rank is. Errors name the
next step: follow it before you try anything else. `run_cell` needs a pool that no notebook uses.
Ask a person before you end a pool that you have not started."""
MISSING = "the package mcp is missing: pip install 'skymagic[mcp]'"
MAX_OUTPUT, MAX_VALUE = 20_000, 2_000
"""Maximum characters of the output of a cell, and of the value of a rank, that are returned."""
Call = TypeVar("Call", bound=Callable[..., object])


class OutputRecorder(Screen):
    """Screen that keeps the text of a run's visible ranks: the last `MAX_OUTPUT` characters."""

    def __init__(self, is_labelled: bool) -> None:
        self._is_labelled = is_labelled
        self._lines: dict[int, str] = {}
        self.output = ""

    def text(self, rank: int, name: str, text: str) -> None:
        """Keep complete lines of a rank in the order of their ends."""
        *ended, self._lines[rank] = (self._lines.get(rank, "") + text).split("\n")
        self._add(rank, ended)

    def rich(self, rank: int, kind: str, content: JsonObject) -> None:
        """Keep the text of a display. The value of the last expression is returned separately."""
        if kind in ("display_data", "update_display_data") and (
            text := content.get("data", {}).get("text/plain")
        ):
            self._add(rank, str(text).split("\n"))

    def note(self, text: str) -> None:
        """Keep a line by skymagic itself."""
        self.output = f"{self.output}{text}"[-MAX_OUTPUT:]

    def finish(self) -> str:
        """Return all of it, with the lines that have not ended."""
        for rank, line in sorted(self._lines.items()):
            self._add(rank, [line] if line else [])
        self._lines.clear()
        return sanitized(without_colours(self.output))

    def _add(self, rank: int, lines: Sequence[str]) -> None:
        label = f"[{rank}] " if self._is_labelled else ""
        text = "".join(f"{label}{line}\n" for line in lines)
        self.output = f"{self.output}{text}"[-MAX_OUTPUT:]


class Tools:
    """The tools. Their docstrings and parameters are what an agent reads."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        """Values that no result may show."""

    # -- looking -----------------------------------------------------------------------------------

    def pools(self) -> JsonObject:
        """List pools started from this machine that outlive their notebook.

        `left` is true if no notebook uses the pool, so that `run_cell` can.
        """
        return {
            "pools": [
                record.plain() | {"left": records.is_left(record)}
                for record in records.readable_records()
            ]
        }

    def status(
        self,
        name: str | None = None,
        hosts: list[str] | None = None,
        provider: str | None = None,
        login: str | None = None,
    ) -> JsonObject:
        """Show pools with their nodes, ranks, GPUs and whether they are busy.

        Args:
            name: a pool's name or job id; all pools without it.
            hosts: machines to look at, such as ["gpu1", "user@gpu2"]; without it, this machine.
            provider: aws, slurm, kubernetes or ray: look there instead.
            login: with slurm: the login node to ask, over SSH.
        """
        request = pool_listing.StatusRequest(
            name, tuple(hosts or ()), provider=provider, login=login
        )
        if mistakes := request.mistakes():
            raise RequestError(mistakes)
        return pool_listing.listing(request, CloudSettings()).plain()

    def logs(
        self,
        pool: str,
        ranks: str | None = None,
        lines: int = 50,
        run: int | None = None,
        cell: int | None = None,
        grep: str | None = None,
    ) -> JsonObject:
        """Return the last lines that ranks have written, also of a pool that has ended.

        Args:
            pool: name or job id.
            ranks: such as "0,2" or "0:4"; all ranks without it.
            lines: number of last lines of each rank.
            run: only of this run, by its number in the log.
            cell: only of this cell of the notebook.
            grep: only lines that match this regular expression.
        """
        self._learn(pool)
        request = logs.LogsRequest(_selection(ranks), lines, False, pool, run, cell, grep)
        return asdict(logs.report(request))

    def stacks(self, pool: str, ranks: str | None = None) -> JsonObject:
        """Show the stack of each rank, even if a notebook uses the pool and its cell hangs.

        Args:
            pool: name or job id.
            ranks: such as "0,2" or "0:4"; all ranks without it.
        """
        stacks = positions.positions(pool, _selection(ranks))
        return stacks.plain() | {"text": stacks.text()}

    # -- running -----------------------------------------------------------------------------------

    def run_cell(
        self,
        pool: str,
        source: str,
        ranks: str | None = None,
        timeout: float | None = 600.0,
        show: str = "head",
        take_over: bool = False,
        confirm: str = "",
    ) -> JsonObject:
        """Run a cell on the ranks of a pool that no notebook uses, and leave the pool again.

        Variables stay on the ranks. The pool must outlive its notebook: one on this machine must
        have been made with --detach. Returns the output, and the text of each rank's last
        expression.

        Args:
            pool: name or job id.
            source: Python, as in a notebook's cell.
            ranks: such as "0,2" or "0:4"; all ranks without it.
            timeout: seconds after which the cell is stopped; null for no limit.
            show: ranks whose output is returned: head, all, or ranks such as "1".
            take_over: take the pool from a notebook that uses it; that notebook loses it.
            confirm: with take_over: the pool's name again.
        """
        if take_over:
            _check_confirmed(pool, confirm, "take_over takes the pool from its notebook")
        request = RunRequest(
            targets=_selection(ranks), only=Selection.of(show), timeout=timeout, output="values"
        )
        with attached(pool, take_over=take_over) as borrowed:
            self._learn(pool)
            self._learn_from_rank(borrowed)
            plain = cells.check_syntax(source, TransformerManager().transform_cell)
            spec = cells.spec_of(request, borrowed, cells.Cell(source), plain)
            screen = OutputRecorder(len(spec.order.visible_ranks) > 1)
            try:
                values = cells.broadcast(borrowed, spec, Limits(timeout=timeout), screen)
            except SkyError as problem:
                # the output is often what explains the error
                problem.add_note(f"output:\n{screen.finish()}")
                raise
        problems = {"problems": list(values.problems)} if values.problems else {}
        values_by_rank = {
            str(rank): _short(value)
            for rank, value in zip(spec.order.value_ranks, values.value, strict=False)
        }
        return {"output": screen.finish(), "values": values_by_rank, **problems}

    # -- files -------------------------------------------------------------------------------------

    def put(self, pool: str, source: str, target: str, confirm: str = "") -> JsonObject:
        """Copy a file or a folder to all nodes of a pool, replacing files of the same name.

        Args:
            pool: name or job id.
            source: path on this machine.
            target: path on the nodes, relative to the ranks' folder.
            confirm: the pool's name again.
        """
        _check_confirmed(pool, confirm, f"put replaces {target} on the nodes")
        return {"done": [notebooks.put(pool, source, target)]}

    def get(self, pool: str, source: str, target: str = ".", confirm: str = "") -> JsonObject:
        """Copy a file or a folder from the head of a pool.

        Args:
            pool: name or job id.
            source: path on the head, relative to the ranks' folder.
            target: path on this machine.
            confirm: the pool's name again, if the copy replaces something.
        """
        path = Path(target).expanduser()
        # as cp: into a folder that exists, else to this name
        replaced = path / Path(source).name if path.is_dir() else path
        if replaced.exists():
            _check_confirmed(pool, confirm, f"get replaces {replaced}")
        return {"done": [notebooks.get(pool, source, target)]}

    # -- ending ------------------------------------------------------------------------------------

    def down(
        self,
        name: str,
        confirm: str = "",
        hosts: list[str] | None = None,
        provider: str | None = None,
        login: str | None = None,
    ) -> JsonObject:
        """End a pool and release its machines. The ranks' variables are lost.

        Args:
            name: the pool's name or job id.
            confirm: the same name again.
            hosts: machines that run it; without it, this machine, or where it was started.
            provider: aws, slurm, kubernetes or ray: look there instead.
            login: with slurm: the login node to ask, over SSH.
        """
        _check_confirmed(name, confirm, "down ends the pool and releases its machines")
        request = stopping.DownRequest(name, False, tuple(hosts or ()), provider, login)
        if mistakes := request.mistakes():
            raise RequestError(mistakes)
        done = stopping.stop_in_location(request, CloudSettings(), (), _say)
        return {"done": stopping.stop_named(name, _say) if done is None else done}

    # -- secrets -----------------------------------------------------------------------------------

    def mask(self, text: str) -> str:
        """Return a text without the secrets that are known here."""
        return masked_command(text, self._secrets)

    def _learn(self, pool: str) -> None:
        """Remember the secrets of a pool whose values are in this process's environment."""
        with contextlib.suppress(SkyError):  # a pool that has ended has no key
            key = keys.read(records.named(pool).job_id)
            self._secrets |= key.plan.request.secret_values(os.environ)

    def _learn_from_rank(self, pool: Pool) -> None:
        """Remember the secrets of a pool as its ranks have them."""
        # The record has the names of secrets only, and this process need not have their values.
        if names := pool.plan.request.secrets:
            source = f"[__import__('os').environ.get(name, '') for name in {names!r}]"
            request = RunRequest(targets=Selection.of(0), output="values", only=Selection.of("0"))
            spec = cells.spec_of(request, pool, cells.Cell(source), source)
            (values,) = cells.broadcast(pool, spec, Limits(timeout=60.0), Screen()).value
            self._secrets |= set(values)


READING = ("pools", "status", "logs", "stacks")
"""Tools that change nothing."""
CHANGING = ("run_cell", "put", "get", "down")


@contextlib.contextmanager
def attached(name: str, *, take_over: bool) -> Iterator[Pool]:
    """Attach to a pool for one call, and leave it to the next notebook.

    Raises:
        PoolError: a notebook uses the pool, a cell is still running on it, or it is gone.
    """
    pool, unfinished = launch.attach(name, {}, Defaults(), _say, take_over=take_over)
    try:
        # results of runs that are over stay where they are, for the next notebook
        if running := [run.text for run in unfinished if not run.over]:
            raise PoolError(
                f"pool {pool.name!r} is busy: {running[0]}",
                code="pool-held",
                names=[pool.name],
                hint=f"wait for its end (stacks, logs), or attach a notebook: %sky_attach {name}",
            )
        yield pool
    finally:
        # This process stays alive, so the record must say that it no longer uses the pool: other
        # notebooks would be refused otherwise.
        pool.leave()
        registry.unregister(pool)
        if (record := records.of_job(pool.job_id)) is not None:
            records.release(record)


def server() -> MCPServer:
    """Return the server with all tools. Raises RequestError if the package mcp is missing."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp_types import ToolAnnotations
    except ImportError:
        raise RequestError(MISSING) from None
    import skymagic

    tools = Tools()
    mcp_server = MCPServer(
        "skymagic",
        instructions=INSTRUCTIONS,
        version=skymagic.__version__,
        log_level="WARNING",
    )
    for name in (*READING, *CHANGING):
        annotations = ToolAnnotations(
            read_only_hint=name in READING, destructive_hint=name not in READING
        )
        call = getattr(tools, name)
        mcp_server.add_tool(
            _answering(call, tools.mask),
            name=name,
            description=inspect.getdoc(call),
            annotations=annotations,
            structured_output=False,
        )
    return mcp_server


def serve() -> None:
    """Serve a client over standard input and output until it ends. Raises RequestError."""
    logger.info("serving a coding agent")
    server().run("stdio")


def _answering(call: Call, mask: Callable[[str], str]) -> Call:
    """Return the call with its result as masked JSON, and its errors as text for an agent."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(call)
    def answer(*args: Any, **kwargs: Any) -> str:
        try:
            # Masked before it becomes JSON, which escapes characters of secrets.
            return json.dumps(_masked(call(*args, **kwargs), mask), default=str)
        except (SkyError, OSError, ValueError) as problem:
            logger.warning("tool failed: tool=%s error=%s", call.__name__, type(problem).__name__)
            raise ToolError(mask(_error_text(problem))) from None

    return cast(Call, answer)


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    """Return a result with all its texts masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _masked(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, mask) for item in value]
    return value


def _error_text(problem: Exception) -> str:
    """Return an error with its code, the rank's traceback and its notes."""
    code = f" [{problem.code}]" if isinstance(problem, SkyError) else ""
    parts = [f"{type(problem).__name__}{code}: {problem}"]
    if isinstance(problem, RankError):
        parts += [without_colours("\n".join(problem.traceback))]
    parts += getattr(problem, "__notes__", [])
    return sanitized("\n".join(parts))


def _check_confirmed(pool: str, confirm: str, what: str) -> None:
    if confirm != pool:
        raise RequestError(f"{what}: to do it, call again with confirm={pool!r}")


def _selection(ranks: str | None) -> Selection | None:
    return None if ranks is None else Selection.of(ranks)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} … {len(text)} characters"


def _say(text: str) -> None:
    """Print progress to standard error: standard output belongs to the protocol."""
    print_sanitized(text, file=sys.stderr)
