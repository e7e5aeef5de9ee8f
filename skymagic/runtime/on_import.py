"""Libraries adapted: post-import hooks, which get a module once somebody imports it, so that it is not imported for them; a package imported
without a part that takes long; attributes replaced."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Adapt = Callable[[types.ModuleType], None]
Function = TypeVar("Function", bound=Callable[..., Any])
IPYPARALLEL = ("ipyparallel", "cluster", ("Cluster", "ClusterManager"))
"""For `import_without`: it starts clusters of its own with a fifth of what it imports, and none of ours."""


INTERNAL_FILE = "{file} (importlib._bootstrap)"
"""File name of a frame that `warnings.warn` leaves out when it counts ``stacklevel``: one with both of these words in it, as those of
Python's import system. That is the only way before ``skip_file_prefixes`` of Python 3.12, which the library that warns would have to pass."""


def left_out_by_warnings(function: Function) -> Function:
    """Let a library that warns about its caller (``stacklevel=2``) name the user's line, although this function stands between.

    Filters by module hold then, too: ``ignore::FutureWarning:__main__``.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=INTERNAL_FILE.format(file=code.co_filename))
    return function


def wraps(plain: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a function look like the library's function that it calls, as `functools.wraps` does, in warnings too."""

    def made(wrapper: Function) -> Function:
        functools.update_wrapper(wrapper, plain)
        return left_out_by_warnings(wrapper)

    return made


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

        @left_out_by_warnings
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


def stand_in(name: str, taken: Sequence[str] = ()) -> types.ModuleType:
    """A module with a class for each name that is taken from it."""
    made = types.ModuleType(name)
    vars(made).update({each: type(each, (), {}) for each in taken}, __path__=[])
    return made


def import_with(stand_ins: Mapping[str, types.ModuleType | None], name: str) -> types.ModuleType:
    """Import a module while these stand for what it imports and does not use. A version that does more with them is imported as it is."""
    before = set(sys.modules)
    sys.modules.update(stand_ins)  # type: ignore[arg-type]  # None hides a module
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError, TypeError):
        packages = {each.partition(".")[0] for each in stand_ins}
        for each in [
            each
            for each in sys.modules
            if each.partition(".")[0] in packages and each not in before
        ]:
            del sys.modules[each]
        return importlib.import_module(name)


def import_without(package: str, part: str, names: Sequence[str]) -> None:
    """Import a package of which `part` is imported only when somebody asks for it, or for the `names` that the package takes from it."""
    if package in sys.modules:
        return
    full = f"{package}.{part}"
    placeholder = stand_in(full, names)
    imported = import_with({full: placeholder}, package)
    if sys.modules.get(full) is not placeholder:
        return
    del sys.modules[full]
    for name in (part, *names):
        vars(imported).pop(name, None)

    def late(name: str) -> Any:
        if name not in (part, *names):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(full)
        vars(imported).update({each: getattr(module, each) for each in names})
        return vars(imported)[name]

    vars(imported)["__getattr__"] = late  # PEP 562
