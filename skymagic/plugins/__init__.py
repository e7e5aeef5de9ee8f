"""Plugins: what a framework needs on the nodes before the first cell, as one frozen value each.

``sky.plugins.torch(backend="gloo")`` makes one, as ``--plugin torch:backend=gloo`` does. Ours stand in `TABLE`; packages
bring more through the entry-point group ``skymagic.plugins``, whose values are factories: functions with keyword
parameters that return a `Plugin`. Everything here is safe on a node, and loaded when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan import PluginSpec
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.image import Image
from skymagic.plan.suggest import did_you_mean
from skymagic.runtime.info import InstanceInfo

GROUP = "skymagic.plugins"

TABLE: dict[str, str] = {
    # The files have an underscore: sky.plugins.torch is the factory, and a module of that name would take its place.
    "torch": "skymagic.plugins._torch.plugin:torch",
    "jax": "skymagic.plugins._jax:jax",
    "keras": "skymagic.plugins._keras.plugin:keras",
    "huggingface": "skymagic.plugins._huggingface:huggingface",
    "joblib": "skymagic.plugins._joblib:joblib",
    "sklearn": "skymagic.plugins._sklearn:sklearn",
}
"""Our own plugins: name → ``module:factory``."""

Factory = Callable[..., "Plugin"]


@dataclass(frozen=True)
class Cluster:
    """What a plugin may know of a pool before there is one."""

    nodes: int = 1
    procs_per_node: int = 1
    accelerator: Accelerator | None = None

    @property
    def cuda(self) -> bool:
        """Whether the nodes have GPUs that run CUDA programs."""
        return self.accelerator is not None and self.accelerator.cuda


def _same_image(image: Image, cluster: Cluster) -> Image:
    return image


def _no_commands(cluster: Cluster) -> Sequence[str]:
    return ()


def _nothing_around(subject: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _freed_nothing() -> int:
    return 0


def _nothing_lost(info: InstanceInfo) -> Sequence[str]:
    return ()


def _uncounted() -> None:
    return None


def _still_there() -> bool:
    return True


@dataclass(frozen=True, repr=False)
class Plugin:
    """One framework's needs; a hook that is not given does nothing.

    Attributes:
        name: unique in a pool.
        transform: ``(image, cluster) -> image``: add packages and variables, with ``image.replace``. The notebook
            calls it while planning, on every plan, so it must be pure; twice is safe.
        bootstrap: ``(cluster) -> commands``: shell commands that run on each new node after its packages are there.
            Called while planning, like `transform`; a node that is used again skips them.
        around_app: ``(info) -> context manager``: entered once in each rank's process before its first cell, left when
            the process is stopped, in the reverse order of plugins. Never twice in a process. What it raises fails
            the pool's start with that error.
        around_client: ``(pool) -> context manager``: entered in the notebook when the pool is ready, left when it
            goes, also on errors. Once for each pool; two pools may be open at once.
        release: frees the rank's main thread from a blocked collective; returns how many things it closed. Called on
            another thread, at any moment, also before `around_app` and twice.
        rejoin: ``(info) -> notes``: form anew what `release` broke, with all ranks of the pool; a sentence for each
            thing that could not be carried over. Called between cells, any number of times. When it raises, all ranks
            are started anew. None where a process can join only once: then all ranks are when one of them has died.
        around_run: ``() -> context manager``: entered around each cell of a rank, when `runtime.participants` says who
            takes part. It must cost microseconds.
        joined: whether what `around_app` set up is still there; asked after each cell.
        collectives: how many collectives this rank has begun, None where nobody counts. Called on any thread, at any moment.
        preload: modules that each node imports once, before it forks its ranks. Importing them must start no thread
            and touch no GPU.
        before: names of plugins whose `around_app` must come later than this one's, whatever the user's order.
        options: what the factory was called with, which is how a rank makes the same plugin again; None for a plugin
            that was built by hand. Never shown, for a token may be among them.
    """

    name: str
    transform: Callable[[Image, Cluster], Image] = _same_image
    bootstrap: Callable[[Cluster], Sequence[str]] = _no_commands
    around_app: Callable[[InstanceInfo], contextlib.AbstractContextManager[Any]] = _nothing_around
    around_client: Callable[[Any], contextlib.AbstractContextManager[Any]] = _nothing_around
    release: Callable[[], int] = _freed_nothing
    rejoin: Callable[[InstanceInfo], Sequence[str]] | None = _nothing_lost
    around_run: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    joined: Callable[[], bool] = _still_there
    collectives: Callable[[], int | None] = _uncounted
    preload: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Plugin({self.name!r})"

    @property
    def spec(self) -> PluginSpec | None:
        """What makes this plugin again elsewhere, by `load`; None for one that was built by hand."""
        return None if self.options is None else PluginSpec(self.name, self.options)


def names() -> list[str]:
    """All plugins that can be asked for, sorted; warns of entry points that are broken, once, and leaves them out."""
    return sorted({*TABLE, *(point.name for point in _entry_points() if _works(point))})


def factory(name: str) -> Factory:
    """The function that makes the plugin `name`; what it makes remembers its options.

    Raises:
        RequestError: no plugin has this name (the message holds the nearest one), or its code cannot be imported.
    """
    try:
        make = _find(name)
    except RequestError:
        raise
    except Exception as problem:
        raise RequestError(f"the plugin {name!r} cannot be loaded: {_words(problem)}") from problem

    @functools.wraps(make)
    def remembering(*args: Any, **kwargs: Any) -> Plugin:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        plugin = make(*args, **kwargs)
        if not isinstance(plugin, Plugin):
            raise RequestError(f"the plugin {name!r} is broken: its factory returns {plugin!r}, not a Plugin")
        return replace(plugin, name=name, options=given)

    return remembering


def load(spec: PluginSpec) -> Plugin:
    """The plugin that `spec` asks for, its options read as the types that the factory's parameters are annotated with.

    Raises:
        RequestError: an unknown plugin, options that it does not have, values of the wrong type; all at once.
    """
    make = factory(spec.name)
    known = inspect.signature(make).parameters
    types = _annotations(make)
    values, mistakes = {}, []
    for option, value in spec.options.items():
        if option not in known:
            mistakes.append(
                f"the plugin {spec.name!r} has no option {option!r}{_alternatives(option, known)}"
            )
            continue
        try:
            values[option] = _read(value, types.get(option, str))
        except ValueError as problem:
            mistakes.append(f"the plugin {spec.name!r}: {option}={value!r} {problem}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in spec.options]
    mistakes += [f"the plugin {spec.name!r} needs the option {option!r}" for option in missing]
    if mistakes:
        raise RequestError(mistakes)
    try:
        return make(**values)
    except RequestError:
        raise
    except Exception as problem:
        raise RequestError(f"the plugin {spec.name!r} cannot be made: {_words(problem)}") from problem


def resolve(asked: Iterable[Plugin | PluginSpec]) -> tuple[Plugin, ...]:
    """The plugins of a pool: each loaded, and in the order in which their hooks run.

    Raises:
        RequestError: what `load` refuses, one plugin asked for twice, an order that cannot be; all at once.
    """
    found: list[Plugin] = []
    mistakes: list[str] = []
    for item in asked:
        try:
            found.append(load(item) if isinstance(item, PluginSpec) else item)
        except RequestError as wrong:
            mistakes += wrong.mistakes
    every = [plugin.name for plugin in found]
    twice = [name for name in dict.fromkeys(every) if every.count(name) > 1]
    mistakes += [
        f"the plugin {name!r} is asked for twice: write it once, with all its options" for name in twice
    ]
    if mistakes:
        raise RequestError(mistakes)
    return order(found)


def order(plugins: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """The user's order, changed only as far as `Plugin.before` asks: JAX must be set up before Keras sees it.

    Raises:
        RequestError: plugins that each want to be before the other.
    """
    waiting, done = list(plugins), list[Plugin]()
    while waiting:
        first = next((p for p in waiting if not any(p.name in other.before for other in waiting)), None)
        if first is None:
            circle = " and ".join(plugin.name for plugin in waiting)
            raise RequestError(
                f"the plugins {circle} each want to be set up before the other: use one of them"
            )
        waiting.remove(first)
        done.append(first)
    return tuple(done)


def __getattr__(name: str) -> Factory:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return factory(name)
    except RequestError as unknown:
        raise AttributeError(str(unknown)) from unknown.__cause__


def __dir__() -> list[str]:
    return sorted({*globals(), *TABLE, *(point.name for point in _entry_points())})


# --------------------------------------------------------------------------------------------- finding


def _entry_points() -> list[EntryPoint]:
    """Other packages' plugins; names that are ours stay ours."""
    return [point for point in entry_points(group=GROUP) if point.name not in TABLE]


@functools.cache  # names() is asked for each magic line
def _works(point: EntryPoint) -> bool:
    try:
        point.load()
    except Exception as problem:
        package = f" of {point.dist.name}" if point.dist else ""
        warnings.warn(
            f"the plugin {point.name!r}{package} ({point.value}) is broken: {_words(problem)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _find(name: str) -> Factory:
    if name in TABLE:
        module, _, attribute = TABLE[name].partition(":")
        make: Factory = getattr(import_module(module), attribute)
        return make
    points = _entry_points()
    for point in points:
        if point.name == name:
            return point.load()  # type: ignore[no-any-return]
    known = [*TABLE, *(point.name for point in points)]
    nearest = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
    raise RequestError(f"no plugin is called {name!r}{nearest}")


def _words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


# --------------------------------------------------------------------------------------------- options


def _alternatives(option: str, known: Iterable[str]) -> str:
    every = list(known)
    if not every:
        return "; it has none"
    return f"{did_you_mean(option, every).removesuffix('?')}; it has {', '.join(every)}"


def _annotations(make: Factory) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(make))
    except NameError:  # names that only type checkers see: then options stay text
        return {}


def _read(value: Any, annotation: Any) -> Any:
    """A text as the first type of `annotation` that it fits. Raises ValueError with the end of a sentence."""
    if not isinstance(value, str):
        return value
    types = typing.get_args(annotation) or (annotation,)
    if bool in types and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    for kind in (int, float):
        if kind in types:
            with contextlib.suppress(ValueError):
                return kind(value)
    if not {bool, int, float} & set(types) or str in types:
        return value
    raise ValueError("is not a yes or no: write true or false" if bool in types else "is not a number")


_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
