"""Modules that the notebook has loaded: those behind its names, which a pool of other machines has from its start, and those whose file
was edited after the import: ranks get the new text, the notebook runs the old."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skymagic.data.capture import modules
from skymagic.data.capture.code import code_names
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import interactive


def imported_modules(namespace: Mapping[str, object], folder: str) -> frozenset[str]:
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


class ImportedTexts:
    """Knows the text that each of the notebook's modules had when a cell needed it first since its import."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, str]] = {}
        """Module → its spec, another one after each reload, and the hash of its text then."""
        self._noted: dict[str, str] = {}

    def stale(self, sources: Iterable[ModuleSource]) -> list[ModuleSource]:
        """The modules of which the notebook has another text than the file; each text is reported once."""
        if "IPython.extensions.autoreload" in sys.modules:  # it executes a text again, and no spec says so
            return []
        found = []
        for source in sources:
            spec = getattr(sys.modules.get(source.name), "__spec__", None)
            if spec is None or not source.source:
                continue
            if source.name not in self._seen or self._seen[source.name][0] is not spec:
                self._seen[source.name] = spec, source.hash
            if source.hash not in (self._seen[source.name][1], self._noted.get(source.name)):
                self._noted[source.name] = source.hash
                found.append(source)
        return found
