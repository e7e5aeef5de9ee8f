"""A task: a function with its arguments, and how it runs on all ranks, on one, or beside others.

A task is a run whose source is one generated line. The function and its arguments travel beside the notebook's
variables under names of their own, and the ranks forget them when the task is over.
"""

from __future__ import annotations

import contextvars
import inspect
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.display.screen import NotebookScreen, in_ipython
from skymagic.errors import CaptureError, RankError, RunInterrupted
from skymagic.jobs import cell
from skymagic.pool import Pool
from skymagic.run import interrupt
from skymagic.run.interrupt import StopSignal
from skymagic.run.report import Limits
from skymagic.run.run import Screen
from skymagic.run.spec import RunSpec

FUNCTION = "_sky_call"
ARGUMENT = "_sky_arg_"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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
    return run(task, pool, tuple(pool.turns.lightest(pool.world_size)))[0]


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
    limits = Limits(task.timeout or defaults.timeout, defaults.grace, defaults.stall_after)
    try:
        with interrupt.deferred() as interrupts:
            values = cell.broadcast(pool, spec_of(task, ranks), limits, screen, stop=stop)
            if values.problems:
                raise cell.result_error(values, [])
            interrupts.values = values.value
            return values.value
    except CaptureError as refused:
        raise CaptureError(str(refused).replace(ARGUMENT, "argument ").replace(FUNCTION, task.name)) from None
    except RankError as failed:
        if (
            failed.traceback and not in_ipython()
        ):  # a plain script shows nothing but the message and its notes
            failed.add_note(_COLOUR.sub("", "\n".join(failed.traceback)))
        raise


def spec_of(task: Task, ranks: tuple[int, ...]) -> RunSpec:
    """The run that carries out a task: one line that names the function and each argument."""
    names = parameters(task)
    extra: dict[str, Any] = {FUNCTION: task.function}
    extra.update({ARGUMENT + name: value for name, value in zip(names, task.args, strict=False)})
    extra.update({ARGUMENT + name: value for name, value in task.kwargs.items()})
    written = [ARGUMENT + name for name in names] + [f"{name}={ARGUMENT}{name}" for name in task.kwargs]
    wait = "await " if inspect.iscoroutinefunction(task.function) else ""
    # the semicolon keeps the value from being shown; who wants it has it
    source = f"{wait}{FUNCTION}({', '.join(written)});  # {task.name}"
    return RunSpec(
        source=source, source_without_magics=source, ranks=ranks, visible_ranks=ranks, value_ranks=ranks,
        execution_count=execution_count(), extra=extra,
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
    return getattr(shell, "execution_count", 1)


# -- side by side ----------------------------------------------------------------------------------------------------


class Together:
    """One screen for runs on several threads.

    Args:
        ranks: all ranks whose output may come.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._screen = NotebookScreen(ranks)
        self._lock = threading.Lock()

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's stream."""
        with self._lock:
            self._screen.text(rank, name, text)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message."""
        with self._lock:
            self._screen.rich(rank, kind, content)

    def note(self, text: str) -> None:
        """A line of skymagic's own."""
        with self._lock:
            self._screen.note(text)

    def finish(self) -> None:
        """All runs are over."""
        with self._lock:
            self._screen.finish()


def side_by_side(tasks: Sequence[Task], pool: Pool) -> list[Any]:
    """Each task on one rank, as many at a time as there are ranks; the values in the order of the tasks.

    Raises:
        RunError: of the first that failed; the others are stopped.
    """
    if not tasks:
        return []
    ranks = pool.turns.lightest(pool.world_size, min(len(tasks), pool.world_size))
    return Crew(tasks, pool, sorted(ranks)).values()


class Crew:
    """A thread for each rank, which takes the next task when its rank is free."""

    def __init__(self, tasks: Sequence[Task], pool: Pool, ranks: Sequence[int]) -> None:
        self._pool = pool
        self._screen = Together(ranks)
        self._waiting: Iterator[tuple[int, Task]] = iter(enumerate(tasks))
        self._next = threading.Lock()
        self._stops: dict[int, StopSignal] = {rank: StopSignal() for rank in ranks}
        self._news: queue.SimpleQueue[tuple[int, Any, BaseException | None] | None] = queue.SimpleQueue()
        self._values: list[Any] = [None] * len(tasks)
        self._stopped = False

    def values(self) -> list[Any]:
        """Run everything."""
        for rank in self._stops:
            context = contextvars.copy_context()  # output of the thread belongs to this cell
            threading.Thread(
                target=context.run, args=(self._work, rank), name=f"skymagic-call-{rank}", daemon=True
            ).start()
        open_threads, problem = len(self._stops), None
        while open_threads:
            try:
                news = self._news.get()
            except KeyboardInterrupt:
                self._press()
                continue
            if news is None:
                open_threads -= 1
                continue
            index, self._values[index], failed = news
            if failed is not None and (problem is None or isinstance(problem, RunInterrupted)):
                problem = failed
                if not self._stopped:
                    self._press()
        self._screen.finish()
        if problem is not None:
            raise problem
        if self._stopped:
            raise RunInterrupted("interrupted")
        return self._values

    def _press(self) -> None:
        self._stopped = True
        for stop in self._stops.values():
            stop.send()

    def _work(self, rank: int) -> None:
        try:
            while not self._stopped:
                with self._next:
                    index, task = next(self._waiting, (-1, None))
                if task is None:
                    return
                self._run(index, task, rank)
        finally:
            self._news.put(None)

    def _run(self, index: int, task: Task, rank: int) -> None:
        try:
            value = run(task, self._pool, (rank,), self._screen, self._stops[rank])[0]
        except BaseException as problem:
            self._news.put((index, None, problem))
        else:
            self._news.put((index, value, None))
