"""Registry of plugins: names, factories, options, entry points, and the order of hooks."""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import pickle
import sys
import typing
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from skymagic.errors import RequestError, collect_mistakes
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec
from skymagic.plan.suggest import check_keywords, did_you_mean
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.wire.typed import JsonObject

GROUP = "skymagic.plugins"

TABLE: dict[str, str] = {
    # The modules have an underscore because sky.plugins.torch is the factory, and a module of that
    # name would take its place.
    "torch": "skymagic.plugins._torch.plugin:torch",
    "jax": "skymagic.plugins._jax:jax",
    "keras": "skymagic.plugins._keras:keras",
    "accelerate": "skymagic.plugins._accelerate:accelerate",
    "huggingface": "skymagic.plugins._huggingface:huggingface",
    "joblib": "skymagic.plugins._joblib:joblib",
    "sklearn": "skymagic.plugins._joblib:sklearn",
}
"""Our own plugins: ``module:factory`` by name."""

Factory = Callable[..., "Plugin"]


def names() -> list[str]:
    """Return the sorted names of all plugins.

    Entry points are read but not loaded. Otherwise metadata in the notebook's folder, from another
    author, would run code when the user presses TAB.
    """
    return sorted({*TABLE, *(point.name for point in _entry_points())})


def shadowing_packages(names: Container[str], folder: Path) -> tuple[str, ...]:
    """Return a warning for each named plugin or provider whose package lies directly in `folder`.

    Such a package has not been installed.
    """
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
    """Return the function that creates the plugin `name`. The plugin remembers its options.

    Raises:
        RequestError: no plugin has this name (the message suggests the nearest one), or its code
            cannot be imported.
    """
    try:
        make = _find(name)
    except RequestError:
        raise
    except Exception as problem:
        raise RequestError(
            f"the plugin {name!r} cannot be loaded: {error_text(problem)}",
            code="plugin-broken",
            names=[name],
        ) from problem

    @functools.wraps(make)
    def remembering(*args: Any, **kwargs: Any) -> Plugin:
        signature = inspect.signature(make)
        if not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
        ):
            check_keywords(f"sky.plugins.{name}", kwargs, signature.parameters, {})
        arguments = signature.bind(*args, **kwargs).arguments
        plugin = make(*args, **kwargs)
        if not isinstance(plugin, Plugin):
            raise RequestError(
                f"the plugin {name!r} is broken: its factory returns {plugin!r}, not a Plugin",
                code="plugin-broken",
                names=[name],
            )
        return replace(plugin, name=name, options=arguments)

    return remembering


def load(spec: PluginSpec) -> Plugin:
    """Create the plugin for `spec`, converting options to the annotated types of the factory.

    Raises:
        RequestError: the plugin is unknown, it does not have these options, or values have the
            wrong type. Lists all mistakes.
    """
    make = factory(spec.name)
    parameters = inspect.signature(make).parameters
    types = _annotations(make)
    values, mistakes = {}, []
    for option, value in spec.options.items():
        if option not in parameters:
            mistakes.append(
                f"the plugin {spec.name!r} has no option "
                f"{option!r}{_alternatives(option, parameters)}"
            )
            continue
        try:
            values[option] = _read(value, types.get(option, str))
        except ValueError as problem:
            mistakes.append(f"the plugin {spec.name!r}: {option}={value!r} {problem}")
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.name not in spec.options
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
            f"the plugin {spec.name!r} cannot be made: {error_text(problem)}",
            code="plugin-options",
            names=[spec.name],
        ) from problem


def options(name: str) -> tuple[str, ...]:
    """Return the options that ``--plugin name:…`` accepts: the parameters of its factory.

    Empty if its code cannot be loaded, or for another package's plugin that has not been imported,
    because completion must not run code.
    """
    if name not in TABLE and not any(
        point.name == name and point.module in sys.modules for point in _entry_points()
    ):
        return ()
    try:
        parameters = inspect.signature(factory(name)).parameters.values()
    except RequestError:
        return ()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    )


def resolve(requested: Iterable[Plugin | PluginSpec]) -> tuple[Plugin, ...]:
    """Load the plugins of a pool and those that they need, and sort them for their hooks.

    Raises:
        RequestError: `load` refuses one, a plugin is requested twice, or no order is possible.
            Lists all mistakes.
    """
    plugins: list[Plugin] = []
    mistakes: list[str] = []
    for item in requested:
        with collect_mistakes(mistakes):
            plugins.append(load(item) if isinstance(item, PluginSpec) else item)
    names = [plugin.name for plugin in plugins]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    mistakes += [
        f"the plugin {name!r} is asked for twice: write it once, with all its options"
        for name in twice
    ]
    if mistakes:
        raise RequestError(mistakes)
    missing = dict.fromkeys(
        name for plugin in plugins for name in plugin.needs if name not in names
    )
    return order([*(load(PluginSpec(name)) for name in missing), *plugins])


def order(plugins: Iterable[Plugin]) -> tuple[Plugin, ...]:
    """Sort plugins so that `Plugin.before` and `Plugin.needs` hold, otherwise in the user's order.

    For example, JAX must be set up before Keras sees it.

    Raises:
        RequestError: plugins must each come before the other.
    """
    waiting, ordered = list(plugins), list[Plugin]()
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
                f"the plugins {circle} each want to be set up before the other: use one of them",
                code="plugin-order",
            )
        waiting.remove(first)
        ordered.append(first)
    return tuple(ordered)


def attribute(name: str) -> Factory:
    """Return the factory for ``sky.plugins.NAME``.

    This is the module's ``__getattr__`` (PEP 562), so that a plugin is looked up when it is used.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {GROUP!r} has no attribute {name!r}")
    try:
        return factory(name)
    except RequestError as unknown:
        raise AttributeError(str(unknown)) from unknown.__cause__


def attributes() -> list[str]:
    """Return ``dir(sky.plugins)``: every plugin, including those whose package is broken."""
    return sorted({"Cluster", "Plugin", *names()})


# ------------------------------------------------------------------------------------------ finding


def _entry_points() -> list[EntryPoint]:
    """Return other packages' plugins, except those that have the name of a built-in one."""
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
    all_names = [*TABLE, *(point.name for point in points)]
    nearest = did_you_mean(name, all_names) or f"; available: {', '.join(sorted(all_names))}"
    raise RequestError(f"no plugin is called {name!r}{nearest}", code="no-plugin", names=[name])


def error_text(problem: BaseException) -> str:
    """Format an exception as its type and message."""
    return f"{type(problem).__name__}: {problem}"


# ------------------------------------------------------------------------------------------ options


def _alternatives(option: str, names: Iterable[str]) -> str:
    all_options = list(names)
    if not all_options:
        return "; it has none"
    return f"{did_you_mean(option, all_options).removesuffix('?')}; it has {', '.join(all_options)}"


def _annotations(make: Factory) -> dict[str, object]:
    try:
        return typing.get_type_hints(inspect.unwrap(make))
    except NameError:
        # These names are visible only to type checkers. The options stay text.
        return {}


def _read(value: Any, annotation: Any) -> Any:
    """Convert text to the first type of `annotation` that it fits.

    Raises:
        ValueError: the end of a sentence that explains the mistake.
    """
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


def image_for(requested: Iterable[Plugin | PluginSpec], image: Image, cluster: Cluster) -> Image:
    """Apply the `transform` of each plugin to `image`, in their order.

    Raises:
        RequestError: `resolve` refuses a plugin, requirements contradict each other, or a
            `transform` fails.
    """
    for plugin in resolve(requested):
        try:
            image = plugin.transform(image, cluster)
        except RequestError as refused:
            raise RequestError(
                [f"the plugin {plugin.name!r}: {mistake}" for mistake in refused.mistakes]
            ) from None
        except Exception as problem:
            raise RequestError(
                f"the plugin {plugin.name!r} failed in transform: {error_text(problem)}",
                code="plugin-broken",
                names=[plugin.name],
            ) from problem
        if not isinstance(image, Image):
            raise RequestError(
                f"the plugin {plugin.name!r} is broken: its transform returns {image!r}, not an "
                "Image",
                code="plugin-broken",
                names=[plugin.name],
            )
    return image


def packed_plugin(plugin: Plugin) -> JsonObject:
    """Serialize a plugin to values that JSON can hold, for `unpacked_plugin` on a rank.

    The values are its options, or the pickled plugin if it was built by hand.

    Raises:
        RequestError: a plugin built by hand holds something that cannot be pickled.
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
            f"the plugin {plugin.name!r} cannot be sent to the ranks: {error_text(problem)}",
            code="plugin-broken",
            names=[plugin.name],
        ) from problem
    return {"name": plugin.name, "pickle": base64.b64encode(data).decode()}


def unpacked_plugin(values: JsonObject) -> Plugin:
    """Restore a plugin from the values of `packed_plugin`."""
    if "pickle" in values:
        plugin: Plugin = pickle.loads(base64.b64decode(values["pickle"]))
        return plugin
    return load(PluginSpec(values["name"], values["options"]))
