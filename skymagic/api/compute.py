"""The same as the magics, as Python: lazy functions, and pools that are context managers.

::

    @sky.function
    def train(epochs): ...

    with sky.Compute(nodes=4, plugins=[sky.plugins.torch()]) as pool:
        results = train(epochs=3) @ pool        # every rank, a list by rank
        one = train(epochs=1) >> pool           # one rank
        a, b = (train(1) & train(2)) >> pool    # side by side
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, overload

from skymagic.api import notebooks
from skymagic.api.calls import Call, Calls, Function, positive
from skymagic.api.running_pool import RunningPool, finish
from skymagic.api.specs import ELSEWHERE, request_of
from skymagic.display.screen import print_note
from skymagic.errors import PoolStateError, RequestError
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.image import Image
from skymagic.plan.requests import Defaults, PluginSpec
from skymagic.plan.suggest import suggesting
from skymagic.plugins import Plugin
from skymagic.pool import Pool, making, records, registry
from skymagic.pool.status import State
from skymagic.providers import Choice
from skymagic.run import interrupt
from skymagic.runtime import rendezvous

_numbers = itertools.count(1)
OWN = ("self", "name", "timeout", "console")
"""Arguments of `Compute` that do not say what its pool is to be made of."""
OF_THE_POOL = ("job_id", "metrics", "name", "plan", "restart", "state", "status", "world_size")
"""What a pool that runs has for users, besides the methods of `Compute`."""
ON_A_RANK = (
    "sky.Compute(…) belongs in a cell of the notebook: this code already runs on the ranks of a pool. Call the function "
    "itself, or run it from the notebook (f() @ pool)"
)


@overload
def function(body: Callable[..., Any], /) -> Function: ...
@overload
def function(*, timeout: float | None = None) -> Callable[[Callable[..., Any]], Function]: ...


@suggesting("@sky.function")
def function(body: Callable[..., Any] | None = None, /, *, timeout: float | None = None) -> Any:
    """Make a function lazy: its calls run on a pool, with ``@``, ``>>`` and ``&``. Write it above all other decorators.

    Args:
        timeout: seconds that a call may take; None for no limit.

    Raises:
        TypeError: not a function, or one that is lazy already.
    """
    if body is None:
        return lambda given: _lazy(given, timeout)
    return _lazy(body, timeout)


compute = function
"""Another name of `function`."""


def _lazy(body: Any, timeout: float | None) -> Function:
    if getattr(body, "__sky_lazy__", False):
        raise TypeError("the function is already lazy: write @sky.function (or @sky.compute) once")
    if inspect.isclass(body) or not callable(body):
        raise TypeError(f"@sky.function decorates a function, not {body!r}")
    return Function(body, None if timeout is None else positive(timeout))


@suggesting("sky.gather")
def gather(*calls: Call | Calls, stream: bool = False, ordered: bool = True) -> Calls:
    """Join calls to run side by side: ``sky.gather(*(score(x) for x in models)) >> pool``, a tuple in their order.

    Args:
        stream: give an iterator instead, which has each value as soon as it is there.
        ordered: with `stream`: in the order of the calls; False for the order in which they end.
    """
    return functools.reduce(operator.and_, calls, Calls(stream=stream, ordered=ordered))


@suggesting("sky.Compute", ELSEWHERE, second_names=("vcpus", "memory_gb"))
class Compute(RunningPool):
    """A pool, made from Python. ``with sky.Compute(…) as pool:`` starts it, and stops it also after an error.

    `start` and `stop` do the same without ``with``; nothing starts before that. Magics find the pool by its name (``--pool``) or
    as the one used last; `find` returns a pool that a magic started.

    Args:
        provider: ``sky.Local()``, ``sky.SSH(hosts)``, ``sky.AWS()``, ``sky.Slurm()``, ``sky.Ray()``, or a name; this machine where it
            satisfies the request.
        nodes: machines (on this machine: simulated nodes, with GPUs of their own); 1.
        ranks: on this machine: one node of so many ranks, with a GPU each where there are any; refused elsewhere.
        accelerator: per node: ``"A100"``, ``"A100:8"``, ``"all"``, ``"none"``, ``4``, ``"0,2"`` or ``sky.accelerators.A100(count=8)``.
        plugins: ``sky.plugins.torch()`` and the like, or as text: ``"torch:backend=gloo"``.
        image: packages, variables and files of the nodes.
        name: name of the pool. A running pool of this name that fits is reused, and ``with`` does not stop it.
        procs_per_node: ranks on each node; one for each accelerator, else 1.
        cpus, memory: of each node; a number, or ``"8+"`` for at least 8. Memory in GB.
        pip, env, secrets: packages, variables, and names of variables whose values are kept secret.
        hosts, region, spot, max_price: for providers that have these; max_price in dollars per hour.
        idle, max_lifetime: ``"30m"``, or seconds: when the pool ends by itself.
        timeout: default time limit of a call in seconds; None: no limit.
        console: whether the start of a pool shows its steps.
        vcpus, memory_gb: Skyward's names: ``vcpus=8`` is ``cpus="8+"``, ``memory_gb=32`` is ``memory="32+"``.

    Raises:
        RequestError: lists every mistake in the arguments.
    """

    def __init__(
        self,
        *,
        provider: str | Choice | None = None,
        nodes: int | None = None,
        ranks: int | None = None,
        accelerator: str | Accelerator | Callable[[], Accelerator] | None = None,
        plugins: Iterable[Plugin | PluginSpec | str] = (),
        image: Image | None = None,
        name: str | None = None,
        procs_per_node: int | None = None,
        cpus: float | str | None = None,
        memory: float | str | None = None,
        vcpus: float | None = None,
        memory_gb: float | None = None,
        pip: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        secrets: Iterable[str] = (),
        hosts: Iterable[str] = (),
        region: str | None = None,
        spot: bool = False,
        max_price: float | None = None,
        idle: float | str | None = None,
        max_lifetime: float | str | None = None,
        timeout: float | None = None,
        console: bool = True,
    ) -> None:
        given = {
            k: v
            for k, v in locals().items()
            if k not in OWN and not any(v is each for each in (None, (), False))
        }
        self._namespace = sys._getframe(2).f_globals  # 1 is the check of keywords
        self._tell = print_note if console else lambda _: None
        self._request = request_of(given)
        self._defaults = Defaults(timeout=None if timeout is None else positive(timeout))
        self._name = name
        self._pool: Pool | None = None
        self._own = True

    @classmethod
    def of(cls, pool: Pool) -> Compute:
        """A pool that runs already, with the methods of this class; leaving it does not end it."""
        found = cls.__new__(cls)
        found._request, found._name, found._pool, found._own = (
            pool.plan.request,
            pool.name,
            pool,
            False,
        )
        found._tell = print_note
        found._namespace, found._defaults = pool.namespace, pool.defaults
        return found

    @property
    def pool(self) -> Pool:
        """The pool itself.

        Raises:
            PoolStateError: it is not started.
        """
        if self._pool is None:
            raise PoolStateError(
                "the pool is not started: write `with sky.Compute(…) as pool:`, or call start()"
            )
        return self._pool

    def start(self) -> Compute:
        """Make the pool ready; returns this object. Twice is safe.

        Raises:
            RequestError: the pool cannot be made as it is asked for, or this is a rank of one.
            ProvisionError: machines or ranks did not come up; nothing is left running.
        """
        if self._pool is not None and self._pool.state is not State.STOPPED:
            return self
        if rendezvous.attached():
            raise RequestError(ON_A_RANK)
        running = {pool.name for pool in registry.pools()}
        taken = running | {record.name for record in records.every()}
        name = self._name or next(n for i in _numbers if (n := f"compute-{i}") not in taken)
        self._pool = making.ensure(
            replace(self._request, name=name), self._namespace, self._defaults, self._tell
        )
        self._own = name not in running and not self._pool.attached
        return self

    def stop(self) -> None:
        """Stop the ranks and release the machines; calling it twice is safe."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Compute:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._own:
            self.stop()

    @property
    def runs(self) -> int:
        """How many cells, calls and scripts have begun on the pool."""
        return self.pool.runs.count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.pool, name)

    def __dir__(self) -> list[str]:
        own = {name for name in super().__dir__() if not name.startswith("_")}
        return sorted(own | (set(OF_THE_POOL) if self._pool is not None else set()))

    def __repr__(self) -> str:
        return "<Compute, not started>" if self._pool is None else repr(self._pool)

    def _repr_html_(self) -> str | None:
        return None if self._pool is None else self._pool._repr_html_()


ComputePool = Compute
"""Another name of `Compute`."""


def find(name: str | None = None) -> Compute:
    """A running pool, started by a magic or from Python: by its name, or the pool used last.

    Raises:
        PoolError: no such pool; the message says how to start one.
    """
    return Compute.of(registry.pool_named(name))


def pools() -> list[Compute]:
    """All pools of this notebook; the pool used last comes last."""
    return [Compute.of(pool) for pool in registry.pools()]


def attach(name: str, *, take_over: bool = False) -> Compute:
    """Continue with a pool that another notebook left, as ``%sky_attach`` does: with its output since then, and its variables.

    Args:
        name: the pool's, or its job id.
        take_over: take it from a notebook that is still running.

    Raises:
        PoolError: there is no such pool, its notebook runs, or it is gone.
        RunError: the run that was in progress failed.
    """
    namespace = sys._getframe(1).f_globals
    notebooks.settled(records.named(name))
    with interrupt.deferred():
        pool, found = making.attach(name, namespace, Defaults(), print_note, take_over=take_over)
        for unfinished in found:
            finish(pool, unfinished, namespace)
    return Compute.of(pool)
