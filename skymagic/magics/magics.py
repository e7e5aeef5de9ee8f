"""The magics: each parses its line to a frozen request, makes one call, and shows the result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
)

from skymagic import plugins, providers
from skymagic.api import costs, debug_logs, disk, logs, notebooks, pool_listing, stopping
from skymagic.api.compute import Compute, find
from skymagic.data.capture import installed
from skymagic.data.capture.numbering import number_cells
from skymagic.display import text as display
from skymagic.display.screen import print_note, show_object
from skymagic.errors import CloudError, PoolError
from skymagic.jobs import forwarding
from skymagic.jobs.cloning import clone
from skymagic.magics import background, completion, inspection, rendering, server_note, transformers
from skymagic.magics.arguments import cell_magics, line_magics
from skymagic.magics.arguments.help import help_alone, with_help
from skymagic.magics.config import SkyMagic, removed_settings
from skymagic.magics.rendering import ResultTables
from skymagic.magics.runs import ShellRuns, request_for, usage
from skymagic.plan.requests import PoolRequest, RunRequest
from skymagic.plan.suggest import LazyNames
from skymagic.plan.units import Selection, rank_words
from skymagic.pool import Pool, debugging, launch, messages, records, registry
from skymagic.pool.status import now
from skymagic.providers.aws.clients import is_set_up
from skymagic.providers.local import driver
from skymagic.run import interrupt
from skymagic.wire.untrusted import print_sanitized

# Other packages may add more; searching for them takes longer than many cells do.
EXISTING_NAMES = {
    "plugins": LazyNames(plugins.TABLE, plugins.names),
    "providers": LazyNames(("auto", *providers.TABLE), lambda: ["auto", *providers.names()]),
}


@magics_class
class SkyMagics(Magics):
    """Magics that make pools, run cells and move variables and files, registered with one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        _give_help(self)
        self.settings = SkyMagic(parent=shell)
        shell.configurables.append(self.settings)
        for refusal in removed_settings(self.settings.config):
            print_note(refusal)
        self.auto = transformers.Auto(shell)
        self.results = ResultTables(shell)
        self.runs = ShellRuns(shell, self.settings, self.auto, self.results)

    # -- pools -------------------------------------------------------------------------------------

    @line_cell_magic
    def sky_pool(self, line: str, cell: str | None = None) -> Compute | None:
        request = usage(
            lambda: cell_magics.parse_pool(
                line, self.settings.defaults(), body=cell, **EXISTING_NAMES
            )
        )
        if request.dry_run:
            plan = usage(
                lambda: launch.preview(
                    request, self.shell.user_ns, self.settings.defaults(), print_note
                )
            )
            print_sanitized(str(plan))
            return None
        return Compute.of(self.runs.ensure(request, resize=True))

    @line_magic
    def sky_down(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_down(line))
        if request.clean:
            _clean(request)
            return
        aws = self.settings.defaults().aws
        done = usage(lambda: stopping.stop_in_location(request, aws, _own_jobs(), print_note))
        pools = registry.pools() + registry.ended_pools()
        matching = (
            pools if request.name is None else [pool for pool in pools if pool.name == request.name]
        )
        if done is None and not (matching or request.all):
            done = usage(lambda: stopping.stop_without_notebook(request.name, print_note))
            if not done and (name := request.name):
                done = usage(
                    lambda: stopping.stop_on_this_machine(name, print_note, missing_ok=True)
                )
        if done:
            print_sanitized("\n".join(done))
            return
        to_stop = (
            pools
            if request.all or not (pools or request.name)
            else [registry.pool_named(request.name, ended=True)]
        )
        registry.close_all(to_stop, self._report_stopped)
        if not to_stop:
            print("no pool is running")
        if request.all:
            message = (
                "pool {!r}, which was left on this machine, is still running: %sky_down {} ends it"
            )
            leftovers = (
                message.format(record.name, record.job_id)
                for record in records.left_on_this_machine(None)
            )
            for line in [*leftovers, *stopping.terminate_rented_if_any(print_note, aws)]:
                print_sanitized(line)

    def _report_stopped(self, pool: Pool) -> None:
        if pool.taken_over:
            print_sanitized(f"{pool.ended}: this notebook ended nothing; {pool.remedy}")
            return
        records.forget_local(pool.name)
        stopped = messages.stopped_runs(pool.stopped_runs)
        unreached = display.unreached(pool.unreached, pool.defaults.away)
        print_sanitized(f"pool {pool.name!r} is down{f'; {stopped}' if stopped else ''}{unreached}")

    @line_magic
    def sky_restart(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_ranks("sky_restart", line))
        pool = registry.pool_named(request.pool)
        selection = request.ranks
        ranks = None if selection is None else usage(lambda: selection.ranks(pool.world_size))
        pool.restart(ranks)
        print(
            f"{rank_words(ranks or range(pool.world_size))} of pool {pool.name!r} restarted "
            "without variables"
        )

    @line_magic
    def sky_attach(self, line: str) -> Compute | None:
        request = usage(lambda: line_magics.parse_attach(line))
        if request.name is None and request.login is None:
            pool_lines = map(records.record_text, records.readable_records())
            no_pools = "no pool that outlives its notebook was started from here"
            print_sanitized("\n".join(pool_lines) or records.ended_with_kernel() or no_pools)
            return None
        if request.name and not request.login:
            notebooks.with_finished_job(records.named(request.name))
        defaults = self.settings.defaults()
        with (
            interrupt.deferred(),
            pool_listing.imported_record(request.name, request.login) as name,
        ):
            pool, unfinished_runs = launch.attach(
                name, self.shell.user_ns, defaults, print_note, take_over=request.take_over
            )
            for unfinished in unfinished_runs:
                self.runs.follow(pool, unfinished)
        return Compute.of(pool)

    @line_magic
    def sky_clone(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_clone(line))
        pool = registry.pool_named(request.pool)
        ranks = usage(lambda: request.targets.ranks(pool.world_size))
        cloned = usage(lambda: clone(pool, ranks, request.names, request.source))
        print(display.clone_message(cloned.names, cloned.nbytes, request.source, ranks))
        for note in cloned.notes:
            print_note(note)

    @line_magic
    def sky_put(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_files("sky_put", line))
        usage(lambda: find(request.pool).put(*request.source_target_nodes, follow=request.follow))

    @line_magic
    def sky_get(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_files("sky_get", line))
        usage(lambda: find(request.pool).get(*request.source_target_nodes, follow=request.follow))

    @line_magic
    def sky_forward(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_forward(line))
        pool = registry.pool_named(request.pool)
        nodes = usage(lambda: pool.machines(request.nodes or Selection("head")))
        show_object(forwarding.forward(pool, request.ports, nodes))

    @line_magic
    def sky_pip(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_pip(line))
        for pool in registry.pools() if request.all else [registry.pool_named(request.pool)]:
            if not request.packages:
                print_sanitized(
                    display.packages(pool.packages.environments(), installed.current_environment())
                )
                continue
            install = partial(pool.packages.install, request.packages)
            for note in usage(
                partial(install, lambda node, line: print_sanitized(f"[{node}] {line}"))
            ):
                print_note(note)

    @line_magic
    def sky_auto(self, line: str) -> None:
        self.auto.switch(usage(lambda: line_magics.parse_auto(line)))
        if self.auto.on:
            print("plain cells run on the ranks, those that begin with %%local do not")
        else:
            print("plain cells run in the notebook")

    # -- cells -------------------------------------------------------------------------------------

    @line_cell_magic
    def sky_broadcast(self, line: str, cell: str | None = None) -> Any:
        request = usage(
            lambda: cell_magics.parse_broadcast(line, self.settings.defaults(), **EXISTING_NAMES)
        )
        return self.runs.run(request, cell or "")

    @cell_magic
    def sky_sh(self, line: str, cell: str) -> Any:
        request = usage(lambda: cell_magics.parse_sh(line, self.settings.defaults()))
        if request.detach and not (pool := registry.pool_named(request.pool)).plan.outlives:
            raise UsageError(
                f"--detach: pool {pool.name!r} ends with its notebook. Start it with "
                f"%sky_pool {pool.name} … --detach, "
                "or use -a to run the script in the background"
            )
        return self.runs.run_script(request, cell)

    @line_magic
    def sky_push(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_names("sky_push", line))
        run = RunRequest(
            pool=request_for(request.pool), targets=request.targets, push=request.names, fresh=True
        )
        self.runs.run(run, "")

    @line_magic
    def sky_pull(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_names("sky_pull", line))
        run = RunRequest(
            pool=request_for(request.pool),
            targets=request.targets,
            gather=request.names,
            head=request.head,
        )
        self.runs.pull(run, {request.names[0]: request.output} if request.output else {})


@magics_class
class InspectionMagics(Magics):
    """Magics that show pools, ranks, logs, GPUs, costs and files on hosts."""

    def __init__(self, shell: InteractiveShell, settings: SkyMagic) -> None:
        super().__init__(shell)
        _give_help(self)
        self.settings = settings

    @line_magic
    def sky_status(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_status(line))
        if request.cost:
            unpaid = [
                (pool.name, now() - pool.started_at)
                for pool in registry.pools()
                if not pool.plan.region
            ]
            print_sanitized(costs.text(costs.costs(unpaid, request.name, _own_jobs())))
            return
        if request.disk:
            print_sanitized(disk.text(usage(lambda: disk.read_disks(request.hosts))))
            return
        if request.hosts or request.provider:
            listing = usage(lambda: pool_listing.listing(request, self.settings.defaults().aws))
            print_sanitized(listing.text(_own_jobs()))
            return
        status = inspection.pools(request.name, _own_jobs())
        show_object(status)
        self._name(request.output, status)

    @line_magic
    def sky_logs(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_logs(line))
        if request.debug:
            lines = usage(lambda: debug_logs.from_notebook(request))
            print_sanitized("\n".join(lines))
            self._name(request.output, lines)
            return
        cell = self.shell.user_ns.get("Out", {}).get(request.cell)
        request = replace(
            request, cell_pending=lambda: isinstance(cell, background.RunHandle) and not cell.done()
        )
        usage(lambda: logs.show(request, lambda text: print(text, end="", flush=True)))
        if request.output:
            self._name(request.output, logs.collect(request))

    def _name(self, output: str | None, shown: object) -> None:
        """Store the displayed object in the variable that ``-o`` names, if any."""
        if output:
            self.shell.user_ns[output] = shown

    @line_magic
    def sky_stacks(self, line: str) -> None:
        print_sanitized(
            usage(lambda: inspection.stacks(line_magics.parse_ranks("sky_stacks", line)))
        )

    @line_magic
    def sky_vars(self, line: str) -> None:
        print_sanitized(
            usage(lambda: inspection.variables(line_magics.parse_ranks("sky_vars", line)))
        )

    @line_magic
    def sky_gpus(self, line: str) -> None:
        request = usage(lambda: line_magics.parse_gpus(line))
        print_sanitized(display.gpus(request.gpu.name if request.gpu else None, *driver()))
        settings = self.settings.defaults().aws
        wants_offers = request.rented or request.output is not None
        if request.gpu is None or not (wants_offers or is_set_up(settings)):
            return
        pool_request = PoolRequest(
            gpu=request.gpu, nodes=request.nodes, region=request.region, spot=request.spot
        )
        try:
            offers = usage(lambda: costs.offers(pool_request, settings))
        except CloudError as problem:
            if wants_offers:
                raise
            print_note(f"[EC2 was not asked: {problem}]")
            return
        show_object(offers, apart=True)
        self._name(request.output, offers)

    @line_magic
    def sky_check(self, line: str) -> None:
        show_object(
            inspection.check_nodes(usage(lambda: line_magics.parse_check(line))), apart=True
        )


def _give_help(magics: Magics) -> None:
    for kind in magics.magics.values():
        kind.update({name: with_help(name, method) for name, method in kind.items()})


def _clean(request: stopping.DownRequest) -> None:
    """Remove unused files from hosts. Raises PoolError if files remain."""
    lines, problems = usage(lambda: disk.clean(request.hosts, request.all, request.dry_run))
    print_sanitized("\n".join(lines))
    if problems:
        raise PoolError(
            "; ".join(f"{host}: {reason}" for host, reason in problems.items()),
            code="unreached",
            names=problems,
        )


def _own_jobs() -> set[str]:
    return {pool.job_id for pool in registry.pools()}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics with their help.

    After `unload_ipython_extension` the same objects are registered again, with their pools.
    """
    debugging.start()
    registered = shell.magics_manager.registry
    magics = registered.get(SkyMagics.__name__) or SkyMagics(shell)
    shell.register_magics(
        magics,
        registered.get(InspectionMagics.__name__) or InspectionMagics(shell, magics.settings),
    )
    if help_alone not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(help_alone)
    if history := shell.history_manager:
        number_cells(shell.compile, history.input_hist_raw, history.input_hist_parsed)
    else:
        number_cells(shell.compile)
    completion.register(shell)
    transformers.register(shell)
    rendering.register(shell)
    inspection.register(shell)
    for reminder in records.reminders(records.readable_records()):
        print_note(reminder)
    if note := server_note.note_if_served(getattr(shell, "kernel", None)):
        print_note(note)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Restore IPython's own error display and ``%debug``.

    IPython keeps the magics. Pools keep running until they are ended or the kernel ends.
    """
    if names := [pool.name for pool in registry.pools()]:
        print_note(
            f"still running: {', '.join(names)}; %sky_down ends "
            f"{'it' if len(names) == 1 else 'them'}, and so does exiting the kernel"
        )
    rendering.unregister(shell)
    inspection.unregister(shell)
