"""Cells and scripts of one shell on pools.

Selects the pool, runs in the foreground or background, and sets the output variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from skymagic.data.capture import assignments
from skymagic.display import text as display
from skymagic.display.live import write
from skymagic.display.screen import print_note
from skymagic.errors import RequestError, SkyError
from skymagic.jobs import cell as broadcast
from skymagic.jobs import script
from skymagic.magics import transformers
from skymagic.magics.background import RunHandle
from skymagic.magics.config import SkyMagic
from skymagic.magics.rendering import UNWRAPPED, ResultTables, arrival_line
from skymagic.plan.requests import PoolRequest, RunRequest, ShellRequest
from skymagic.plan.units import rank_words
from skymagic.pool import Pool, launch
from skymagic.pool.runs import UnfinishedRun
from skymagic.run import interrupt
from skymagic.run.state import Limits, RunSpec

T = TypeVar("T")


def usage(call: Callable[[], T]) -> T:
    """Call, and convert misuse to IPython's one-line UsageError."""
    try:
        return call()
    except RequestError as refused:
        raise UsageError(str(refused)) from None


def request_for(name: str | None) -> PoolRequest:
    """Return a request for a running pool."""
    return PoolRequest(name=name, stated=frozenset())


class ShellRuns:
    """Runner of the cells and scripts of one shell."""

    def __init__(
        self,
        shell: InteractiveShell,
        settings: SkyMagic,
        auto: transformers.Auto,
        results: ResultTables,
    ) -> None:
        self._shell, self._settings, self._auto, self._results = shell, settings, auto, results
        self.pending: list[RunHandle] = []
        """Background runs that are running, and some that have ended."""
        self._unwrapped_noted = False
        """True once the user was informed that `-g` fetches the module inside a wrapper."""
        assignments.remember_environment()
        self._assigned = assignments.watch(shell.user_ns)
        shell.events.register("pre_run_cell", lambda info: self._assigned.begin())
        shell.events.register("post_run_cell", self._cell_ends)

    def _cell_ends(self, result: Any) -> None:
        # refused by a transformer, which would refuse it again
        refused = result.error_before_exec is not None
        source = partial(self._shell.transform_cell, "" if refused else result.info.raw_cell)
        self._assigned.end(source, completed=result.success)
        error, space = result.error_in_exec, self._shell.user_ns
        if error is not None and (
            hint := transformers.hint_after_error(
                error, space, self._results.kept, result.info.raw_cell
            )
        ):
            print_note(hint)

    # -- pools -------------------------------------------------------------------------------------

    def ensure(self, request: PoolRequest, *, resize: bool = False, start: bool = False) -> Pool:
        """Return the pool that a request describes.

        Runs that another notebook started on it are resumed. The options are those of
        `launch.ensure`.
        """
        ensure = partial(
            launch.ensure, request, self._shell.user_ns, self._settings.defaults(), print_note
        )
        return usage(partial(ensure, resize=resize, start=start, resume=self._resume))

    def _resume(self, pool: Pool, unfinished: UnfinishedRun) -> None:
        with interrupt.deferred():
            self.follow(pool, unfinished)

    def pool_of(self, request: PoolRequest) -> Pool:
        """Return the pool that a run requests by options or name, or the most recently used one."""
        if request.stated_fields() - {"name"}:
            return self.ensure(request, start=True)
        return usage(lambda: launch.ready_pool(request.name, print_note))

    # -- foreground and background -----------------------------------------------------------------

    def run(self, request: RunRequest, body: str) -> RunHandle | None:
        """Run a cell and store its values; with --noblock, return immediately."""
        cell = self._cell(body)
        pool_is_running = not request.pool.stated_fields() - {"name"} or launch.has_running_pool(
            request.pool
        )
        handle = self._run_now_or_in_background(
            request.noblock, cell, lambda beside: self._run_now(request, cell, beside)
        )
        if handle is not None and pool_is_running:  # else making the pool first takes minutes
            handle.wait_until_variables_taken()
        return handle

    def run_script(self, request: ShellRequest, body: str) -> RunHandle | None:
        """Run a script on the nodes; with --noblock or --detach, return immediately."""
        cell = self._cell(body)
        beside = request.noblock or request.detach
        return self._run_now_or_in_background(
            beside, cell, lambda beside: self._script(request, cell, beside)
        )

    def _run_now_or_in_background(
        self, noblock: bool, cell: broadcast.Cell, call: Callable[[RunHandle | None], Any]
    ) -> RunHandle | None:
        """Call in the foreground, or in a background thread with the handle that the user gets."""
        if not noblock:
            call(None)
            return None
        pending = RunHandle(
            lambda handle: self._run_beside(call, handle),
            cell.execution_count,
            buttons=self._settings.buttons,
        )
        self.pending = [*(run for run in self.pending if not run.done()), pending]
        return pending

    def _run_beside(self, call: Callable[[RunHandle | None], Any], handle: RunHandle) -> Any:
        """Run on a background thread and print errors, which are shown nowhere else."""
        try:
            return call(handle)
        except (SkyError, UsageError) as problem:
            lines = (
                problem._render_traceback_()
                if isinstance(problem, SkyError)
                else [f"UsageError: {problem}"]
            )
            write("stderr", "\n".join([*lines, ""]))
            raise

    def _run_now(
        self, request: RunRequest, cell: broadcast.Cell, beside: RunHandle | None
    ) -> broadcast.Values | None:
        with interrupt.deferred():
            values = self._values(request, cell, beside)
            if values is not None:
                self._keep(values, request)
            return values

    def _values(
        self, request: RunRequest, cell: broadcast.Cell, beside: RunHandle | None = None
    ) -> broadcast.Values | None:
        with self._auto.paused():
            source = broadcast.check_syntax(cell.source, self._shell.transform_cell)
        pool = self.pool_of(request.pool)
        # %config applies from the next cell on
        pool.defaults = defaults = self._settings.defaults()
        spec = usage(lambda: broadcast.spec_of(request, pool, cell, source))
        if not cell.above and self._auto.is_broadcast(cell.source):
            print_note(f"[{rank_words(spec.ranks)} of pool {pool.name!r}]")
        if request.dry_run:
            print(display.shipment(pool.runs.preview(spec).items))
            return None
        limits = Limits(
            timeout=request.timeout,
            grace=defaults.grace,
            stall_after=defaults.stall_after,
            view_after=defaults.view_after,
        )
        names = (*([request.output] if request.output else []), *request.gather)
        linked_spec = _link_run(spec, pool, beside)
        return broadcast.broadcast(
            pool,
            linked_spec,
            limits,
            names=names,
            stop=beside.stop if beside else None,
            view=beside.view if beside else None,
        )

    def _script(
        self, request: ShellRequest, cell: broadcast.Cell, beside: RunHandle | None
    ) -> script.Outcome:
        """Run a script and store its outcome by node, also if it failed."""
        pool = usage(lambda: launch.ready_pool(request.pool, print_note))
        pool.defaults = defaults = self._settings.defaults()
        spec = _link_run(usage(lambda: script.spec_of(request, pool, cell)), pool, beside)
        with interrupt.deferred():
            limits = Limits(
                timeout=request.timeout, grace=defaults.grace, view_after=defaults.view_after
            )
            outcome = script.run(
                pool,
                spec,
                limits,
                stop=beside.stop if beside else None,
                view=beside.view if beside else None,
            )
            return self._store_outcome(outcome, request.output)

    def _store_outcome(self, outcome: script.Outcome, output: str | None) -> script.Outcome:
        if output:
            self._shell.user_ns[output] = outcome.value
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _cell(self, body: str) -> broadcast.Cell:
        """Return the body with its position in the cell that the user sees."""
        shell = self._shell
        inputs = shell.history_manager.input_hist_raw if shell.history_manager else [""]
        flags = broadcast.future_flags(shell.compile.flags)
        return broadcast.Cell(
            body, broadcast.lines_above_body(inputs[-1], body), broadcast.cell_number(shell), flags
        )

    # -- results -----------------------------------------------------------------------------------

    def follow(self, pool: Pool, unfinished: UnfinishedRun) -> None:
        """Show the rest of a run that another notebook started, and store its results."""
        order, defaults = unfinished.spec.order, self._settings.defaults()
        print_note(unfinished.text)
        pool.defaults = defaults
        limits = Limits(
            grace=defaults.grace, stall_after=defaults.stall_after, view_after=defaults.view_after
        )
        if order.job == "script":
            self._store_outcome(script.follow(pool, unfinished, limits), order.output)
            return
        values = broadcast.follow(pool, unfinished, limits)
        request = RunRequest(
            pool=request_for(pool.name),
            output=order.output or None,
            gather=order.gather,
            head=order.head,
        )
        self._keep(values, request)

    def pull(self, request: RunRequest, renamed: dict[str, str]) -> None:
        """Fetch variables, some under another name, and print a line about each."""
        with interrupt.deferred():
            values = self._values(request, self._cell(""))
            self._keep(values, request, renamed)
            if values is None:  # a preview
                return
            for name, listed in values.variables.items():
                value, kind = listed[0] if request.head else listed, values.types.get(name, "")
                print_note(
                    arrival_line(
                        renamed.get(name) or name, value, values.ranks, kind, head=request.head
                    )
                )

    def _keep(
        self,
        values: broadcast.Values | None,
        request: RunRequest,
        renamed: dict[str, str] | None = None,
    ) -> None:
        """Store values in the notebook's variables.

        Values that could not be fetched raise an error after the others are stored.
        """
        if values is None:
            return
        results: dict[str, list[Any]] = dict(values.variables)
        if request.output:
            results[request.output] = values.value
        for name, listed in results.items():
            target = (renamed or {}).get(name) or name
            self._shell.user_ns[target] = listed[0] if request.head else listed
            self._results.remember(target, () if request.head else values.ranks)
        types_by_name = {
            name: kind for name, kind in values.types.items() if name not in (renamed or {})
        }
        self.pool_of(request.pool).shipper.gathered(types_by_name, values.ranks)
        unwrapped = [name for name, kind in values.types.items() if kind in UNWRAPPED]
        if unwrapped and not self._unwrapped_noted and renamed is None:
            self._unwrapped_noted = True
            print_note(
                f"{', '.join(unwrapped)}: DDP unwrapped; what was {unwrapped[0]}.module on "
                f"the ranks is {unwrapped[0]} here"
            )
        if values.problems:
            raise broadcast.result_error(values, list(results))


def _link_run(spec: RunSpec, pool: Pool, beside: RunHandle | None) -> RunSpec:
    """Link the handle, the pool and the run, and return the linked run."""
    if beside is None:
        return spec
    beside.pool, beside.ranks = pool, spec.ranks
    return replace(spec, beside=True, taken=beside.taken.set)
