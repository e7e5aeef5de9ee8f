"""A pool that runs, as Python code uses it: cells, tasks, variables, files and logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from skymagic.api.calls import Function
from skymagic.api.logs import LogsRequest, collected
from skymagic.display.live import in_notebook
from skymagic.display.screen import Copying, print_note
from skymagic.display.status import Logs
from skymagic.files.changes import summary
from skymagic.jobs import cell as cells
from skymagic.jobs import script
from skymagic.jobs.cloning import clone
from skymagic.jobs.task import Task
from skymagic.jobs.workers import side_by_side
from skymagic.plan.requests import RunRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool
from skymagic.pool.runs import UnfinishedRun
from skymagic.run.report import Limits

Ranks = Selection | int | str | Iterable[int] | None
"""Ranks or nodes: ``2``, ``"0:4"``, ``[0, 2]``; None for those that a method's documentation names."""


class RunningPool:
    """What can be done with a pool that runs; a subclass says which pool."""

    @property
    def pool(self) -> Pool:
        """The pool itself."""
        raise NotImplementedError

    # -- cells and tasks ---------------------------------------------------------------------------------------------

    def run_cell(
        self, source: str, targets: Ranks = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Run the text of a cell, as ``%%sky_broadcast`` does.

        Args:
            source: the cell; the variables that it uses are sent.
            targets: ranks that run it; None for all.
            timeout: seconds.

        Returns:
            The value of the last expression from each rank.

        Raises:
            RunError: a rank failed, died or was interrupted, or the time was over.
            CaptureError: variables cannot be sent.
        """
        return self._run(RunRequest(targets=_selection(targets), timeout=timeout), source).value

    def _run(self, request: RunRequest, source: str) -> cells.Values:
        plain = cells.check_syntax(source, TransformerManager().transform_cell)
        spec = cells.spec_of(request, self.pool, cells.Cell(source), plain)
        limits = Limits(
            timeout=request.timeout,
            grace=self.pool.defaults.grace,
            stall_after=self.pool.defaults.stall_after,
        )
        values = cells.broadcast(
            self.pool, replace(spec, value_ranks=spec.ranks if source else ()), limits
        )
        if values.problems:
            raise cells.result_error(values, ())
        return values

    def map(self, body: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """``body(item)`` for each item, each on the next rank that is free; the values in the order of the items.

        Raises:
            RunError: the first failure; it is also an instance of the original exception's class. The other calls are stopped.
        """
        lazy = body if isinstance(body, Function) else Function(body)
        return side_by_side(
            [Task(lazy.local, (item,), timeout=lazy.timeout) for item in items], self.pool
        )

    # -- variables ---------------------------------------------------------------------------------------------------

    def push(self, *names: str, targets: Ranks = None) -> None:
        """Send variables of the notebook, or of the module that made the pool, to ranks: ``pool.push("model", "data")``.

        Args:
            targets: ranks that get them; None for all.

        Raises:
            CaptureError: there is no such variable, or it cannot be sent.
        """
        self._run(RunRequest(targets=_selection(targets), push=names, fresh=True), "")

    def pull(self, *names: str, targets: Ranks = None) -> Any:
        """Fetch variables from ranks: ``losses = pool.pull("loss")``.

        Args:
            targets: ranks to fetch from; None for all.

        Returns:
            The values by rank; a tuple of such lists for several names.

        Raises:
            ResultError: ranks have no such variable, or its value cannot travel.
        """
        values = self._run(RunRequest(targets=_selection(targets), gather=names), "").variables
        found = tuple(values[name] for name in names)
        return found[0] if len(names) == 1 else found

    def clone(
        self, ranks: int | str | Iterable[int], names: str | Iterable[str], *, source: int
    ) -> tuple[str, ...]:
        """Copy variables from one rank to others, as ``%sky_clone`` does: ``pool.clone(2, "model optimizer", source=0)``.

        All of them as one, so that an optimizer holds the model's parameters; DDP wrappers are made again around the group.

        Returns:
            The names that were copied, with those that their functions use and the ranks lacked.

        Raises:
            RequestError: there are no such ranks, or `source` has not got the names; nothing has changed.
            CaptureError: values cannot travel; nothing has changed.
            RunError: a rank died, or could not rebuild the values.
        """
        named = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        return clone(
            self.pool, Selection.of(ranks).ranks(self.pool.world_size), named, source
        ).names

    # -- files and logs ----------------------------------------------------------------------------------------------

    def put(self, source: str, target: str, nodes: Ranks = None, *, follow: bool = False) -> None:
        """Copy a file or a folder to nodes, as ``%sky_put`` does; only differences are sent.

        Args:
            nodes: those that get it; None for all.
            follow: copy the targets of links that lead out of `source`.

        Raises:
            FilesError: something could not be copied; names it.
        """
        self._copy("put", source, target, nodes, follow)

    def get(self, source: str, target: str, nodes: Ranks = None, *, follow: bool = False) -> None:
        """Copy a file or a folder from the head (None), or from several nodes into folders node0, node1, … in `target`. Raises as `put` does."""
        self._copy("get", source, target, nodes, follow)

    def _copy(self, direction: str, source: str, target: str, nodes: Ranks, follow: bool) -> None:
        chosen = self.pool.machines(
            _selection(nodes) or Selection("all" if direction == "put" else "head")
        )
        with Copying() as progress:
            copied = getattr(self.pool.files(), direction)(
                source, target, chosen, progress, follow=follow
            )
        progress.end(summary(copied, progress.seconds, to_nodes=direction == "put"))

    def logs(
        self,
        rank: Ranks = None,
        lines: int = 50,
        *,
        run: int | None = None,
        cell: int | None = None,
        grep: str | None = None,
    ) -> Logs:
        """What ranks wrote, as ``%sky_logs`` shows it; by rank: ``pool.logs()[3]``.

        Args:
            rank: the rank; None: all ranks.
            lines: this many of each rank's last lines.
            run, cell: only of this run, or of this cell of the notebook, by their numbers.
            grep: only lines that match this regular expression.

        Raises:
            RequestError: there are no such ranks or runs, or it is no regular expression.
        """
        return collected(
            LogsRequest(_selection(rank), lines, pool=self.pool.name, run=run, cell=cell, grep=grep)
        )


def finish(pool: Pool, unfinished: UnfinishedRun, namespace: dict[str, Any]) -> None:
    """Show the rest of a run that another notebook began, and set the variables that it asked for. Raises what the run raises."""
    print_note(unfinished.words)
    spec = unfinished.spec
    limits = Limits(
        grace=pool.defaults.grace,
        stall_after=pool.defaults.stall_after,
        view_after=pool.defaults.view_after if in_notebook() else math.inf,
    )
    if spec.job == "script":
        outcome = script.follow(pool, spec, unfinished.run, limits)
        namespace.update({spec.output: outcome.value} if spec.output else {})
        if outcome.error is not None:
            raise outcome.error
        return
    values = cells.follow(pool, spec, unfinished.run, limits)
    listed = {**values.variables, **({spec.output: values.value} if spec.output else {})}
    namespace.update({name: some[0] if spec.head else some for name, some in listed.items()})


def _selection(chosen: Ranks) -> Selection | None:
    return None if chosen is None else Selection.of(chosen)
