"""The magics: decorate, parse to a frozen request, one call, show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class

from skymagic import plugins, providers
from skymagic.api import costs, disk, executing, logs, rented, running
from skymagic.api.compute import Compute
from skymagic.api.offers import offers, rentable
from skymagic.data.capture import installed
from skymagic.display import text as display
from skymagic.display.screen import Copying, print_note, show_status, show_table
from skymagic.display.sending import write
from skymagic.errors import CloudError, PoolError, RequestError, SkyError
from skymagic.files.messages import summary
from skymagic.jobs import cell as broadcast
from skymagic.jobs import clone, script
from skymagic.magics import auto, completion, debugging, inspection, rendering
from skymagic.magics.arguments import cell_magics, line_magics, pool_magic
from skymagic.magics.arguments.help import help_alone, with_help
from skymagic.magics.beside import Run
from skymagic.magics.config import SkyMagic
from skymagic.magics.results import ResultTables
from skymagic.plan.requests import PoolRequest, RunRequest, ShellRequest
from skymagic.plan.selection import Selection
from skymagic.plan.suggest import LazyNames
from skymagic.plan.units import rank_words
from skymagic.pool import Pool, notebooks, records, registry
from skymagic.pool.attaching import Unfinished
from skymagic.pool.status import now
from skymagic.providers.local import gpus as local_gpus
from skymagic.run import interrupt
from skymagic.run.report import Limits
from skymagic.run.spec import RunSpec

T = TypeVar("T")


# Other packages may bring more; looking for those takes longer than many a cell.
EXISTING_NAMES = {
    "plugins": LazyNames(plugins.TABLE, plugins.names),
    "providers": LazyNames(("auto", *providers.TABLE), lambda: ["auto", *providers.names()]),
}


def usage(call: Callable[[], T]) -> T:
    """Call, and turn misuse into IPython's one-line UsageError."""
    try:
        return call()
    except RequestError as refused:
        raise UsageError(str(refused)) from None


@magics_class
class SkyMagics(Magics):
    """All magics of skymagic, registered with one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        for named in self.magics.values():
            named.update({name: with_help(name, method) for name, method in named.items()})
        self.settings = SkyMagic(parent=shell)
        shell.configurables.append(self.settings)
        self.auto = auto.Auto(shell)
        self.results = ResultTables(shell)
        self._round_robin: Iterator[int] = itertools.count()
        self.pending: list[Run] = []

    # -- pools -------------------------------------------------------------------------------------------------------

    @line_cell_magic
    def sky_pool(self, line: str, cell: str | None = None) -> Compute | None:
        request = usage(lambda: pool_magic.parse_pool(line, self.settings.defaults(), body=cell, **EXISTING_NAMES))
        if request.dry_run:
            print(
                usage(
                    lambda: registry.preview(request, print_note, self.shell.user_ns, self.settings.defaults())
                ).text()
            )
            return None
        return Compute.of(self._ensure(request, resize=True))

    def _ensure(self, request: PoolRequest, *, resize: bool = False, start: bool = False) -> Pool:
        defaults = self.settings.defaults()
        ensure = partial(registry.ensure, request, self.shell.user_ns, defaults, print_note, resize=resize, start=start)
        return usage(partial(ensure, resume=self._resume))

    def _resume(self, one: Pool, unfinished: Unfinished) -> None:
        with interrupt.deferred():
            self._follow(one, unfinished)

    def _pool_of(self, request: PoolRequest) -> Pool:
        """The pool that a run asks for: by options, by name, or the one used last."""
        if request.given() - {"name"}:
            return self._ensure(request, start=True)
        return usage(lambda: registry.ready(request.name, print_note))

    @line_magic
    def sky_down(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_down(line))
        if request.hosts:
            own = self._own_jobs()
            print("\n".join(usage(lambda: running.stop(request.hosts, request.name, request.all, own))))
            return
        there = registry.every() + registry.ended()
        if (left := rented.left(request.name)) is not None and left.name not in [one.name for one in there]:
            print("\n".join(rented.stop_left(left, print_note)))
            return
        here = records.left_here(request.name) if request.name not in [one.name for one in there] else []
        if len(here) == 1:
            print("\n".join(usage(lambda: running.stop((), here[0].job_id, every=False))))
            return
        chosen = there if request.all or not (there or request.name) else [registry.find(request.name, ended=True)]
        registry.close(
            chosen,
            lambda one: print(f"pool {one.name!r} is stopped{display.unreached(one.unreached, one.defaults.away)}"),
        )
        if not chosen:
            print("no pool is running")
        for line in rented.stop_with_the_rest(print_note, self.settings.defaults().aws) if request.all else ():
            print(line)

    def _own_jobs(self) -> set[str]:
        return {one.job_id for one in registry.every()}

    @line_magic
    def sky_restart(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_restart(line))
        one = registry.find(request.pool)
        chosen = request.ranks
        ranks = None if chosen is None else usage(lambda: chosen.ranks(one.world_size))
        one.restart(ranks)
        print(f"{rank_words(ranks or range(one.world_size))} of pool {one.name!r} started anew, without variables")

    @line_magic
    def sky_attach(self, line: str) -> Compute | None:
        request = usage(lambda: line_magics.parse_attach(line))
        if request.name is None:
            listed = [*map(records.words, records.every()), *(one.words for one in notebooks.every())]
            print("\n".join(listed) or "no pool of other machines was started from here and left")
            return None
        if not request.take_over and executing.elsewhere(request.name):
            return None
        defaults = self.settings.defaults()
        with interrupt.deferred():
            one, found = registry.attach(
                request.name, self.shell.user_ns, defaults, print_note, take_over=request.take_over
            )
            for unfinished in found:
                self._follow(one, unfinished)
        return Compute.of(one)

    def _follow(self, one: Pool, unfinished: Unfinished) -> None:
        """Show the rest of a run that another notebook began, and keep what it gives."""
        spec, defaults = unfinished.spec, self.settings.defaults()
        number = f"cell {spec.execution_count} on {rank_words(spec.ranks)}"
        print_note(f"[{number} {'had ended' if unfinished.over else 'goes on'}]")
        limits = Limits(grace=defaults.grace, stall_after=defaults.stall_after)
        if spec.job == "script":
            outcome = script.follow(one, spec, unfinished.run, limits)
            if spec.output:
                self.shell.user_ns[spec.output] = outcome.value
            if outcome.error is not None:
                raise outcome.error
            return
        values = broadcast.follow(one, spec, unfinished.run, limits)
        request = RunRequest(pool=named(one.name), output=spec.output or None, gather=spec.gather, head=spec.head)
        self._keep(values, request)

    @line_magic
    def sky_status(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_status(line))
        if request.disk:
            print(disk.text(usage(lambda: disk.look(request.hosts))))
            return
        if request.hosts:
            found = usage(lambda: running.look(request.hosts, request.name))
            print(running.status_text(found, self._own_jobs()))
            return
        show_status(inspection.pools(request.name))

    @line_magic
    def sky_logs(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_logs(line))
        usage(lambda: logs.show(request, lambda text: print(text, end="", flush=True)))

    @line_magic
    def sky_stacks(self, line: str) -> None:
        print(usage(lambda: inspection.stacks(line_magics.parse_stacks(line))))

    @line_magic
    def sky_vars(self, line: str) -> None:
        print(usage(lambda: inspection.variables(line_magics.parse_vars(line))))

    @line_magic
    def sky_clone(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_clone(line))
        one = registry.find(request.pool)
        ranks = usage(lambda: request.targets.ranks(one.world_size))
        cloned = usage(lambda: clone.clone(one, ranks, request.names, request.source))
        print(display.cloned(cloned.names, cloned.nbytes, request.source, ranks))
        for note in cloned.notes:
            print_note(note)

    @line_magic
    def sky_put(self, line: str) -> None:
        self._copy(usage(lambda: line_magics.parse_files("sky_put", line)), "put", unless_said="all")

    @line_magic
    def sky_get(self, line: str) -> None:
        self._copy(usage(lambda: line_magics.parse_files("sky_get", line)), "get", unless_said="head")

    def _copy(self, request: line_magics.FilesRequest, direction: str, *, unless_said: str) -> None:
        one = registry.find(request.pool)
        nodes = usage(lambda: one.machines(request.nodes or Selection(unless_said)))
        with Copying() as progress:
            copy = getattr(one.files(), direction)
            copied = copy(request.source, request.target, nodes, progress)
        progress.end(summary(copied, progress.seconds, to_nodes=direction == "put"))

    @line_magic
    def sky_pip(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_pip(line))
        for one in registry.every() if request.all else [registry.find(request.pool)]:
            if not request.packages:
                print(display.packages(one.packages.listed(), installed.here()))
                continue
            install = partial(one.packages.install, request.packages)
            for note in usage(partial(install, lambda node, said: print(f"[{node}] {said}", flush=True))):
                print_note(note)

    @line_magic
    def sky_gpus(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_gpus(line))
        print(display.gpus(request.gpu.name if request.gpu else None, local_gpus()), flush=True)
        settings = self.settings.defaults().aws
        if request.gpu is None or not (request.rented or rentable(settings)):
            return
        asked = PoolRequest(gpu=request.gpu, nodes=request.nodes, region=request.region, spot=request.spot)
        try:
            show_table(usage(lambda: offers(asked, settings)))
        except CloudError as problem:
            if request.rented:
                raise
            print_note(f"[EC2 was not asked: {problem}]")

    @line_magic
    def sky_cost(self, line: str) -> None:
        name = usage(lambda: line_magics.parse_name("sky_cost", line))
        free = [(one.name, now() - one.started_at) for one in registry.every() if not one.plan.region]
        print(costs.text(costs.costs(free, name, self._own_jobs())))

    @line_magic
    def sky_check(self, line: str) -> None:
        show_table(inspection.checked(usage(lambda: line_magics.parse_check(line))))

    @line_magic
    def sky_clean(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_clean(line))
        lines, problems = usage(lambda: disk.clean(request.hosts, request.all, request.dry_run))
        print("\n".join(lines))
        if problems:
            raise PoolError("; ".join(f"{host}: {reason}" for host, reason in problems.items()))

    @line_magic
    def sky_auto(self, line: str) -> None:
        self.auto.switch(usage(lambda: line_magics.parse_auto(line)))
        print(
            f"plain cells run {'on the ranks, those that begin with %%local do not' if self.auto.on else 'in the notebook'}"
        )

    # -- cells -------------------------------------------------------------------------------------------------------

    @line_cell_magic
    def sky_broadcast(self, line: str, cell: str | None = None) -> Any:
        request = usage(lambda: cell_magics.parse_broadcast(line, self.settings.defaults(), **EXISTING_NAMES))
        return self._run(request, cell or "")

    @cell_magic
    def sky_run(self, line: str, cell: str) -> Any:
        request = usage(lambda: cell_magics.parse_run(line, self.settings.defaults()))
        one = self._pool_of(request.pool)
        if request.targets is None:
            rank = next(self._round_robin) % one.world_size
            request = replace(request, targets=Selection(str(rank)))
        return self._run(request, cell)

    @cell_magic
    def sky_sh(self, line: str, cell: str) -> Any:
        request = usage(lambda: cell_magics.parse_sh(line, self.settings.defaults()))
        if request.detach and not (one := registry.find(request.pool)).plan.outlives:
            raise UsageError(
                f"--detach: pool {one.name!r} ends with its notebook: make one with --detached (%sky_pool {one.name} … --detached), "
                "or go on beside the notebook with -a"
            )
        whole = self._cell(cell)
        return self._beside_or_now(
            request.noblock or request.detach, whole, lambda beside: self._script(request, whole, beside)
        )

    def _script(self, request: ShellRequest, cell: broadcast.Cell, beside: Run | None) -> script.Outcome:
        """Run a script on the nodes; how it ended there is kept also when it failed."""
        one = usage(lambda: registry.ready(request.pool, print_note))
        one.defaults = defaults = self.settings.defaults()
        spec = self._known(usage(lambda: script.spec_of(request, one, cell)), one, beside)
        with interrupt.deferred():
            limits = Limits(timeout=request.timeout, grace=defaults.grace, view_after=defaults.view_after)
            outcome = script.run(one, spec, limits, **(beside.given if beside else {}))
            if request.output:
                self.shell.user_ns[request.output] = outcome.value
            if outcome.error is not None:
                raise outcome.error
            return outcome

    @line_magic
    def sky_push(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_names("sky_push", line))
        run = RunRequest(pool=named(request.pool), targets=request.targets, push=request.names, fresh=True)
        self._run(run, "")

    @line_magic
    def sky_pull(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_names("sky_pull", line))
        run = RunRequest(pool=named(request.pool), targets=request.targets, gather=request.names, head=request.head)
        name = request.output
        with interrupt.deferred():
            self._keep(self._values(run, self._cell("")), run, renamed={request.names[0]: name} if name else {})

    def _run(self, request: RunRequest, body: str) -> Any:
        """Run a cell and keep its values; with --noblock, return at once."""
        cell = self._cell(body)
        return self._beside_or_now(request.noblock, cell, lambda beside: self._run_now(request, cell, beside))

    def _beside_or_now(self, noblock: bool, cell: broadcast.Cell, call: Callable[[Run | None], Any]) -> Run | None:
        """Call now, or on a thread of its own, with the handle that the user has of it."""
        if not noblock:
            call(None)
            return None
        pending = Run(lambda handle: self._run_beside(call, handle), cell.execution_count)
        self.pending = [*(one for one in self.pending if not one.done()), pending]
        return pending

    def _run_beside(self, call: Callable[[Run | None], Any], handle: Run) -> Any:
        """Run on a thread, where nobody else shows what is raised."""
        try:
            return call(handle)
        except (SkyError, UsageError) as problem:
            lines = problem._render_traceback_() if isinstance(problem, SkyError) else [f"UsageError: {problem}"]
            write("stderr", "\n".join([*lines, ""]))
            raise

    def _run_now(self, request: RunRequest, cell: broadcast.Cell, beside: Run | None) -> broadcast.Values | None:
        with interrupt.deferred():
            values = self._values(request, cell, beside)
            if values is not None:
                self._keep(values, request)
            return values

    def _values(self, request: RunRequest, cell: broadcast.Cell, beside: Run | None = None) -> broadcast.Values | None:
        with self.auto.paused():
            source = broadcast.check_syntax(cell.source, self.shell.transform_cell)
        one = self._pool_of(request.pool)
        one.defaults = defaults = self.settings.defaults()  # %config counts from the next cell on
        spec = usage(lambda: broadcast.spec_of(request, one, cell, source))
        if not cell.above and self.auto.takes(cell.source):
            print_note(f"[{rank_words(spec.ranks)} of pool {one.name!r}]")
        if request.dry_run:
            print(display.shipment(one.preview(spec).items))
            return None
        limits = Limits(
            timeout=request.timeout,
            grace=defaults.grace,
            stall_after=defaults.stall_after,
            view_after=defaults.view_after,
        )
        names = (*([request.output] if request.output else []), *request.gather)
        known = self._known(spec, one, beside)
        return broadcast.broadcast(one, known, limits, names=names, **(beside.given if beside else {}))

    def _known(self, spec: RunSpec, pool: Pool, beside: Run | None) -> RunSpec:
        """The run as the handle and the pool know of each other."""
        if beside is None:
            return spec
        beside.pool, beside.ranks = pool, spec.ranks
        return replace(spec, beside=True)

    def _cell(self, body: str) -> broadcast.Cell:
        """The body in its place in the cell that the user sees."""
        shell = self.shell
        inputs = shell.history_manager.input_hist_raw if shell.history_manager else [""]
        flags = broadcast.future_flags(shell.compile.flags)
        return broadcast.Cell(body, broadcast.above_body(inputs[-1], body), broadcast.number_in(shell), flags)

    def _keep(
        self, values: broadcast.Values | None, request: RunRequest, renamed: dict[str, str | None] | None = None
    ) -> None:
        """Put values into the notebook's variables; those that could not come back raise after the others are kept."""
        if values is None:
            return
        found: dict[str, list[Any]] = dict(values.variables)
        if request.output:
            found[request.output] = values.value
        for name, listed in found.items():
            target = (renamed or {}).get(name) or name
            self.shell.user_ns[target] = listed[0] if request.head else listed
            self.results.remember(target, () if request.head else values.ranks)
        own = {name: kind for name, kind in values.types.items() if name not in (renamed or {})}
        self._pool_of(request.pool).shipper.gathered(own, values.ranks)
        if values.problems:
            raise broadcast.result_error(values, list(found))


def named(name: str | None) -> PoolRequest:
    """A request for a pool that runs."""
    return PoolRequest(name=name, stated=frozenset())


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, with their help; again after `unload_ipython_extension` with all that they knew, pools among it."""
    shell.register_magics(shell.magics_manager.registry.get(SkyMagics.__name__) or SkyMagics(shell))
    if help_alone not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(help_alone)
    completion.register(shell)
    rendering.register(shell)
    debugging.register(shell)
    for reminder in records.reminders(records.every()):
        print_note(reminder)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Give back to IPython what it does itself; the magics it keeps, and pools go on until they are ended or the kernel ends."""
    if names := [pool.name for pool in registry.every()]:
        print_note(
            f"still there: {', '.join(names)}; %sky_down ends {'it' if len(names) == 1 else 'them'}, and so does the kernel's end"
        )
    rendering.unregister(shell)
    debugging.unregister(shell)
