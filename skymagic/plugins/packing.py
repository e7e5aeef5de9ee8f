"""What a pool does with its plugins: the image that they want, and how they get to the ranks."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.plugins.table import load, resolve, words


def image_for(asked: Iterable[Plugin | PluginSpec], image: Image, cluster: Cluster) -> Image:
    """`image` as these plugins want it, each in its turn.

    Raises RequestError for what `resolve` refuses, for requirements that contradict, and for a `transform` that fails.
    """
    for plugin in resolve(asked):
        try:
            image = plugin.transform(image, cluster)
        except RequestError as refused:
            raise RequestError([f"the plugin {plugin.name!r}: {mistake}" for mistake in refused.mistakes]) from None
        except Exception as problem:
            raise RequestError(f"the plugin {plugin.name!r} failed in transform: {words(problem)}") from problem
        if not isinstance(image, Image):
            raise RequestError(f"the plugin {plugin.name!r} is broken: its transform returns {image!r}, not an Image")
    return image


def packed(plugin: Plugin) -> dict[str, Any]:
    """A plugin as values that JSON can hold, for `unpacked` on a rank: its options, or, built by hand, itself.

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
        raise RequestError(f"the plugin {plugin.name!r} cannot travel to the ranks: {words(problem)}") from problem
    return {"name": plugin.name, "pickle": base64.b64encode(data).decode()}


def unpacked(values: Mapping[str, Any]) -> Plugin:
    """The plugin that `packed` packed."""
    if "pickle" in values:
        plugin: Plugin = pickle.loads(base64.b64decode(values["pickle"]))
        return plugin
    return load(PluginSpec(values["name"], values["options"]))
