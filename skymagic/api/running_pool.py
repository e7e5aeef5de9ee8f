"""Methods of a running pool for Python code: cells, tasks, variables, files and logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from skymagic.api.calls import Function
from skymagic.api.logs import LogsRequest, collect
from skymagic.content.files.changes import summary
from skymagic.data.namespace import Namespace
from skymagic.display.live import in_notebook
from skymagic.display.screen import Copying, print_note
from skymagic.display.status import Logs
from skymagic.jobs import cell as cells
from skymagic.jobs import script
from skymagic.jobs.cloning import clone
from skymagic.jobs.task import Task
from skymagic.jobs.workers import run_in_parallel
from skymagic.plan.requests import RunRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool
from skymagic.pool.runs import UnfinishedRun
from skymagic.run.state import Limits

Ranks = Selection | int | str | Iterable[int] | None
"""Ranks or nodes: ``2``, ``"0:4"``, ``[0, 2]``. Each method documents the meaning of None."""


class RunningPool:
    """Operations on a running pool. Subclasses provide the pool."""

    @property
    def pool(self) -> Pool:
        """The underlying pool."""
        raise NotImplementedError

    # -- cells and tasks ---------------------------------------------------------------------------

    def run_cell(
        self, source: str, targets: Ranks = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Run the source of a cell, as ``%%sky_broadcast`` does.

        Args:
            source: source of the cell; the variables that it uses are sent.
            targets: ranks that run it; None for all.
            timeout: time limit in seconds; None for no limit.

        Returns:
            The value of the last expression, in rank order.

        Raises:
            RunError: a rank failed, died or was interrupted, or the time limit was exceeded.
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
        order = replace(spec.order, value_ranks=spec.ranks if source else ())
        values = cells.broadcast(self.pool, replace(spec, order=order), limits)
        if values.problems:
            raise cells.result_error(values, ())
        return values

    def map(self, body: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return ``body(item)`` for each item, in the order of the items.

        Each call runs on the next free rank.

        Raises:
            RunError: the first failure; it is also an instance of the original exception's class.
                The other calls are stopped.
        """
        lazy = body if isinstance(body, Function) else Function(body)
        return run_in_parallel(
            [Task(lazy.local, (item,), timeout=lazy.timeout) for item in items], self.pool
        )

    # -- variables ---------------------------------------------------------------------------------

    def push(self, *names: str, targets: Ranks = None) -> None:
        """Send variables of the notebook, or of the module that made the pool, to ranks.

        ``pool.push("model", "data")`` sends two of them.

        Args:
            targets: ranks that receive them; None for all.

        Raises:
            CaptureError: a variable does not exist or cannot be sent.
        """
        self._run(RunRequest(targets=_selection(targets), push=names, fresh=True), "")

    def pull(self, *names: str, targets: Ranks = None) -> Any:
        """Fetch variables from ranks: ``losses = pool.pull("loss")``.

        Args:
            targets: ranks to fetch from; None for all.

        Returns:
            The values in rank order; for several names, a tuple of such lists.

        Raises:
            ResultError: a rank lacks the variable, or its value cannot be sent.
        """
        values = self._run(RunRequest(targets=_selection(targets), gather=names), "").variables
        values_by_name = tuple(values[name] for name in names)
        return values_by_name[0] if len(names) == 1 else values_by_name

    def clone(
        self, ranks: int | str | Iterable[int], names: str | Iterable[str], *, source: int
    ) -> tuple[str, ...]:
        """Copy variables from one rank to others, as ``%sky_clone`` does.

        ``pool.clone(2, "model optimizer", source=0)`` copies two variables to rank 2. They are
        copied together, so that an optimizer keeps referring to the model's parameters. DDP
        wrappers are rebuilt around the process group.

        Returns:
            The copied names, including names that their functions use and that the ranks lacked.

        Raises:
            RequestError: the ranks do not exist, or `source` lacks the names; nothing has changed.
            CaptureError: values cannot be sent; nothing has changed.
            RunError: a rank died, or could not rebuild the values.
        """
        requested_names = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        return clone(
            self.pool, Selection.of(ranks).ranks(self.pool.world_size), requested_names, source
        ).names

    # -- files and logs ----------------------------------------------------------------------------

    def put(self, source: str, target: str, nodes: Ranks = None, *, follow: bool = False) -> None:
        """Copy a file or a folder to nodes, as ``%sky_put`` does; only differences are sent.

        Args:
            nodes: nodes that receive it; None for all.
            follow: copy the targets of links that lead out of `source`.

        Raises:
            FilesError: something could not be copied; the message names it.
        """
        self._copy("put", source, target, nodes, follow)

    def get(self, source: str, target: str, nodes: Ranks = None, *, follow: bool = False) -> None:
        """Copy a file or a folder from nodes.

        Args:
            nodes: nodes to copy from; None for the head. Copies from several nodes go to the
                folders node0, node1, … in `target`.
            follow: copy the targets of links that lead out of `source`.

        Raises:
            FilesError: something could not be copied; the message names it.
        """
        self._copy("get", source, target, nodes, follow)

    def _copy(self, direction: str, source: str, target: str, nodes: Ranks, follow: bool) -> None:
        node_numbers = self.pool.machines(
            _selection(nodes) or Selection("all" if direction == "put" else "head")
        )
        with Copying() as progress:
            copied = getattr(self.pool.files(), direction)(
                source, target, node_numbers, progress, follow=follow
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
        """Return the output of ranks, as ``%sky_logs`` shows it; ``pool.logs()[3]`` is rank 3's.

        Args:
            rank: the rank; None for all ranks.
            lines: number of last lines of each rank.
            run, cell: number of a run, or of a cell of the notebook, to restrict the output to.
            grep: regular expression that lines must match.

        Raises:
            RequestError: the ranks or runs do not exist, or the regular expression is invalid.
        """
        return collect(
            LogsRequest(_selection(rank), lines, pool=self.pool.name, run=run, cell=cell, grep=grep)
        )


def finish(pool: Pool, unfinished: UnfinishedRun, namespace: Namespace) -> None:
    """Show the rest of a run that another notebook started, and set its output variables.

    Raises what the run raises.
    """
    print_note(unfinished.text)
    order = unfinished.spec.order
    limits = Limits(
        grace=pool.defaults.grace,
        stall_after=pool.defaults.stall_after,
        view_after=pool.defaults.view_after if in_notebook() else math.inf,
    )
    if order.job == "script":
        outcome = script.follow(pool, unfinished, limits)
        namespace.update({order.output: outcome.value} if order.output else {})
        if outcome.error is not None:
            raise outcome.error
        return
    values = cells.follow(pool, unfinished, limits)
    variables = {**values.variables, **({order.output: values.value} if order.output else {})}
    namespace.update(
        {name: by_rank[0] if order.head else by_rank for name, by_rank in variables.items()}
    )


def _selection(ranks: Ranks) -> Selection | None:
    return None if ranks is None else Selection.of(ranks)
