"""Cells on the ranks: from a request and the cell's text to values by rank, or one error."""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import functools
import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.core.alias import default_aliases
from IPython.core.getipython import get_ipython

from skymagic.display.controls import Actions
from skymagic.display.run_line import SHOWN_BYTES, RunState, RunSummary, RunView
from skymagic.display.screen import NotebookScreen, Screen, print_note
from skymagic.errors import CellSyntaxError, PoolError, RequestError, ResultError
from skymagic.jobs import inspection, profiles
from skymagic.jobs.failures import failure
from skymagic.plan.requests import RunRequest
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import rank_words, size
from skymagic.pool import Pool
from skymagic.pool.runs import UnfinishedRun
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.results import Unavailable
from skymagic.run.state import Limits, Report, RunSpec, end_of
from skymagic.wire.order import LAST_VALUE, NOT_DEFINED, RunCell


@dataclass(frozen=True)
class Cell:
    """Text of a cell's body, and its position in the cell that the user sees."""

    body: str
    above: tuple[str, ...] = ()
    """Lines of the cell above the body, such as the magic's line."""
    execution_count: int = 1
    compiler_flags: int = 0
    """Flags of ``__future__`` that earlier cells of the notebook have set."""

    @property
    def source(self) -> str:
        """The body with the line numbers that the user sees: the lines above it become comments.

        A body that begins with a cell magic stays unchanged, because the magic must come first.
        """
        if self.body.lstrip().startswith("%%"):
            return self.body
        return "".join(f"# {line}\n" for line in self.above) + dedented(self.body)


def cell_number(shell: Any) -> int:
    """Return the number of the cell that an IPython shell is executing."""
    inputs = shell.history_manager.input_hist_raw if shell.history_manager else [""]
    # some versions increment the count before a cell runs, some after it
    return int(min(shell.execution_count, len(inputs) - 1))


@dataclass
class Values:
    """Results of a successful run.

    Attributes:
        value: the last expression's values, in the order of the targets.
        variables: the gathered variables' values, in the same order.
        types: name of each variable's type on the first rank, without its module.
    """

    ranks: tuple[int, ...]
    value: list[Any] = field(default_factory=list)
    variables: dict[str, list[Any]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def dedented(body: str) -> str:
    """Remove the indentation of the body's first line, as IPython does with plain cells."""
    first = next((line for line in body.splitlines() if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    if not indent:
        return body
    return "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))


def lines_above_body(raw: str, body: str) -> tuple[str, ...]:
    """Return the lines of the user's cell above the body; none if the cell does not end with it."""
    body, raw = body.rstrip(), raw.rstrip()
    head = raw.removesuffix(body)
    return tuple(head.splitlines()) if body and head != raw and head.endswith("\n") else ()


def future_flags(flags: int) -> int:
    """Return only those compiler flags that ``from __future__ import …`` sets."""
    features = [getattr(__future__, name) for name in __future__.all_feature_names]
    mask: int = functools.reduce(operator.or_, (feature.compiler_flag for feature in features))
    return flags & mask


def check_syntax(source: str, transform: Callable[[str], str]) -> str:
    """Return the cell as plain Python.

    Raises:
        CellSyntaxError: the cell is not valid; with the cell's own line numbers. Nothing was sent.
    """
    try:
        plain = transform(source)
        compile(plain, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError) as error:
        raise CellSyntaxError(
            "\n".join([describe_syntax_error(error), *notebook_syntax(error)])
        ) from None
    return plain


_FIRST_WORD = re.compile(r"\s*(\w+)\s+\S")


def notebook_syntax(wrong: Exception) -> list[str]:
    """Explain syntax that only the notebook's prompt understands.

    That is: magics without a percent sign, aliases, and calls without parentheses.
    """
    shell = get_ipython()
    match = _FIRST_WORD.match((wrong.text or "") if isinstance(wrong, SyntaxError) else "")
    if shell is None or match is None:
        return []
    word = match[1]
    magic = shell.magics_manager.magics["line"].get(word)
    is_builtin_magic = getattr(magic, "__module__", "").startswith(("IPython.", "ipykernel."))
    if is_builtin_magic and (not shell.alias_manager.is_alias(word) or word in BUILTIN_ALIASES):
        return [f"automagic works in plain cells only: write %{word}"]
    if magic is not None:
        return [
            f"{word} is a magic or an alias of the notebook, which ranks do not have: define it in "
            f"a %%sky_broadcast cell, and write %{word}"
        ]
    if shell.autocall and callable(shell.user_ns.get(word, getattr(builtins, word, None))):
        return [f"autocall works in plain cells only: write {word}(…)"]
    return []


BUILTIN_ALIASES = frozenset(name for name, _ in default_aliases())
"""Aliases that every IPython has, including the ranks'."""


def describe_syntax_error(wrong: Exception) -> str:
    """Describe a syntax error in a cell, with its position, as Python does."""
    if not isinstance(wrong, SyntaxError):
        return str(wrong)
    line = (wrong.text or "").rstrip("\n")
    pointer = " " * max(0, (wrong.offset or 1) - 1) + "^"
    return f"{wrong.msg} (line {wrong.lineno} of the cell)\n    {line}\n    {pointer}"


def spec_of(request: RunRequest, pool: Pool, cell: Cell, source_without_magics: str) -> RunSpec:
    """Build the specification of a cell's run. Raises RequestError."""
    ranks, visible = request.participants(pool.world_size)
    senders = ranks[:1] if request.head else ranks
    order = RunCell(
        ranks=ranks,
        visible_ranks=visible,
        # a handle's result() gives them
        value_ranks=senders if request.output or request.noblock else (),
        gather=request.gather,
        gather_ranks=senders if request.gather else (),
        profile=profiled_ranks(request, pool.world_size, ranks),
        output=request.output or "",
        head=request.head,
        execution_count=cell.execution_count,
        compiler_flags=cell.compiler_flags,
    )
    return RunSpec(
        order,
        cell.source,
        source_without_magics,
        push=request.push,
        no_push=request.no_push,
        fresh=request.fresh,
        waits=request.busy == "wait",
    )


def profiled_ranks(request: RunRequest, world_size: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that profile the cell. Raises RequestError for ranks that do not run it."""
    if request.profile is None or request.profile.text == "head":
        return ranks[: request.profile is not None]
    try:
        profiled = ranks if request.profile.text == "all" else request.profile.ranks(world_size)
    except RequestError as error:
        raise RequestError([f"--profile: {mistake}" for mistake in error.mistakes]) from None
    if outside := [rank for rank in profiled if rank not in ranks]:
        raise RequestError(f"--profile: {rank_words(outside)}: left out by --targets")
    return profiled


def broadcast(
    pool: Pool,
    spec: RunSpec,
    limits: Limits,
    screen: Screen | None = None,
    *,
    stop: StopSignal | None = None,
    names: Sequence[str] = (),
    view: RunView | None = None,
) -> Values:
    """Run a cell and collect its values.

    Args:
        screen: shows the output; the notebook by default.
        stop: ends the run from another thread.
        names: the variables that will hold the results, for the run's final line.
        view: the run's progress line, unless it is created here.

    Raises:
        RunError: a rank failed, died or was interrupted; the time limit was exceeded; or values
            could not be sent back.
        CaptureError: names cannot be shipped.
    """
    stop = stop or StopSignal()
    return _run_and_collect(
        pool,
        spec,
        limits,
        lambda shown: pool.runs.run(spec, shown, limits, stop),
        stop,
        screen,
        names,
        view,
    )


def follow(pool: Pool, unfinished: UnfinishedRun, limits: Limits) -> Values:
    """Show the rest of a cell that another notebook started, and collect its values.

    Raises as `broadcast` does.
    """
    spec, stop = unfinished.spec, StopSignal()
    return _run_and_collect(
        pool,
        spec,
        limits,
        lambda shown: pool.runs.follow(spec, unfinished.run, shown, limits, stop),
        stop,
        names=tuple(name for name in (spec.order.output, *spec.order.gather) if name),
        partly=True,
        elapsed=unfinished.seconds,
    )


def _run_and_collect(
    pool: Pool,
    spec: RunSpec,
    limits: Limits,
    run: Callable[[Screen], Report],
    stop: StopSignal,
    screen: Screen | None = None,
    names: Sequence[str] = (),
    view: RunView | None = None,
    *,
    partly: bool = False,
    elapsed: float = 0.0,
) -> Values:
    """Run a cell and collect its values; for the arguments see `broadcast`.

    Args:
        partly: accept the values of some ranks if the others were lost while no notebook was
            attached.
        elapsed: seconds since the run began.
    """
    if view is None and limits.view_after < math.inf and screen is None:
        actions = Actions(
            interrupt.stop_from_any_thread(stop),
            lambda: inspection.stacks(pool, spec.ranks),
            pool.picture,
        )
        view = RunView(limits.view_after, actions if pool.defaults.buttons else None, elapsed)
    notebook = NotebookScreen(spec.order.visible_ranks, view)
    with interrupt.deferred() as interrupts, showing_end(view, names) as ending:
        report = ending.report = run(screen or notebook)
        notebook.finish()
        if spec.order.profile:
            _keep_profiles(report, spec, pool)
        try:
            # with `partly`, ranks lost while no notebook was attached cost only their own values
            if not report.succeeded and not (partly and has_only_losses(report)):
                discard(report, pool)
                raise failure(report, pool, limits, task=bool(spec.extra))
            ending.begin_gathering(sent_bytes(report))
            with interrupts.interruptible():
                return collect(report, spec, pool)
        except KeyboardInterrupt:
            discard(report, pool)
            raise
        finally:
            pool.runs.deliver(report.run, spec.ranks)


def _keep_profiles(report: Report, spec: RunSpec, pool: Pool) -> None:
    """Write the profiles of ``--profile``, also for a failed cell, and show where they are."""
    profiled, number = spec.order.profile, spec.order.execution_count
    refs = {rank: ref for rank in profiled if (ref := report.ranks[rank].profile) is not None}
    try:
        found_profiles = {
            rank: profiles.Profile.parse(pool.shipper.unpack(ref))
            for rank, ref in refs.items()
            if not ref.error
        }
        lines = profiles.write_profiles(found_profiles, number, Path.cwd())
    except OSError as problem:  # it must not hide a failure of the cell
        lines = [f"the profile of this cell could not be saved: {problem}"]
    for line in lines:
        print_note(line)


def has_only_losses(report: Report) -> bool:
    """Return True if some ranks have succeeded and all others cannot be reached."""
    lost = [
        rank for rank in report.ranks.values() if rank.died is not None and rank.died.status is None
    ]
    succeeded = [
        rank
        for rank in report.ranks.values()
        if rank.outcome is not None and rank.outcome.succeeded
    ]
    return (
        bool(succeeded)
        and len(lost) + len(succeeded) == len(report.ranks)
        and not report.interrupted
    )


def discard(report: Report, pool: Pool) -> None:
    """Release the values that ranks sent back in a run that failed on others."""
    for rank in report.ranks.values():
        for ref in rank.values.values():
            pool.shipper.discard(ref)


def collect(report: Report, spec: RunSpec, pool: Pool) -> Values:
    """Unpack the values from the ranks.

    A value that could not be sent back is replaced by `Unavailable` and named in `problems`.
    """
    lost = {
        number: rank.died.tail for number, rank in report.ranks.items() if rank.died is not None
    }
    problems = [
        f"rank {number} cannot be reached: {reason}" for number, reason in sorted(lost.items())
    ]
    undefined: dict[str, list[int]] = {}
    refused: dict[str, list[int]] = {}
    order = spec.order
    values_by_rank = [report.ranks[rank].values for rank in order.ranks]
    pool.shipper.prefetch(ref for values in values_by_rank for ref in values.values())

    def fetch(rank: int, name: str) -> Any:
        ref = report.ranks[rank].values.get(name)
        reason = lost.get(rank, "it was not sent") if ref is None else ref.error
        if ref is not None and not reason:
            try:
                return pool.shipper.unpack(ref)
            except Exception as problem:
                reason = f"{type(problem).__name__}: {problem}"
        if reason == NOT_DEFINED:
            undefined.setdefault(name, []).append(rank)
        elif rank not in lost:
            refused.setdefault(f"{name}: {reason}", []).append(rank)
        return Unavailable(rank, reason)

    values = Values(order.ranks)
    values.value = [fetch(rank, LAST_VALUE) for rank in order.value_ranks]
    if spec.beside and not order.output:
        refused.clear()  # an optional value: its placeholder carries the reason
    gathered = {name: [fetch(rank, name) for rank in order.gather_ranks] for name in order.gather}
    # a name that no rank has leaves the notebook's own value unchanged
    undefined_everywhere = {
        name for name, ranks in undefined.items() if len(ranks) == len(order.gather_ranks)
    }
    values.variables = {
        name: listed for name, listed in gathered.items() if name not in undefined_everywhere
    }
    first = report.ranks[order.gather_ranks[0]].values if order.gather else {}
    values.types = {
        name: first[name].type.rpartition(".")[2] for name in values.variables if name in first
    }
    names = {*pool.shipper.names()} - {*undefined}
    messages = [f"{rank_words(ranks)}: {reason}" for reason, ranks in refused.items()]
    messages += [
        f"{name} {NOT_DEFINED} on {rank_words(ranks)}{did_you_mean(name, names)}"
        for name, ranks in undefined.items()
    ]
    values.problems = (*problems, *messages)
    return values


def result_error(values: Values, saved_names: Sequence[str]) -> ResultError:
    """Create the error that names the missing values, and the variables that hold the others."""
    lists = [values.value, *values.variables.values()]
    has_values = any(not isinstance(value, Unavailable) for listed in lists for value in listed)
    hint = (
        f"results that arrived are in {', '.join(saved_names)}"
        if saved_names and has_values
        else ""
    )
    error = ResultError("\n".join(filter(None, [*values.problems, hint])))
    error.values = values
    return error


@dataclass
class RunEnding:
    """Data for a run's final line."""

    view: RunView | None
    report: Report | None = None
    gathered: int = 0
    """Number of bytes to gather."""
    since: float = 0.0

    def begin_gathering(self, nbytes: int) -> None:
        """Record that the cell is over and its values are being gathered."""
        self.gathered, self.since = nbytes, time.monotonic()
        if (
            self.view is not None
            and self.view.shown
            and self.report is not None
            and nbytes >= SHOWN_BYTES
        ):
            activity = f"gathering {size(nbytes)}"
            self.view.draw(RunState(len(self.report.ranks), self.view.seconds, activity=activity))


@contextlib.contextmanager
def showing_end(
    view: RunView | None,
    names: Sequence[str],
    summarize: Callable[[RunSummary], RunSummary] = lambda end: end,
) -> Iterator[RunEnding]:
    """Show a run's final line at the end of the block, even after an error.

    Args:
        summarize: converts the summary of the run before it is shown.
    """
    ending, pool_ended = RunEnding(view), False
    try:
        yield ending
    except PoolError:
        pool_ended = True
        raise
    finally:
        if view is not None and ending.report is not None:
            gathered = (
                (ending.gathered, time.monotonic() - ending.since) if ending.since else (0, 0.0)
            )
            view.end(summarize(end_of(ending.report, view.seconds, names, gathered)))
        elif view is not None and view.shown:
            view.end(RunSummary(0, view.seconds, interrupted=not pool_ended, pool_ended=pool_ended))


def sent_bytes(report: Report) -> int:
    """Return the number of bytes of the values that the ranks have packed."""
    refs = [ref for rank in report.ranks.values() for ref in rank.values.values()]
    files = {(ref.file, ref.node): ref.nbytes for ref in refs if ref.file}
    return sum(files.values())
