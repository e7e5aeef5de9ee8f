"""Tasks: a function call on all ranks or on one; a generator function's values arrive one by one.

A task is a run whose source is one generated line. The function and its arguments are shipped
together with the notebook's variables under reserved names, and the ranks forget them when the task
is over.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.display.live import in_ipython, in_notebook
from skymagic.display.screen import Screen
from skymagic.errors import CaptureError, RankError, SkyError
from skymagic.jobs import cell
from skymagic.plan.masking import without_colours
from skymagic.pool import Pool
from skymagic.pool.status import State
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.state import Limits, RunSpec
from skymagic.runtime import generators
from skymagic.wire.order import FUNCTION_NAME, RunCell

ARGUMENT_PREFIX = "_sky_arg_"


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A function call to run.

    Attributes:
        timeout: timeout in seconds; None for the pool's own limit.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    timeout: float | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)


def run_on_all(task: Task, pool: Pool) -> list[Any]:
    """Run the task on every rank and return the values in rank order."""
    return run(task, pool, tuple(range(pool.world_size)))


def run_on_one(task: Task, pool: Pool) -> Any:
    """Run the task on the least loaded rank; equally loaded ranks take turns."""
    return run(task, pool, tuple(pool.scheduler.least_loaded(pool.world_size)))[0]


def run(
    task: Task,
    pool: Pool,
    ranks: tuple[int, ...],
    screen: Screen | None = None,
    stop: StopSignal | None = None,
) -> list[Any]:
    """Run the task on these ranks and return the values in their order.

    Raises:
        RunError: the task failed; the error also has the type that the function raised.
        CaptureError: the function, its arguments or its dependencies cannot be shipped.
    """
    defaults = pool.defaults
    limits = Limits(
        timeout=task.timeout or defaults.timeout,
        grace=defaults.grace,
        stall_after=defaults.stall_after,
        view_after=defaults.view_after
        if in_notebook()
        else math.inf,  # a script's standard error is its own
    )
    try:
        with interrupt.deferred() as interrupts:
            values = cell.broadcast(pool, spec_of(task, ranks), limits, screen, stop=stop)
            if values.problems:
                raise cell.result_error(values, [])
            interrupts.values = values.value
            return values.value
    except CaptureError as error:
        message = str(error).replace(ARGUMENT_PREFIX, "argument ").replace(FUNCTION_NAME, task.name)
        names = [name.removeprefix(ARGUMENT_PREFIX) for name in error.names]
        raise CaptureError(message, names=names) from None
    except RankError as error:
        # outside of IPython, only the message and its notes are shown
        if error.traceback and not in_ipython():
            error.add_note(without_colours("\n".join(error.traceback)))
        raise


def spec_of(task: Task, ranks: tuple[int, ...]) -> RunSpec:
    """Build the specification of a task's run: a line that names the function and each argument."""
    names = parameters(task)
    arguments = {**dict(zip(names, task.args, strict=False)), **task.kwargs}
    extra = {
        FUNCTION_NAME: task.function,
        **{ARGUMENT_PREFIX + name: value for name, value in arguments.items()},
    }
    argument_texts = [ARGUMENT_PREFIX + name for name in names] + [
        f"{name}={ARGUMENT_PREFIX}{name}" for name in task.kwargs
    ]
    prefix = "await " if inspect.iscoroutinefunction(task.function) else ""
    # the semicolon keeps the value from being shown; the caller gets it
    source = f"{prefix}{FUNCTION_NAME}({', '.join(argument_texts)});  # {task.name}"
    order = RunCell(
        ranks=ranks,
        visible_ranks=ranks,
        value_ranks=ranks,
        execution_count=execution_count(),
        job="call",
    )
    return RunSpec(order, source, source, extra=extra)


def parameters(task: Task) -> list[str]:
    """Return a name for each positional argument: its parameter's name, or its number."""
    try:
        signature_parameters = list(inspect.signature(task.function).parameters.values())
    except (ValueError, TypeError):
        signature_parameters = []
    positional = [
        p.name
        for p in signature_parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [positional[i] if i < len(positional) else str(i) for i in range(len(task.args))]


def execution_count() -> int:
    """Return the number of the notebook's current cell; 1 outside of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return cell.cell_number(shell) if shell is not None else 1


PULL_SECONDS = 0.05
"""Seconds after which a pull from one rank returns the values so far.

The run around a pull costs about a fifth of that.
"""
QUICK_VALUES, MOST_VALUES = 32, 1024
"""Number of consecutive quick values after which a pull fetches several, and the maximum per pull.

A quick value is then held back by a slow one after it, but not each time in a loop with slow steps.
"""


class Stream(Iterator[Any]):
    """Values of a generator function that runs on ranks, one at a time, on demand.

    The generator is opened at once, and works while a value is awaited, like any generator: it is
    at most one pull ahead of its reader. Between two values the ranks are free for other runs. A
    timeout of the call applies to each pull.

    Args:
        task: a call of a generator function.
        ranks: a single rank, which yields values; or several ranks in step, which yield lists by
            rank, with None for ranks that have ended.

    Raises:
        RunError: the generator failed, and is over; the error also has the type that the generator
            raised.
    """

    def __init__(self, task: Task, pool: Pool, ranks: Sequence[int], *, together: bool) -> None:
        self._key = uuid.uuid4().hex
        self._task, self._pool, self._ranks, self._together = task, pool, tuple(ranks), together
        self._values: deque[Any] = deque()
        self._quick, self._ended = 0, frozenset[int]()
        self._over = True
        # keep the function's own name and argument names for messages
        open_function = functools.wraps(task.function)(
            functools.partial(generators.open_one, self._key, task.function)
        )
        run(replace(task, function=open_function), pool, self._ranks)
        self._over = False

    def __next__(self) -> Any:
        while not self._values and not self._over:
            self._pull()
        if not self._values:
            raise StopIteration
        return self._values.popleft()

    def _pull(self) -> None:
        # ranks in step must advance equally often, because their steps may contain collectives
        is_batched = self._quick >= QUICK_VALUES and not self._together
        try:
            limit = min(self._quick, MOST_VALUES) if is_batched else 1
            pulls = self._call(generators.advance, self._key, limit, PULL_SECONDS, self._ended)
        except BaseException:
            self._over = True  # a generator that raised or was interrupted cannot continue
            raise
        self._ended = frozenset(
            rank for rank, pull in zip(self._ranks, pulls, strict=True) if pull.over
        )
        self._over = len(self._ended) == len(self._ranks)
        self._quick = 0 if pulls[0].slow else self._quick + len(pulls[0].values)
        if not self._together:
            self._values.extend(pulls[0].values)
        elif any(pull.values for pull in pulls):
            self._values.append([pull.values[0] if pull.values else None for pull in pulls])

    def _call(self, function: Any, *args: Any) -> list[Any]:
        named = functools.partial(function, *args)
        named.__name__ = self._task.name  # type: ignore[attr-defined]
        return run(Task(named, timeout=self._task.timeout), self._pool, self._ranks)

    def close(self) -> None:
        """Close the generator; its ``finally`` runs on the ranks. Safe to call twice."""
        self._values.clear()
        if not self._over:
            self._over = True
            if self._pool.state is not State.STOPPED:
                self._call(generators.close, self._key)

    def __del__(self) -> None:
        with contextlib.suppress(SkyError):  # the pool is gone, or the generator's cleanup raises
            self.close()

    def __repr__(self) -> str:
        return f"<values of {self._task.name}(…)>"
