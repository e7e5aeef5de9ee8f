"""Libraries adapted: post-import hooks, which get a module once somebody imports it, so that it is not imported for them; attributes replaced."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Adapt = Callable[[types.ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are waited for as Python itself does, and calls what waits after their code has run."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Adapt]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        execute = spec.loader.exec_module  # the loader is this module's alone

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for adapt in self.waiting.pop(fullname, ()):
                _apply(adapt, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def when_imported(name: str, adapt: Adapt) -> None:
    """Call `adapt` with the module `name` after its code has run; at once where it is imported already.

    What `adapt` raises is dropped: another version of a library may lack what it looks for, and goes its own way.
    """
    if name in sys.modules:
        _apply(adapt, sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(adapt)


def _apply(adapt: Adapt, module: types.ModuleType) -> None:
    with contextlib.suppress(Exception):
        adapt(module)


class Patches(contextlib.ExitStack):
    """Attributes of a library that have other values while the block goes on."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute this value; the one before comes back at the end."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
