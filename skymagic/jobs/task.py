"""A task: a function with its arguments, and how it runs on all ranks, or on one.

A task is a run whose source is one generated line. The function and its arguments travel beside the notebook's
variables under names of their own, and the ranks forget them when the task is over.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.display.live import in_ipython, in_notebook
from skymagic.display.screen import Screen
from skymagic.errors import CaptureError, RankError
from skymagic.jobs import cell
from skymagic.plan.masking import without_colours
from skymagic.pool import Pool
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.report import Limits
from skymagic.run.spec import RunSpec
from skymagic.wire.order import FUNCTION_NAME

ARGUMENT_PREFIX = "_sky_arg_"


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """What is to run.

    Attributes:
        timeout: seconds; None for the pool's own limit.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)


def on_all(task: Task, pool: Pool) -> list[Any]:
    """The task on every rank; the values in rank order."""
    return run(task, pool, tuple(range(pool.world_size)))


def on_one(task: Task, pool: Pool) -> Any:
    """The task on the rank that has least to do; ranks that are alike take turns."""
    return run(task, pool, tuple(pool.scheduler.least_loaded(pool.world_size)))[0]


def run(
    task: Task, pool: Pool, ranks: tuple[int, ...], screen: Screen | None = None, stop: StopSignal | None = None
) -> list[Any]:
    """The task on these ranks; the values in their order.

    Raises:
        RunError: also of the type that the function raised.
        CaptureError: the function, its arguments or what it uses cannot travel.
    """
    defaults = pool.defaults
    limits = Limits(
        timeout=task.timeout or defaults.timeout,
        grace=defaults.grace,
        stall_after=defaults.stall_after,
        view_after=defaults.view_after if in_notebook() else math.inf,  # a script's standard error is its own
    )
    try:
        with interrupt.deferred() as interrupts:
            values = cell.broadcast(pool, spec_of(task, ranks), limits, screen, stop=stop)
            if values.problems:
                raise cell.result_error(values, [])
            interrupts.values = values.value
            return values.value
    except CaptureError as refused:
        said = str(refused).replace(ARGUMENT_PREFIX, "argument ").replace(FUNCTION_NAME, task.name)
        raise CaptureError(said) from None
    except RankError as failed:
        # a plain script shows nothing but the message and its notes
        if failed.traceback and not in_ipython():
            failed.add_note(without_colours("\n".join(failed.traceback)))
        raise


def spec_of(task: Task, ranks: tuple[int, ...]) -> RunSpec:
    """The run that carries out a task: one line that names the function and each argument."""
    names = parameters(task)
    arguments = {**dict(zip(names, task.args, strict=False)), **task.kwargs}
    extra = {FUNCTION_NAME: task.function, **{ARGUMENT_PREFIX + name: value for name, value in arguments.items()}}
    written = [ARGUMENT_PREFIX + name for name in names] + [f"{name}={ARGUMENT_PREFIX}{name}" for name in task.kwargs]
    wait = "await " if inspect.iscoroutinefunction(task.function) else ""
    # the semicolon keeps the value from being shown; who wants it has it
    source = f"{wait}{FUNCTION_NAME}({', '.join(written)});  # {task.name}"
    return RunSpec(
        source=source, source_without_magics=source, ranks=ranks, visible_ranks=ranks, value_ranks=ranks,
        execution_count=execution_count(), extra=extra, job="call",
    )  # fmt: skip


def parameters(task: Task) -> list[str]:
    """A name for each positional argument: its parameter's, or its number."""
    try:
        known = list(inspect.signature(task.function).parameters.values())
    except (ValueError, TypeError):
        known = []
    plain = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [plain[i] if i < len(plain) else str(i) for i in range(len(task.args))]


def execution_count() -> int:
    """The number of the cell that the notebook is in; 1 elsewhere."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return cell.number_in(shell) if shell is not None else 1
