"""The table of plugins: names, factories and their options, entry points of other packages, and the order of hooks."""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import pickle
import sys
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from skymagic.errors import RequestError, noted_in
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec
from skymagic.plan.suggest import check_keywords, did_you_mean
from skymagic.plugins.plugin import Cluster, Plugin

GROUP = "skymagic.plugins"

TABLE: dict[str, str] = {
    # The files have an underscore: sky.plugins.torch is the factory, and a module of that name would take its place.
    "torch": "skymagic.plugins._torch.plugin:torch",
    "jax": "skymagic.plugins._jax:jax",
    "keras": "skymagic.plugins._keras:keras",
    "accelerate": "skymagic.plugins._accelerate:accelerate",
    "huggingface": "skymagic.plugins._huggingface:huggingface",
    "joblib": "skymagic.plugins._joblib:joblib",
    "sklearn": "skymagic.plugins._joblib:sklearn",
}
"""Our own plugins: name → ``module:factory``."""

Factory = Callable[..., "Plugin"]


def names() -> list[str]:
    """All plugins that can be asked for, sorted.

    Entry points are read and not loaded: metadata beside a notebook that somebody else made would run its code at a TAB.
    """
    return sorted({*TABLE, *(point.name for point in _entry_points())})


def beside(names: Container[str], folder: Path) -> tuple[str, ...]:
    """A sentence for each plugin or provider of these names whose package lies in `folder` itself: nobody has installed it."""
    points = [
        (kind, point)
        for kind in ("plugin", "provider")
        for point in entry_points(group=f"skymagic.{kind}s")
    ]
    return tuple(
        f"the {kind} {point.name!r} is code of this folder: {point.value} in {folder}"
        for kind, point in points
        if point.name in names
        and point.dist
        and Path(str(point.dist.locate_file(""))).resolve() == folder.resolve()
    )


def factory(name: str) -> Factory:
    """The function that makes the plugin `name`; what it makes remembers its options.

    Raises RequestError where no plugin has this name (the message holds the nearest one) or its code cannot be imported.
    """
    try:
        make = _find(name)
    except RequestError:
        raise
    except Exception as problem:
        raise RequestError(f"the plugin {name!r} cannot be loaded: {words(problem)}") from problem

    @functools.wraps(make)
    def remembering(*args: Any, **kwargs: Any) -> Plugin:
        signature = inspect.signature(make)
        if not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
            check_keywords(f"sky.plugins.{name}", kwargs, signature.parameters, {})
        given = signature.bind(*args, **kwargs).arguments
        plugin = make(*args, **kwargs)
        if not isinstance(plugin, Plugin):
            raise RequestError(
                f"the plugin {name!r} is broken: its factory returns {plugin!r}, not a Plugin"
            )
        return replace(plugin, name=name, options=given)

    return remembering


def load(spec: PluginSpec) -> Plugin:
    """The plugin that `spec` asks for, its options read as the types that the factory's parameters are annotated with.

    Raises RequestError for an unknown plugin, options that it does not have, values of the wrong type; all at once.
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
    missing = [
        p.name for p in known.values() if p.default is p.empty and p.name not in spec.options
    ]
    mistakes += [f"the plugin {spec.name!r} needs the option {option!r}" for option in missing]
    if mistakes:
        raise RequestError(mistakes)
    try:
        return make(**values)
    except RequestError:
        raise
    except Exception as problem:
        raise RequestError(
            f"the plugin {spec.name!r} cannot be made: {words(problem)}"
        ) from problem


def options(name: str) -> tuple[str, ...]:
    """What ``--plugin name:…`` takes, by the parameters of its factory.

    Nothing where its code cannot be loaded, nor for another package's plugin that has not been imported: completion runs no code.
    """
    if name not in TABLE and not any(
        point.name == name and point.module in sys.modules for point in _entry_points()
    ):
        return ()
    try:
        known = inspect.signature(factory(name)).parameters.values()
    except RequestError:
        return ()
    return tuple(one.name for one in known if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))


def resolve(asked: Iterable[Plugin | PluginSpec]) -> tuple[Plugin, ...]:
    """The plugins of a pool: each loaded, with those that it needs, and in the order in which their hooks run.

    Raises RequestError for what `load` refuses, one plugin asked for twice, an order that cannot be; all at once.
    """
    found: list[Plugin] = []
    mistakes: list[str] = []
    for item in asked:
        with noted_in(mistakes):
            found.append(load(item) if isinstance(item, PluginSpec) else item)
    every = [plugin.name for plugin in found]
    twice = [name for name in dict.fromkeys(every) if every.count(name) > 1]
    mistakes += [
        f"the plugin {name!r} is asked for twice: write it once, with all its options"
        for name in twice
    ]
    if mistakes:
        raise RequestError(mistakes)
    missing = dict.fromkeys(name for plugin in found for name in plugin.needs if name not in every)
    return order([*(load(PluginSpec(name)) for name in missing), *found])


def order(plugins: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """The user's order, changed only as far as `Plugin.before` and `Plugin.needs` ask: JAX must be set up before Keras sees it.

    Raises RequestError for plugins that each want to be before the other.
    """
    waiting, done = list(plugins), list[Plugin]()
    while waiting:
        later = {
            p.name
            for p in waiting
            for other in waiting
            if p.name in other.before or other.name in p.needs
        }
        first = next((p for p in waiting if p.name not in later), None)
        if first is None:
            circle = " and ".join(plugin.name for plugin in waiting)
            raise RequestError(
                f"the plugins {circle} each want to be set up before the other: use one of them"
            )
        waiting.remove(first)
        done.append(first)
    return tuple(done)


def attribute(name: str) -> Factory:
    """``sky.plugins.NAME``: a module's ``__getattr__`` (PEP 562), so that a plugin is found when it is used."""
    if name.startswith("_"):
        raise AttributeError(f"module {GROUP!r} has no attribute {name!r}")
    try:
        return factory(name)
    except RequestError as unknown:
        raise AttributeError(str(unknown)) from unknown.__cause__


def attributes() -> list[str]:
    """``dir(sky.plugins)``: every plugin, also one whose package is broken."""
    return sorted({"Cluster", "Plugin", *names()})


# --------------------------------------------------------------------------------------------- finding


def _entry_points() -> list[EntryPoint]:
    """Other packages' plugins; names that are ours stay ours."""
    return [point for point in entry_points(group=GROUP) if point.name not in TABLE]


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
    nearest = did_you_mean(name, known) or f"; available: {', '.join(sorted(known))}"
    raise RequestError(f"no plugin is called {name!r}{nearest}")


def words(problem: BaseException) -> str:
    """An exception as its type and message."""
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
    raise ValueError(
        "is not a yes or no: write true or false" if bool in types else "is not a number"
    )


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


def image_for(asked: Iterable[Plugin | PluginSpec], image: Image, cluster: Cluster) -> Image:
    """`image` as these plugins want it, each in its turn.

    Raises RequestError for what `resolve` refuses, for requirements that contradict, and for a `transform` that fails.
    """
    for plugin in resolve(asked):
        try:
            image = plugin.transform(image, cluster)
        except RequestError as refused:
            raise RequestError(
                [f"the plugin {plugin.name!r}: {mistake}" for mistake in refused.mistakes]
            ) from None
        except Exception as problem:
            raise RequestError(
                f"the plugin {plugin.name!r} failed in transform: {words(problem)}"
            ) from problem
        if not isinstance(image, Image):
            raise RequestError(
                f"the plugin {plugin.name!r} is broken: its transform returns {image!r}, not an Image"
            )
    return image


def packed_plugin(plugin: Plugin) -> dict[str, Any]:
    """A plugin as values that JSON can hold, for `unpacked_plugin` on a rank: its options, or, built by hand, itself.

    Raises RequestError where one that was built by hand holds what cannot travel.
    """
    options = None if plugin.options is None else dict(plugin.options)
    if options is not None:
        with contextlib.suppress(TypeError):
            return {"name": plugin.name, "options": json.loads(json.dumps(options))}
    import cloudpickle

    try:
        data = cloudpickle.dumps(plugin)
    except Exception as problem:
        raise RequestError(
            f"the plugin {plugin.name!r} cannot travel to the ranks: {words(problem)}"
        ) from problem
    return {"name": plugin.name, "pickle": base64.b64encode(data).decode()}


def unpacked_plugin(values: Mapping[str, Any]) -> Plugin:
    """The plugin that `packed_plugin` packed."""
    if "pickle" in values:
        plugin: Plugin = pickle.loads(base64.b64decode(values["pickle"]))
        return plugin
    return load(PluginSpec(values["name"], values["options"]))
