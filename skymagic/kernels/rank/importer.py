"""Remote importer: modules of the notebook's folder, imported on a rank from sent sources.

They are reloaded in place.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.resources.abc
import linecache
import os
import site
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from skymagic.data.capture.imports import imported_names
from skymagic.data.capture.modules import unpacked_data
from skymagic.data.values.rebuild import ANNOTATIONS
from skymagic.runtime.on_import import left_out_by_warnings
from skymagic.wire.queries import InstalledPackages
from skymagic.wire.values import ModuleSource


class RemoteImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finder and loader (PEP 451) of modules whose sources were sent; first in ``sys.meta_path``.

    An edited module is executed again, and so are the sent modules that import it. Their functions
    and classes keep their identity and get the new contents: ``from module import f`` elsewhere,
    and instances, follow the edit.
    """

    def __init__(self) -> None:
        self._sources: dict[str, ModuleSource] = {}
        self._imports: dict[str, frozenset[str]] = {}
        # hash of each module's source at its latest execution
        self._executed: dict[str, str] = {}

    def install(self, modules: Iterable[ModuleSource]) -> None:
        """Add sources, and execute changed modules and their dependents again.

        Raises:
            Exception: any error of a module's own code when it is executed again.
        """
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for source in modules:
            package = source.name if source.package else source.name.rpartition(".")[0]
            self._sources[source.name] = source
            self._imports[source.name] = imported_names(ast.parse(source.source), package)
            # tracebacks show the lines that run, even if the node's own file differs
            lines = source.source.splitlines(keepends=True)
            linecache.cache[source.origin] = (len(source.source), None, lines, source.origin)
        for name in self._modules_to_reload():
            self._reload(sys.modules[name])

    def remove(self) -> None:
        """Remove this finder from ``sys.meta_path``."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self._sources.get(fullname)
        if module is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname, self, origin=module.origin, is_package=module.package
        )
        spec.has_location = bool(module.source) or not os.path.isdir(module.origin)
        if module.package:
            # The real directory stays searchable, because compiled parts and data files are the
            # node's own.
            is_file = module.origin.endswith(".py")
            spec.submodule_search_locations = [
                os.path.dirname(module.origin) if is_file else module.origin
            ]
        return spec

    @left_out_by_warnings
    def exec_module(self, module: types.ModuleType) -> None:
        source = self._sources[module.__name__]
        # `dont_inherit`: this file's `from __future__` imports must not apply to the module
        exec(compile(source.source, source.origin, "exec", dont_inherit=True), module.__dict__)
        self._executed[module.__name__] = source.hash

    def get_source(self, fullname: str) -> str | None:
        module = self._sources.get(fullname)
        return None if module is None else module.source

    def get_resource_reader(
        self, fullname: str
    ) -> importlib.resources.abc.TraversableResources | None:
        """Return a reader of the package's folder or sent files, for ``importlib.resources``."""
        module = self._sources.get(fullname)
        return PackageData(module) if module is not None and module.package else None

    def get_data(self, path: str) -> bytes:
        """Return a file next to the package's source, for ``pkgutil.get_data``.

        Raises:
            OSError: it does not exist here and was not sent.
        """
        for module in self._sources.values():
            name = os.path.relpath(path, os.path.dirname(module.origin))
            if module.data and (data_file := unpacked_data(module.data).joinpath(name)).is_file():
                return data_file.read_bytes()
        return Path(path).read_bytes()

    def is_package(self, fullname: str) -> bool:
        return self._sources[fullname].package

    def _modules_to_reload(self) -> list[str]:
        """Return the loaded modules to execute again, each after the modules that it imports."""
        loaded = {name for name in self._sources if name in sys.modules}
        stale = {name for name in loaded if self._executed.get(name) != self._sources[name].hash}
        while more := {name for name in loaded - stale if self._imports[name] & stale}:
            stale |= more
        # depth-first; modules in an import cycle are ordered by name
        ordered: dict[str, None] = {}

        def visit(name: str, above: frozenset[str]) -> None:
            for needed in sorted((self._imports[name] & stale) - above - {name}):
                visit(needed, above | {name})
            ordered.setdefault(name)

        for name in sorted(stale):
            visit(name, frozenset())
        return list(ordered)

    def _reload(self, module: types.ModuleType) -> None:
        before = dict(vars(module))
        self._executed.pop(module.__name__, None)  # if it fails, the next cell tries again
        importlib.reload(module)
        for name, old in before.items():
            new = vars(module).get(name)
            if (
                new is not old
                and getattr(new, "__module__", None) == module.__name__
                and update_in_place(old, new)
            ):
                setattr(module, name, old)


class PackageData(importlib.resources.abc.TraversableResources):
    """Data files of a sent package."""

    def __init__(self, module: ModuleSource) -> None:
        self._module = module

    def files(self) -> Any:
        """Return the package's folder, or the sent archive if this machine has no such folder."""
        if self._module.data:
            return unpacked_data(self._module.data)
        origin = Path(self._module.origin)
        return origin.parent if self._module.source or origin.suffix == ".py" else origin


def update_in_place(old: object, new: object) -> bool:
    """Give a function or class the contents of its new version.

    Returns False, without any change, if that is impossible.
    """
    if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
        return _update_function(old, new)
    if isinstance(old, type) and type(old) is type(new):
        return _update_class(old, new)
    return False


def _update_function(old: types.FunctionType, new: types.FunctionType) -> bool:
    # `__closure__` is read-only: the new code would run with the old version's cells
    if (
        old.__closure__ is not None
        or new.__closure__ is not None
        or old.__module__ != new.__module__
    ):
        return False
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__doc__", ANNOTATIONS):
        setattr(old, name, getattr(new, name))
    vars(old).clear()
    vars(old).update(vars(new))
    return True


_CLASS_INTERNALS = {"__dict__", "__weakref__", "__mro__", "__slotnames__", "_abc_impl"}


def _update_class(old: type, new: type) -> bool:
    bases = [(base.__module__, base.__qualname__) for base in old.__bases__]
    if bases != [(base.__module__, base.__qualname__) for base in new.__bases__]:
        return False
    # the descriptor of a slot works with instances of its own class only
    if old.__module__ != new.__module__ or "__slots__" in vars(old) or "__slots__" in vars(new):
        return False
    # a metaclass may register its classes: enumerations, fields, tables
    if type(old) is not type:
        return False
    for name in vars(old).keys() - vars(new).keys() - _CLASS_INTERNALS:
        delattr(old, name)
    for name, member in list(vars(new).items()):
        if name not in _CLASS_INTERNALS:
            _rebind_class_cell(member, new, old)
            setattr(old, name, member)
    return True


def _rebind_class_cell(member: object, new: type, old: type) -> None:
    """Make ``super()`` in a method refer to the class that the method now belongs to."""
    for part in (
        member,
        *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")),
    ):
        if isinstance(part, types.FunctionType):
            for variable, cell in zip(
                part.__code__.co_freevars, part.__closure__ or (), strict=True
            ):
                if variable == "__class__" and cell.cell_contents is new:
                    cell.cell_contents = old


def installed_packages() -> InstalledPackages:
    """Return distributions with versions, and module names (`data.capture.installed.present`)."""
    # imported on request only, because it reads the environment
    from skymagic.data.capture.installed import (
        present,
    )

    packages = present()
    return InstalledPackages(dict(packages.versions), tuple(sorted(packages.modules)))


def rescan_packages() -> list[str]:
    """Make newly installed packages importable, and run their ``.pth`` files.

    Returns:
        The names of all top-level modules that this rank has already imported, without the standard
            library's.
    """
    before = list(sys.path)
    for folder in site.getsitepackages():
        site.addsitedir(folder)
    added = [folder for folder in sys.path if folder not in before]
    # new folders come last, even those that a `.pth` file has inserted at the front
    sys.path[:] = [*before, *added]
    importlib.invalidate_caches()
    return sorted(
        name
        for name in list(sys.modules)
        if "." not in name and name not in sys.stdlib_module_names
    )
