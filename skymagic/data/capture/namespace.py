"""Modules behind the notebook's names: what a pool of other machines has from its start."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping

from skymagic.data.capture import modules
from skymagic.data.capture.bytecode import code_names
from skymagic.data.capture.names import interactive


def imported(namespace: Mapping[str, object], folder: str) -> frozenset[str]:
    """Dotted names of the modules that the notebook has imported, that its values are made of and that its functions need.

    Those of the notebook's folder stand for what they import in turn.
    """
    names: set[str] = set()
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not interactive(name, value):
            names.update(_modules(value, namespace))
    found = modules.search(names, folder)
    own = {name.partition(".")[0] for name in found.sources}
    return frozenset(name for name in names | found.required if name.partition(".")[0] not in own)


def _modules(value: object, namespace: Mapping[str, object]) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield value.__name__
        return
    kind = value if isinstance(value, type | types.FunctionType) else type(value)
    if kind.__module__ != namespace.get("__name__"):
        yield from [kind.__module__] if isinstance(kind.__module__, str) else []
        return
    for each in (kind, *getattr(kind, "__bases__", ()), *vars(kind).values()):
        if isinstance(each, types.FunctionType):
            yield from code_names(each.__code__).required
        elif isinstance(each, type) and each.__module__ != kind.__module__:
            yield each.__module__
