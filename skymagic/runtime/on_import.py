"""Post-import hooks and patches for libraries.

A hook gets a module once the program imports it, so that skymagic never imports it needlessly.
Attributes can be replaced temporarily.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Adapt = Callable[[types.ModuleType], None]
Function = TypeVar("Function", bound=Callable[..., Any])
INTERNAL_FILE = "{file} (importlib._bootstrap)"
"""File name of a frame that `warnings.warn` skips when it counts ``stacklevel``.

It skips names that contain both of these words, as frames of Python's import system do. Before
``skip_file_prefixes`` of Python 3.12, which the warning library itself would have to pass, there is
no other way.
"""


def left_out_by_warnings(function: Function) -> Function:
    """Make a library's warnings (``stacklevel=2``) name the user's line in spite of this frame.

    Filters by module then work too: ``ignore::FutureWarning:__main__``.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=INTERNAL_FILE.format(file=code.co_filename))
    return function


def wraps(plain: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a function look like the library's function that it wraps, as `functools.wraps`, in
    warnings too.
    """

    def decorate(wrapper: Function) -> Function:
        functools.update_wrapper(wrapper, plain)
        return left_out_by_warnings(wrapper)

    return decorate


class _Finder(importlib.abc.MetaPathFinder):
    """Finder for the awaited modules, which calls their hooks after their code has run.

    It finds modules exactly as Python itself does.
    """

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
        execute = spec.loader.exec_module  # each module has its own loader

        @left_out_by_warnings
        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for adapt in self.waiting.pop(fullname, ()):
                _apply(adapt, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def when_imported(name: str, adapt: Adapt) -> None:
    """Call `adapt` with the module `name` after its code has run, at once if already imported.

    Errors of `adapt` are ignored: another version of a library may lack the parts to adapt, and
    works unadapted.
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
    """Attributes of a library that have other values inside the `with` block."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; its previous value is restored at the end."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
