"""Lazy calls: what ``@sky.function`` makes, and the operators that run them on a pool."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from skymagic.jobs.task import Stream, Task, on_all, on_one
from skymagic.jobs.workers import Results
from skymagic.pool import Pool
from skymagic.runtime import info


@dataclass(frozen=True, eq=False, repr=False)
class Call(Task):
    """A function with its arguments, not run yet.

    ``call @ pool`` runs it on every rank and gives a list by rank; ``call >> pool`` runs it on one rank and gives its
    value; ``a & b`` joins calls that are to run side by side. What the function raises is raised here with its own type
    (and is a `RankError` too).

    Of a function that yields, ``>>`` gives an iterator over the values, and ``@`` one over lists by rank, None where a rank
    has ended: `skymagic.jobs.task.Stream`.
    """

    def with_timeout(self, seconds: float) -> Call:
        """The same call, stopped with a `RunTimeout` when it takes longer than this."""
        return replace(self, timeout=positive(seconds))

    @property
    def yields(self) -> bool:
        """Whether it is a generator function that is called."""
        return inspect.isgeneratorfunction(self.function)

    def __matmul__(self, pool: Any) -> Any:
        there = pool_of(pool, f"{self.name}(…) @")
        return (
            Stream(self, there, range(there.world_size), together=True)
            if self.yields
            else on_all(self, there)
        )

    def __rshift__(self, pool: Any) -> Any:
        there = pool_of(pool, f"{self.name}(…) >>")
        if self.yields:
            return Stream(
                self, there, there.scheduler.least_loaded(there.world_size), together=False
            )
        return on_one(self, there)

    def __and__(self, other: Any) -> Calls:
        joined: Calls = Calls((self,)) & other
        return joined

    def __repr__(self) -> str:
        return f"<{self.name}(…), not run yet: write {self.name}(…) @ pool for all ranks, or >> pool for one>"


@dataclass(frozen=True, eq=False, repr=False)
class Calls:
    """Calls that run side by side: ``(a() & b()) >> pool`` gives a tuple of their values, one rank for each.

    With more calls than ranks, each rank takes the next call when it is free. ``@`` runs each of them on all ranks, one
    after the other. The first that fails stops the others.

    Attributes:
        stream: ``>>`` and ``@`` give an iterator over the values in place of a tuple. With ``>>`` all calls begin at
            once, with ``@`` each when its value is asked for.
        ordered: values of a stream come in the order of the calls, else in that in which the calls end.
    """

    calls: tuple[Call, ...] = ()
    stream: bool = False
    ordered: bool = True

    def with_timeout(self, seconds: float) -> Calls:
        """The same calls, each stopped when it takes longer than this."""
        return replace(self, calls=tuple(call.with_timeout(seconds) for call in self.calls))

    def __rshift__(self, pool: Any) -> Any:
        there = pool_of(pool, "(… & …) >>")
        for call in self.calls:
            if call.yields:
                raise TypeError(
                    f"{call.name} yields its values: write `for value in {call.name}(…) >> pool`, by itself"
                )
        values = Results(self.calls, there, ordered=self.ordered or not self.stream)
        return values if self.stream else tuple(values)

    def __matmul__(self, pool: Any) -> Any:
        there = pool_of(pool, "(… & …) @")
        values = (call @ there for call in self.calls)
        return values if self.stream else tuple(values)

    def __and__(self, other: Any) -> Calls:
        if isinstance(other, Call):
            return replace(self, calls=(*self.calls, other))
        if isinstance(other, Calls):
            return replace(self, calls=(*self.calls, *other.calls))
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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if info.on_a_rank():
            return self.local(*args, **kwargs)
        with contextlib.suppress(ValueError):  # some builtins have no signature
            inspect.signature(self.local).bind(*args, **kwargs)
        return Call(self.local, args, kwargs, self.timeout)

    def with_timeout(self, seconds: float) -> Function:
        """The same function; its calls are stopped with a `RunTimeout` when they take longer than this."""
        return Function(self.local, positive(seconds))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return (
            self
            if instance is None
            else Function(self.local.__get__(instance, owner), self.timeout)
        )

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
    raise TypeError(f"{operation} needs a pool on its right, not {subject!r}")
