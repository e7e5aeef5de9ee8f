"""Cells and scripts of one shell on pools: where they run, now or beside the notebook, and which variables they leave."""

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
from skymagic.magics.beside import RunHandle
from skymagic.magics.config import SkyMagic
from skymagic.magics.rendering import UNWRAPPED, ResultTables, arrived
from skymagic.plan.requests import PoolRequest, RunRequest, ShellRequest
from skymagic.plan.units import rank_words
from skymagic.pool import Pool, making
from skymagic.pool.runs import UnfinishedRun
from skymagic.run import interrupt
from skymagic.run.report import Limits, RunSpec

T = TypeVar("T")


def usage(call: Callable[[], T]) -> T:
    """Call, and turn misuse into IPython's one-line UsageError."""
    try:
        return call()
    except RequestError as refused:
        raise UsageError(str(refused)) from None


def named(name: str | None) -> PoolRequest:
    """A request for a pool that runs."""
    return PoolRequest(name=name, stated=frozenset())


class ShellRuns:
    """Runs what the magics of one shell ask for."""

    def __init__(
        self,
        shell: InteractiveShell,
        settings: SkyMagic,
        auto: transformers.Auto,
        results: ResultTables,
    ) -> None:
        self._shell, self._settings, self._auto, self._results = shell, settings, auto, results
        self.pending: list[RunHandle] = []
        """Runs beside the notebook that still run, and some that have ended."""
        self._unwrapped_told = False
        """Whether the user was told that `-g` brings the module within a wrapper."""
        assignments.remember_environment()
        self._assigned = assignments.watch(shell.user_ns)
        shell.events.register("pre_run_cell", lambda info: self._assigned.begin())
        shell.events.register("post_run_cell", self._cell_ends)

    def _cell_ends(self, result: Any) -> None:
        refused = (
            result.error_before_exec is not None
        )  # by a transformer, which would refuse it again
        source = partial(self._shell.transform_cell, "" if refused else result.info.raw_cell)
        self._assigned.end(source, completed=result.success)
        error, space = result.error_in_exec, self._shell.user_ns
        if error is not None and (
            hint := transformers.after_error(error, space, self._results.kept, result.info.raw_cell)
        ):
            print_note(hint)

    # -- where -------------------------------------------------------------------------------------------------------

    def ensure(self, request: PoolRequest, *, resize: bool = False, start: bool = False) -> Pool:
        """The pool that a request describes, with the rest of what another notebook began on it; the options are those of `making.ensure`."""
        ensure = partial(
            making.ensure, request, self._shell.user_ns, self._settings.defaults(), print_note
        )
        return usage(partial(ensure, resize=resize, start=start, resume=self._resume))

    def _resume(self, one: Pool, unfinished: UnfinishedRun) -> None:
        with interrupt.deferred():
            self.follow(one, unfinished)

    def pool_of(self, request: PoolRequest) -> Pool:
        """The pool that a run asks for: by options, by name, or the one used last."""
        if request.given() - {"name"}:
            return self.ensure(request, start=True)
        return usage(lambda: making.ready(request.name, print_note))

    # -- now, or beside the notebook ---------------------------------------------------------------------------------

    def run(self, request: RunRequest, body: str) -> RunHandle | None:
        """Run a cell and keep its values; with --noblock, return at once."""
        cell = self._cell(body)
        at_once = not request.pool.given() - {"name"} or making.runs_already(request.pool)
        pending = self._beside_or_now(
            request.noblock, cell, lambda beside: self._run_now(request, cell, beside)
        )
        if pending is not None and at_once:  # making a pool takes minutes
            pending.wait_taken()
        return pending

    def run_script(self, request: ShellRequest, body: str) -> RunHandle | None:
        """Run a script on the nodes; with --noblock or --detach, return at once."""
        cell = self._cell(body)
        beside = request.noblock or request.detach
        return self._beside_or_now(beside, cell, lambda beside: self._script(request, cell, beside))

    def _beside_or_now(
        self, noblock: bool, cell: broadcast.Cell, call: Callable[[RunHandle | None], Any]
    ) -> RunHandle | None:
        """Call now, or on a thread of its own, with the handle that the user has of it."""
        if not noblock:
            call(None)
            return None
        pending = RunHandle(
            lambda handle: self._run_beside(call, handle),
            cell.execution_count,
            buttons=self._settings.buttons,
        )
        self.pending = [*(one for one in self.pending if not one.done()), pending]
        return pending

    def _run_beside(self, call: Callable[[RunHandle | None], Any], handle: RunHandle) -> Any:
        """Run on a thread, where nobody else shows what is raised."""
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
        one = self.pool_of(request.pool)
        one.defaults = defaults = self._settings.defaults()  # %config counts from the next cell on
        spec = usage(lambda: broadcast.spec_of(request, one, cell, source))
        if not cell.above and self._auto.takes(cell.source):
            print_note(f"[{rank_words(spec.ranks)} of pool {one.name!r}]")
        if request.dry_run:
            print(display.shipment(one.runs.preview(spec).items))
            return None
        limits = Limits(
            timeout=request.timeout,
            grace=defaults.grace,
            stall_after=defaults.stall_after,
            view_after=defaults.view_after,
        )
        names = (*([request.output] if request.output else []), *request.gather)
        known = _known(spec, one, beside)
        return broadcast.broadcast(
            one, known, limits, names=names, **(beside.given if beside else {})
        )

    def _script(
        self, request: ShellRequest, cell: broadcast.Cell, beside: RunHandle | None
    ) -> script.Outcome:
        """How it ended on the nodes is kept also when it failed."""
        one = usage(lambda: making.ready(request.pool, print_note))
        one.defaults = defaults = self._settings.defaults()
        spec = _known(usage(lambda: script.spec_of(request, one, cell)), one, beside)
        with interrupt.deferred():
            limits = Limits(
                timeout=request.timeout, grace=defaults.grace, view_after=defaults.view_after
            )
            outcome = script.run(one, spec, limits, **(beside.given if beside else {}))
            return self._ended(outcome, request.output)

    def _ended(self, outcome: script.Outcome, output: str | None) -> script.Outcome:
        if output:
            self._shell.user_ns[output] = outcome.value
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _cell(self, body: str) -> broadcast.Cell:
        """The body in its place in the cell that the user sees."""
        shell = self._shell
        inputs = shell.history_manager.input_hist_raw if shell.history_manager else [""]
        flags = broadcast.future_flags(shell.compile.flags)
        return broadcast.Cell(
            body, broadcast.above_body(inputs[-1], body), broadcast.number_in(shell), flags
        )

    # -- what comes back ---------------------------------------------------------------------------------------------

    def follow(self, one: Pool, unfinished: UnfinishedRun) -> None:
        """Show the rest of a run that another notebook began, and keep what it gives."""
        spec, defaults = unfinished.spec, self._settings.defaults()
        print_note(unfinished.words)
        one.defaults = defaults
        limits = Limits(
            grace=defaults.grace, stall_after=defaults.stall_after, view_after=defaults.view_after
        )
        if spec.job == "script":
            self._ended(script.follow(one, spec, unfinished.run, limits), spec.output)
            return
        values = broadcast.follow(one, spec, unfinished.run, limits)
        request = RunRequest(
            pool=named(one.name), output=spec.output or None, gather=spec.gather, head=spec.head
        )
        self._keep(values, request)

    def pull(self, request: RunRequest, renamed: dict[str, str]) -> None:
        """Bring variables here, some by another name, and say what has come."""
        with interrupt.deferred():
            values = self._values(request, self._cell(""))
            self._keep(values, request, renamed)
            if values is None:  # of a preview
                return
            for name, listed in values.variables.items():
                value, kind = listed[0] if request.head else listed, values.types.get(name, "")
                print_note(
                    arrived(renamed.get(name) or name, value, values.ranks, kind, head=request.head)
                )

    def _keep(
        self,
        values: broadcast.Values | None,
        request: RunRequest,
        renamed: dict[str, str] | None = None,
    ) -> None:
        """Put values into the notebook's variables; those that could not come back raise after the others are kept."""
        if values is None:
            return
        found: dict[str, list[Any]] = dict(values.variables)
        if request.output:
            found[request.output] = values.value
        for name, listed in found.items():
            target = (renamed or {}).get(name) or name
            self._shell.user_ns[target] = listed[0] if request.head else listed
            self._results.remember(target, () if request.head else values.ranks)
        own = {name: kind for name, kind in values.types.items() if name not in (renamed or {})}
        self.pool_of(request.pool).shipper.gathered(own, values.ranks)
        unwrapped = [name for name, kind in values.types.items() if kind in UNWRAPPED]
        if unwrapped and not self._unwrapped_told and renamed is None:
            self._unwrapped_told = True
            print_note(
                f"{', '.join(unwrapped)}: DDP unwrapped; what was {unwrapped[0]}.module on the ranks is {unwrapped[0]} here"
            )
        if values.problems:
            raise broadcast.result_error(values, list(found))


def _known(spec: RunSpec, pool: Pool, beside: RunHandle | None) -> RunSpec:
    """The run as the handle and the pool know of each other."""
    if beside is None:
        return spec
    beside.pool, beside.ranks = pool, spec.ranks
    return replace(spec, beside=True, taken=beside.taken.set)
