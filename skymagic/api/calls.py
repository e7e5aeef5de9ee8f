"""Lazy calls of functions decorated with ``@sky.function``, and their operators."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from skymagic.jobs.task import Stream, Task, run_on_all, run_on_one
from skymagic.jobs.workers import Results
from skymagic.pool import Pool
from skymagic.runtime import info


@dataclass(frozen=True, eq=False, repr=False)
class Call(Task):
    """A function with its arguments, not run yet.

    ``call @ pool`` runs it on every rank and returns a list in rank order; ``call >> pool`` runs it
    on one rank and returns its value; ``a & b`` joins calls to run side by side. An exception
    raised by the function is raised here with its own type (and is a `RankError` too).

    For a generator function, ``>>`` returns an iterator over the values, and ``@`` an iterator over
    lists in rank order, with None for ranks that have finished: see `skymagic.jobs.task.Stream`.
    """

    def with_timeout(self, seconds: float) -> Call:
        """Return the same call with a time limit; exceeding it raises `RunTimeout`."""
        return replace(self, timeout=positive(seconds))

    @property
    def yields(self) -> bool:
        """True if the function is a generator function."""
        return inspect.isgeneratorfunction(self.function)

    def __matmul__(self, pool: Any) -> Any:
        target = pool_of(pool, f"{self.name}(…) @")
        return (
            Stream(self, target, range(target.world_size), together=True)
            if self.yields
            else run_on_all(self, target)
        )

    def __rshift__(self, pool: Any) -> Any:
        target = pool_of(pool, f"{self.name}(…) >>")
        if self.yields:
            return Stream(
                self, target, target.scheduler.least_loaded(target.world_size), together=False
            )
        return run_on_one(self, target)

    def __and__(self, other: Any) -> Calls:
        joined: Calls = Calls((self,)) & other
        return joined

    def __repr__(self) -> str:
        return (
            f"<{self.name}(…), not run yet: write {self.name}(…) @ pool for all ranks, "
            "or >> pool for one>"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Calls:
    """Calls that run side by side: ``(a() & b()) >> pool`` returns a tuple of their values.

    Each call runs on one rank. If there are more calls than ranks, each rank takes the next call
    when it is free. ``@`` runs each call on all ranks, one call after the other. The first failure
    stops the other calls.

    Attributes:
        stream: ``>>`` and ``@`` return an iterator over the values instead of a tuple. With ``>>``
            all calls start at once, with ``@`` each starts when its value is requested.
        ordered: yield a stream's values in the order of the calls; False for completion order.
    """

    calls: tuple[Call, ...] = ()
    stream: bool = False
    ordered: bool = True

    def with_timeout(self, seconds: float) -> Calls:
        """Return the same calls, each with this time limit."""
        return replace(self, calls=tuple(call.with_timeout(seconds) for call in self.calls))

    def __rshift__(self, pool: Any) -> Any:
        target = pool_of(pool, "(… & …) >>")
        for call in self.calls:
            if call.yields:
                raise TypeError(
                    f"{call.name} yields its values: write `for value in {call.name}(…) >> "
                    "pool`, by itself"
                )
        values = Results(self.calls, target, ordered=self.ordered or not self.stream)
        return values if self.stream else tuple(values)

    def __matmul__(self, pool: Any) -> Any:
        target = pool_of(pool, "(… & …) @")
        values = (call @ target for call in self.calls)
        return values if self.stream else tuple(values)

    def __and__(self, other: Any) -> Calls:
        if isinstance(other, Call):
            return replace(self, calls=(*self.calls, other))
        if isinstance(other, Calls):
            return replace(self, calls=(*self.calls, *other.calls))
        raise TypeError(
            f"& joins calls that have not run, and {other!r} is not one; >> and @ bind "
            "closer than &, so write "
            "(a() & b()) >> pool"
        )

    def __repr__(self) -> str:
        names = " & ".join(f"{call.name}(…)" for call in self.calls)
        return f"<{names}, not run yet: write ({names}) >> pool>"


class Function:
    """A function whose calls are lazy. On a rank, which has no pool, a call runs immediately.

    Attributes:
        local: the original function, to run here: ``train.local(epochs=1)``.
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
        """Return the same function; calls that exceed this time limit raise `RunTimeout`."""
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
    """Return a positive number of seconds. Raises ValueError for anything else."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"a timeout is a number of seconds above 0, not {seconds!r}")
    return float(seconds)


def pool_of(subject: Any, operation: str) -> Pool:
    """Return the pool on the right of an operator. Raises TypeError for anything else."""
    pool = getattr(subject, "pool", subject)
    if isinstance(pool, Pool):
        return pool
    raise TypeError(f"{operation} needs a pool on its right, not {subject!r}")
