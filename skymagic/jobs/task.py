"""A task: a function with its arguments, on all ranks or on one, to its values; a generator function's values come one by one.

A task is a run whose source is one generated line. The function and its arguments travel beside the notebook's
variables under names of their own, and the ranks forget them when the task is over.
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
from skymagic.run.report import Limits, RunSpec
from skymagic.runtime import generators
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
    task: Task,
    pool: Pool,
    ranks: tuple[int, ...],
    screen: Screen | None = None,
    stop: StopSignal | None = None,
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
    extra = {
        FUNCTION_NAME: task.function,
        **{ARGUMENT_PREFIX + name: value for name, value in arguments.items()},
    }
    written = [ARGUMENT_PREFIX + name for name in names] + [
        f"{name}={ARGUMENT_PREFIX}{name}" for name in task.kwargs
    ]
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


PULL_SECONDS = 0.05
"""A pull of one rank returns with what there is after so long; the run around it costs about a fifth of that."""
QUICK_VALUES, MOST_VALUES = 32, 1024
"""After so many quick values in a row one pull brings several, and that many at most. A value that is made quickly is then
held back by a slow one behind it, but not each time in a loop that has slow steps."""


class Stream(Iterator[Any]):
    """The values of a generator function that runs on ranks, one at a time, when they are asked for.

    The generator is opened at once, and works while a value is waited for, as any generator does: it is never ahead of who
    reads it by more than one pull. Between two values the ranks are free for other runs. A timeout of the call counts
    for each pull.

    Args:
        task: of a generator function.
        ranks: one, which gives values; or several, in step, which give lists by rank with None where a rank has ended.

    Raises:
        RunError: also of the type that the generator raised; it is over then.
    """

    def __init__(self, task: Task, pool: Pool, ranks: Sequence[int], *, together: bool) -> None:
        self._key = uuid.uuid4().hex
        self._task, self._pool, self._ranks, self._together = task, pool, tuple(ranks), together
        self._values: deque[Any] = deque()
        self._quick, self._ended = 0, frozenset[int]()
        self._over = True
        # the name, and the names of the arguments in messages, are the function's own
        opening = functools.wraps(task.function)(
            functools.partial(generators.open_one, self._key, task.function)
        )
        run(replace(task, function=opening), pool, self._ranks)
        self._over = False

    def __next__(self) -> Any:
        while not self._values and not self._over:
            self._pull()
        if not self._values:
            raise StopIteration
        return self._values.popleft()

    def _pull(self) -> None:
        # ranks in step must take the same number of steps: there may be collectives in them
        several = self._quick >= QUICK_VALUES and not self._together
        try:
            most = min(self._quick, MOST_VALUES) if several else 1
            pulls = self._call(generators.advance, self._key, most, PULL_SECONDS, self._ended)
        except BaseException:
            self._over = True  # what has raised, or was interrupted, cannot go on
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
        """End the generator where it stands; its ``finally`` runs on the ranks. Twice is safe."""
        self._values.clear()
        if not self._over:
            self._over = True
            if self._pool.state is not State.STOPPED:
                self._call(generators.close, self._key)

    def __del__(self) -> None:
        with contextlib.suppress(SkyError):  # the pool is gone, or the generator raises as it ends
            self.close()

    def __repr__(self) -> str:
        return f"<values of {self._task.name}(…)>"
