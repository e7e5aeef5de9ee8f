"""Python counterpart of the magics: lazy functions, and pools that are context managers.

::

    @sky.function
    def train(epochs): ...

    with sky.Compute(nodes=4, plugins=[sky.plugins.torch()]) as pool:
        results = train(epochs=3) @ pool        # every rank, a list in rank order
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
from skymagic.pool import Pool, launch, records, registry
from skymagic.pool.status import State
from skymagic.providers import Choice
from skymagic.run import interrupt
from skymagic.runtime import rendezvous

_numbers = itertools.count(1)
OWN = ("self", "name", "timeout", "console")
"""Arguments of `Compute` that do not describe the pool to make."""
OF_THE_POOL = ("job_id", "metrics", "name", "plan", "restart", "state", "status", "world_size")
"""Public attributes that a running pool adds to those of `Compute`."""
ON_A_RANK = (
    "sky.Compute(…) belongs in a cell of the notebook: this code already runs on the ranks "
    "of a pool. Call the function "
    "itself, or run it from the notebook (f() @ pool)"
)


@overload
def function(body: Callable[..., Any], /) -> Function: ...
@overload
def function(*, timeout: float | None = None) -> Callable[[Callable[..., Any]], Function]: ...


@suggesting("@sky.function")
def function(body: Callable[..., Any] | None = None, /, *, timeout: float | None = None) -> Any:
    """Make a function lazy: its calls run on a pool, with ``@``, ``>>`` and ``&``.

    Write it above all other decorators.

    Args:
        timeout: time limit of a call in seconds; None for no limit.

    Raises:
        TypeError: the argument is not a function, or is already lazy.
    """
    if body is None:
        return lambda function: _lazy(function, timeout)
    return _lazy(body, timeout)


compute = function
"""Alias of `function`."""


def _lazy(body: Any, timeout: float | None) -> Function:
    if getattr(body, "__sky_lazy__", False):
        raise TypeError("the function is already lazy: write @sky.function (or @sky.compute) once")
    if inspect.isclass(body) or not callable(body):
        raise TypeError(f"@sky.function decorates a function, not {body!r}")
    return Function(body, None if timeout is None else positive(timeout))


@suggesting("sky.gather")
def gather(*calls: Call | Calls, stream: bool = False, ordered: bool = True) -> Calls:
    """Join calls to run side by side: ``sky.gather(*(score(x) for x in models)) >> pool``.

    The result is a tuple in the order of the calls.

    Args:
        stream: return an iterator instead, which yields each value as soon as it is available.
        ordered: with `stream`: yield in the order of the calls; False for completion order.
    """
    return functools.reduce(operator.and_, calls, Calls(stream=stream, ordered=ordered))


@suggesting("sky.Compute", ELSEWHERE, hidden_keywords=("vcpus", "memory_gb"))
class Compute(RunningPool):
    """A pool made from Python: ``with sky.Compute(…) as pool:`` starts it, and stops it at the end.

    It is also stopped after an error. `start` and `stop` do the same without ``with``; nothing
    starts before that. Magics find the pool by its name (``--pool``) or as the most recently used
    pool; `find` returns a pool that a magic started.

    Args:
        provider: ``sky.Local()``, ``sky.SSH(hosts)``, ``sky.AWS()``, ``sky.Slurm()``,
            ``sky.Ray()``, or a name; default: this machine if it satisfies the request.
        nodes: number of machines (on this machine: simulated nodes, each with its own GPUs);
            default: 1.
        ranks: on this machine: one node with this many ranks, with one GPU each if there are any;
            refused elsewhere.
        accelerator: per node: ``"A100"``, ``"A100:8"``, ``"all"``, ``"none"``, ``4``, ``"0,2"`` or
            ``sky.accelerators.A100(count=8)``.
        plugins: for example ``sky.plugins.torch()``, or as text: ``"torch:backend=gloo"``.
        image: packages, variables and files of the nodes.
        name: name of the pool. A running pool of this name that fits is reused, and ``with`` does
            not stop it.
        procs_per_node: ranks on each node; default: one per accelerator, else 1.
        cpus, memory: of each node; a number, or ``"8+"`` for at least 8. Memory in GB.
        pip, env, secrets: packages, variables, and names of variables whose values are kept secret.
        hosts, region, spot, max_price: for providers that support them; max_price in dollars per
            hour.
        idle, max_lifetime: time after which the pool ends by itself: ``"30m"``, or seconds.
        timeout: default time limit of a call in seconds; None for no limit.
        console: show the steps while the pool starts.
        vcpus, memory_gb: Skyward's names: ``vcpus=8`` is ``cpus="8+"``, ``memory_gb=32`` is
            ``memory="32+"``.

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
        keywords = {
            k: v
            for k, v in locals().items()
            if k not in OWN and not any(v is unset for unset in (None, (), False))
        }
        self._namespace = sys._getframe(2).f_globals  # 1 is the check of keywords
        self._tell = print_note if console else lambda _: None
        self._request = request_of(keywords)
        self._defaults = Defaults(timeout=None if timeout is None else positive(timeout))
        self._name = name
        self._pool: Pool | None = None
        self._own = True

    @classmethod
    def of(cls, pool: Pool) -> Compute:
        """Wrap a running pool in this class; leaving the context does not end the pool."""
        compute_pool = cls.__new__(cls)
        compute_pool._request, compute_pool._name, compute_pool._pool, compute_pool._own = (
            pool.plan.request,
            pool.name,
            pool,
            False,
        )
        compute_pool._tell = print_note
        compute_pool._namespace, compute_pool._defaults = pool.namespace, pool.defaults
        return compute_pool

    @property
    def pool(self) -> Pool:
        """The underlying pool.

        Raises:
            PoolStateError: the pool is not started.
        """
        if self._pool is None:
            raise PoolStateError(
                "the pool is not started: write `with sky.Compute(…) as pool:`, or call start()",
                code="pool-not-started",
            )
        return self._pool

    def start(self) -> Compute:
        """Start the pool and return this object; calling it twice is safe.

        Raises:
            RequestError: the request cannot be satisfied, or the code runs on a rank.
            ProvisionError: machines or ranks did not come up; nothing is left running.
        """
        if self._pool is not None and self._pool.state is not State.STOPPED:
            return self
        if rendezvous.is_attached():
            raise RequestError(ON_A_RANK)
        running = {pool.name for pool in registry.pools()}
        taken = running | {record.name for record in records.readable_records()}
        name = self._name or next(n for i in _numbers if (n := f"compute-{i}") not in taken)
        self._pool = launch.ensure(
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
        """Number of cells, calls and scripts started on the pool."""
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
"""Alias of `Compute`."""


def find(name: str | None = None) -> Compute:
    """Return a running pool by name, or the most recently used one.

    The pool may have been started by a magic or from Python.

    Raises:
        PoolError: no such pool exists; the message explains how to start one.
    """
    return Compute.of(registry.pool_named(name))


def pools() -> list[Compute]:
    """Return all pools of this notebook, the most recently used one last."""
    return [Compute.of(pool) for pool in registry.pools()]


def attach(name: str, *, take_over: bool = False) -> Compute:
    """Take over a pool that another notebook left, as ``%sky_attach`` does.

    Its output since then is shown, and its variables are available.

    Args:
        name: name or job id of the pool.
        take_over: take the pool from a notebook that is still running.

    Raises:
        PoolError: the pool does not exist, its notebook is running, or it is gone.
        RunError: the run in progress failed.
    """
    namespace = sys._getframe(1).f_globals
    notebooks.with_finished_job(records.named(name))
    with interrupt.deferred():
        pool, unfinished_runs = launch.attach(
            name, namespace, Defaults(), print_note, take_over=take_over
        )
        for unfinished in unfinished_runs:
            finish(pool, unfinished, namespace)
    return Compute.of(pool)
