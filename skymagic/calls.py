"""Lazy calls: what ``@sky.function`` makes, and how a call runs on all ranks, on one, or beside others.

A call is an order whose source is one generated line. The function and its arguments travel beside the notebook's
variables under names of their own, and the ranks forget them when the call is over.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic import broadcast, runtime
from skymagic.errors import CaptureError, RankError, RunInterrupted
from skymagic.order import Order
from skymagic.pool import Pool
from skymagic.report import Limits
from skymagic.run import Screen, Stop
from skymagic.screen import NotebookScreen, in_ipython

FUNCTION = "_sky_call"
ARGUMENT = "_sky_arg_"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """A function with its arguments, not run yet.

    ``call @ pool`` runs it on every rank and gives a list by rank; ``call >> pool`` runs it on one rank and gives its
    value; ``a & b`` joins calls that are to run side by side. What the function raises is raised here with its own type
    (and is a `RankError` too).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def with_timeout(self, seconds: float) -> Call:
        """The same call, stopped with a `RunTimeout` when it takes longer than this."""
        return replace(self, timeout=positive(seconds))

    def __matmul__(self, pool: Any) -> list[Any]:
        return on_all(self, pool_of(pool, f"{self.name}(…) @"))

    def __rshift__(self, pool: Any) -> Any:
        return on_one(self, pool_of(pool, f"{self.name}(…) >>"))

    def __and__(self, other: Any) -> Calls:
        joined: Calls = Calls((self,)) & other
        return joined

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        return f"<{self.name}(…), not run yet: write {self.name}(…) @ pool for all ranks, or >> pool for one>"


@dataclass(frozen=True, eq=False, repr=False)
class Calls:
    """Calls that run side by side: ``(a() & b()) >> pool`` gives a tuple of their values, one rank for each.

    With more calls than ranks, each rank takes the next call when it is free. ``@`` runs each of them on all ranks, one
    after the other. The first that fails stops the others.
    """

    calls: tuple[Call, ...] = ()

    def with_timeout(self, seconds: float) -> Calls:
        """The same calls, each stopped when it takes longer than this."""
        return Calls(tuple(call.with_timeout(seconds) for call in self.calls))

    def __rshift__(self, pool: Any) -> tuple[Any, ...]:
        return tuple(side_by_side(self.calls, pool_of(pool, "(… & …) >>")))

    def __matmul__(self, pool: Any) -> tuple[list[Any], ...]:
        there = pool_of(pool, "(… & …) @")
        return tuple(on_all(call, there) for call in self.calls)

    def __and__(self, other: Any) -> Calls:
        if isinstance(other, Call):
            return Calls((*self.calls, other))
        if isinstance(other, Calls):
            return Calls((*self.calls, *other.calls))
        raise TypeError(
            f"& joins calls that have not run, and {other!r} is not one; >> and @ bind closer than &, so write "
            "(a() & b()) >> pool"
        )

    def __repr__(self) -> str:
        names = " & ".join(f"{call.name}(…)" for call in self.calls)
        return f"<{names}, not run yet: write ({names}) >> pool>"


class Function:
    """A function whose calls are lazy. Within a rank, where there is no pool, a call simply runs.

    Attributes:
        local: the function itself, to run here: ``train.local(epochs=1)``.
    """

    __sky_lazy__ = True

    def __init__(self, function: Callable[..., Any], timeout: float | None = None) -> None:
        functools.update_wrapper(self, function)
        self.local = function
        self.timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runtime.on_a_rank():
            return self.local(*args, **kwargs)
        with contextlib.suppress(ValueError):  # some builtins have no signature
            inspect.signature(self.local).bind(*args, **kwargs)
        return Call(self.local, args, kwargs, self.timeout)

    def with_timeout(self, seconds: float) -> Function:
        """The same function; its calls are stopped with a `RunTimeout` when they take longer than this."""
        return Function(self.local, positive(seconds))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else Function(self.local.__get__(instance, owner), self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.local, self.timeout)

    def _not_called(self, other: object) -> Any:
        name = self.local.__name__
        raise TypeError(f"{name} is not called yet: write {name}(…) @ pool or {name}(…) >> pool")

    __matmul__ = __rshift__ = __and__ = _not_called

    def __repr__(self) -> str:
        return f"<lazy function {self.local.__qualname__}>"


def positive(seconds: float) -> float:
    """A time in seconds. Raises ValueError for none."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"a timeout is a number of seconds above 0, not {seconds!r}")
    return float(seconds)


def pool_of(subject: Any, operation: str) -> Pool:
    """The pool on the right of an operator. Raises TypeError for something else."""
    found = getattr(subject, "pool", subject)
    if isinstance(found, Pool):
        return found
    raise TypeError(f"{operation} wants a pool on its right, not {subject!r}")


# -- running ---------------------------------------------------------------------------------------------------------


def on_all(call: Call, pool: Pool) -> list[Any]:
    """The call on every rank; the values in rank order."""
    return run(call, pool, tuple(range(pool.world_size)))


def on_one(call: Call, pool: Pool) -> Any:
    """The call on the rank that has least to do; ranks that are alike take turns."""
    return run(call, pool, tuple(pool.turns.lightest(pool.world_size)))[0]


def run(
    call: Call, pool: Pool, ranks: tuple[int, ...], screen: Screen | None = None, stop: Stop | None = None
) -> list[Any]:
    """The call on these ranks; the values in their order.

    Raises:
        RunError: also of the type that the function raised.
        CaptureError: the function, its arguments or what it uses cannot travel.
    """
    defaults = pool.defaults
    limits = Limits(call.timeout or defaults.timeout, defaults.grace, defaults.stall_after)
    try:
        values = broadcast.broadcast(pool, order_of(call, ranks), limits, screen, stop=stop)
    except CaptureError as refused:
        raise CaptureError(str(refused).replace(ARGUMENT, "argument ").replace(FUNCTION, call.name)) from None
    except RankError as failed:
        if (
            failed.traceback and not in_ipython()
        ):  # a plain script shows nothing but the message and its notes
            failed.add_note(_COLOUR.sub("", "\n".join(failed.traceback)))
        raise
    if values.problems:
        raise broadcast.result_error(values, [])
    return values.value


def order_of(call: Call, ranks: tuple[int, ...]) -> Order:
    """The order that carries out a call: one line that names the function and each argument."""
    names = parameters(call)
    extra: dict[str, Any] = {FUNCTION: call.function}
    extra.update({ARGUMENT + name: value for name, value in zip(names, call.args, strict=False)})
    extra.update({ARGUMENT + name: value for name, value in call.kwargs.items()})
    written = [ARGUMENT + name for name in names] + [f"{name}={ARGUMENT}{name}" for name in call.kwargs]
    wait = "await " if inspect.iscoroutinefunction(call.function) else ""
    # the semicolon keeps the value from being shown; who wants it has it
    source = f"{wait}{FUNCTION}({', '.join(written)});  # {call.name}"
    return Order(
        source=source, plain=source, ranks=ranks, shown=ranks, want=ranks,
        execution_count=execution_count(), extra=extra,
    )  # fmt: skip


def parameters(call: Call) -> list[str]:
    """A name for each positional argument: its parameter's, or its number."""
    try:
        known = list(inspect.signature(call.function).parameters.values())
    except (ValueError, TypeError):
        known = []
    plain = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [plain[i] if i < len(plain) else str(i) for i in range(len(call.args))]


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


def side_by_side(calls: Sequence[Call], pool: Pool) -> list[Any]:
    """Each call on one rank, as many at a time as there are ranks; the values in the order of the calls.

    Raises:
        RunError: of the first call that failed; the others are stopped.
    """
    if not calls:
        return []
    ranks = pool.turns.lightest(pool.world_size, min(len(calls), pool.world_size))
    return Crew(calls, pool, sorted(ranks)).values()


class Crew:
    """A thread for each rank, which takes the next call when its rank is free."""

    def __init__(self, calls: Sequence[Call], pool: Pool, ranks: Sequence[int]) -> None:
        self._pool = pool
        self._screen = Together(ranks)
        self._waiting: Iterator[tuple[int, Call]] = iter(enumerate(calls))
        self._next = threading.Lock()
        self._stops: dict[int, Stop] = {rank: Stop() for rank in ranks}
        self._news: queue.SimpleQueue[tuple[int, Any, BaseException | None] | None] = queue.SimpleQueue()
        self._values: list[Any] = [None] * len(calls)
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
            stop.press()

    def _work(self, rank: int) -> None:
        try:
            while not self._stopped:
                with self._next:
                    index, call = next(self._waiting, (-1, None))
                if call is None:
                    return
                self._run(index, call, rank)
        finally:
            self._news.put(None)

    def _run(self, index: int, call: Call, rank: int) -> None:
        try:
            value = run(call, self._pool, (rank,), self._screen, self._stops[rank])[0]
        except BaseException as problem:
            self._news.put((index, None, problem))
        else:
            self._news.put((index, value, None))
