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

from skymagic import plugins
from skymagic.api.calls import Call, Calls, Function, positive
from skymagic.display.screen import print_note
from skymagic.errors import PoolStateError, RequestError
from skymagic.jobs.clone import clone
from skymagic.jobs.task import Task
from skymagic.jobs.workers import side_by_side
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.image import Image
from skymagic.plan.keywords import suggesting
from skymagic.plan.requests import Defaults, PluginSpec, PoolRequest, plugin_specs
from skymagic.plan.selection import Selection
from skymagic.plan.units import at_least, duration
from skymagic.plugins import Plugin
from skymagic.pool import Pool, registry
from skymagic.pool.states import State
from skymagic.providers import Choice

_numbers = itertools.count(1)


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
        raise TypeError("the function is lazy already: write @sky.function (or @sky.compute) once")
    if inspect.isclass(body) or not callable(body):
        raise TypeError(f"@sky.function decorates a function, not {body!r}")
    return Function(body, None if timeout is None else positive(timeout))


def gather(*calls: Call | Calls) -> Calls:
    """Join calls to run side by side: ``sky.gather(*(score(x) for x in models)) >> pool``, a tuple in their order."""
    return functools.reduce(operator.and_, calls, Calls())


_ELSEWHERE = {
    "gpu": "accelerator", "gpus": "accelerator", "accelerators": "accelerator", "num_nodes": "nodes",
    "packages": "pip", "requirements": "pip", "lifetime": "max_lifetime",
}  # fmt: skip
"""Keywords as the magics and other tools have them."""


@suggesting("sky.Compute", _ELSEWHERE)
class Compute:
    """A pool as Python code makes it. ``with sky.Compute(…) as pool:`` starts it, and ends it whatever happens.

    Also with `start` and `stop`. A magic finds it by its name (``--pool``) or as the one used last, and `find` is the
    way back. Nothing is started before ``with`` or `start`.

    Args:
        provider: ``sky.Local()``, ``sky.SSH(hosts)``, ``sky.AWS()``, ``sky.Slurm()``, or a name; this machine where it
            satisfies the request.
        nodes: machines (on this machine: ranks, or groups of them); 1.
        ranks: on this machine: the same as `nodes`, and refused elsewhere.
        accelerator: per node: ``"A100"``, ``"A100:8"`` or ``sky.accelerators.A100(count=8)``.
        plugins: ``sky.plugins.torch()`` and the like, or as text: ``"torch:backend=gloo"``.
        image: packages, variables and files of the nodes.
        name: what magics call it; with a name, a pool that runs and fits is used again and not ended by ``with``.
        procs_per_node: ranks on each node; one for each accelerator, else 1.
        cpus, memory: of each node; a number, or ``"8+"`` for at least 8. Memory in GB.
        pip, env, secrets: packages, variables, and names of variables whose values are kept secret.
        hosts, region, spot, max_price: for providers that have these; max_price in dollars per hour.
        idle, max_lifetime: ``"30m"``, or seconds: when the pool ends by itself.
        timeout: seconds for each call that has no limit of its own; None for none.

    Raises:
        RequestError: everything that is wrong with the arguments.
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
    ) -> None:
        self._namespace = sys._getframe(2).f_globals  # 1 is the check of keywords
        mistakes: list[str] = []

        def read(name: str, reader: Callable[[Any], Any], value: Any) -> Any:
            """What a reader makes of a value; None for None and for a mistake: all of them are raised at once."""
            try:
                return None if value is None else reader(value)
            except RequestError as wrong:
                mistakes.extend(f"{name}: {mistake}" for mistake in wrong.mistakes)
                return None

        said = {
            "nodes": read("nodes", _count, nodes) or read("ranks", _count, ranks),
            "gpu": read("accelerator", _accelerator, accelerator),
            "plugins": read("plugins", _plugins, plugins),
            "image": image,
            "procs_per_node": read("procs_per_node", _count, procs_per_node),
            "cpus": read("cpus", lambda value: at_least(f"{value}", ""), cpus),
            "memory": read("memory", lambda value: at_least(f"{value}", "GB"), memory),
            "pip": tuple(pip),
            "env": tuple((env or {}).items()),
            "secrets": tuple(secrets),
            "hosts": tuple(hosts),
            "region": region,
            "spot": spot,
            "max_price": max_price,
            "idle": read("idle", lambda value: duration(f"{value}"), idle),
            "max_lifetime": read("max_lifetime", lambda value: duration(f"{value}"), max_lifetime),
        }
        choice = provider if isinstance(provider, Choice) else Choice(provider or "auto")
        if nodes is not None and ranks is not None:
            mistakes.append(f"nodes and ranks are the same ({nodes} and {ranks}); keep one of them")
        if mistakes:
            raise RequestError(mistakes)
        fields = {**{key: value for key, value in said.items() if value}, **choice.fields}
        self._request = PoolRequest(provider=choice.name, yes=True, **fields)
        if ranks is not None and (mistakes := self._request.ranks_mistakes("ranks")):
            raise RequestError(mistakes)
        self._defaults = Defaults(timeout=None if timeout is None else positive(timeout))
        self._name = name
        self._pool: Pool | None = None
        self._own = True

    @classmethod
    def of(cls, pool: Pool) -> Compute:
        """A pool that runs already, with the methods of this class; leaving it does not end it."""
        found = cls.__new__(cls)
        found._request, found._name, found._pool, found._own = pool.plan.request, pool.name, pool, False
        found._namespace, found._defaults = pool.namespace, pool.defaults
        return found

    @property
    def pool(self) -> Pool:
        """The pool itself.

        Raises:
            PoolStateError: it is not started.
        """
        if self._pool is None:
            raise PoolStateError("the pool is not started: write `with sky.Compute(…) as pool:`, or call start()")
        return self._pool

    def start(self) -> Compute:
        """Make the pool ready; returns this object. Twice is safe.

        Raises:
            RequestError: the pool cannot be made as it is asked for.
            ProvisionError: machines or ranks did not come up; nothing is left running.
        """
        if self._pool is not None and self._pool.state is not State.STOPPED:
            return self
        running = {pool.name for pool in registry.every()}
        name = self._name or next(n for i in _numbers if (n := f"compute-{i}") not in running)
        self._own = name not in running
        self._pool = registry.ensure(replace(self._request, name=name), self._namespace, self._defaults, print_note)
        return self

    def stop(self) -> None:
        """End the ranks and give the machines back; twice is safe."""
        if self._pool is not None:
            self._pool.close()

    def map(self, body: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """``body(item)`` for each item, each on the next rank that is free; the values in the order of the items.

        Raises:
            RunError: of the first that failed, also of its own type; the others are stopped.
        """
        lazy = body if isinstance(body, Function) else Function(body)
        return side_by_side([Task(lazy.local, (item,), timeout=lazy.timeout) for item in items], self.pool)

    def clone(self, ranks: int | str | Iterable[int], names: str | Iterable[str], *, source: int) -> tuple[str, ...]:
        """Copy variables from one rank to others, as ``%sky_clone`` does: ``pool.clone(2, "model optimizer", source=0)``.

        All of them as one, so that an optimizer holds the model's parameters; DDP wrappers are made again around the group.

        Returns:
            The names that were copied, with those that their functions use and the ranks lacked.

        Raises:
            RequestError: there are no such ranks, or `source` has not got the names; nothing has changed.
            CaptureError: values cannot travel; nothing has changed.
            RunError: a rank died, or could not rebuild the values.
        """
        named = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        return clone(self.pool, Selection.of(ranks).ranks(self.pool.world_size), named, source).names

    def __enter__(self) -> Compute:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._own:
            self.stop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.pool, name)

    def __repr__(self) -> str:
        return "<Compute, not started>" if self._pool is None else repr(self._pool)


ComputePool = Compute
"""Another name of `Compute`."""


def find(name: str | None = None) -> Compute:
    """A pool that runs, whoever made it: by its name, or the one used last.

    Raises:
        PoolError: there is none; the message says how to make one.
    """
    return Compute.of(registry.find(name))


# -- arguments -------------------------------------------------------------------------------------------------------


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{value!r} is not a number above 0")
    return value


def _accelerator(value: Any) -> Accelerator:
    if isinstance(value, str):
        return Accelerator.parse(value)
    made = value() if callable(value) else value
    if not isinstance(made, Accelerator):
        raise RequestError(f'{value!r} is not an accelerator: write "A100", "A100:8" or sky.accelerators.A100()')
    return made


def _plugins(values: Any) -> tuple[Plugin | PluginSpec, ...]:
    found: list[Plugin | PluginSpec] = []
    if isinstance(values, str | Plugin):
        values = [values]
    for value in values:
        if isinstance(value, str):
            found += plugin_specs(value)
        elif isinstance(value, Plugin):
            found.append(value.spec or value)
        elif isinstance(value, PluginSpec):
            found.append(value)
        else:
            hint = ": write it with parentheses" if callable(value) else ""
            raise RequestError(f"{value!r} is not a plugin{hint}")
    plugins.resolve(found)
    return tuple(found)
