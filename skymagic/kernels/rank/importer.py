"""A remote importer: modules of the notebook's folder, imported on a rank from sources that the notebook sent, and reloaded in place."""

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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skymagic.data.capture.imports import imported_names
from skymagic.data.capture.modules import ModuleSource, unpacked_data
from skymagic.data.values.rebuild import ANNOTATIONS
from skymagic.runtime.on_import import left_out_by_warnings


class RemoteImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """A finder and loader (PEP 451) of modules whose sources were sent; stands first in ``sys.meta_path``.

    A module that is edited is executed again, and so are the sent modules that import it. Their functions and classes stay
    the objects that they were, with new contents: ``from module import f`` elsewhere, and instances, follow the edit.
    """

    def __init__(self) -> None:
        self._sources: dict[str, ModuleSource] = {}
        self._imports: dict[str, frozenset[str]] = {}
        self._executed: dict[
            str, str
        ] = {}  # the hash of each module's source as it was executed last

    def install(self, modules: Iterable[Mapping[str, Any] | ModuleSource]) -> None:
        """Take sources in, and execute again what has changed and what depends on it.

        Raises:
            Exception: whatever a module's own code raises when it is executed again.
        """
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for each in modules:
            source = each if isinstance(each, ModuleSource) else ModuleSource(**each)
            package = source.name if source.package else source.name.rpartition(".")[0]
            self._sources[source.name] = source
            self._imports[source.name] = imported_names(ast.parse(source.source), package)
            # tracebacks show the lines that run, whatever the node's own file says
            lines = source.source.splitlines(keepends=True)
            linecache.cache[source.origin] = (len(source.source), None, lines, source.origin)
        for name in self._stale():
            self._reload(sys.modules[name])

    def remove(self) -> None:
        """Take this finder out again."""
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
            # The real directory stays searchable: compiled parts and data files are the node's own.
            is_file = module.origin.endswith(".py")
            spec.submodule_search_locations = [
                os.path.dirname(module.origin) if is_file else module.origin
            ]
        return spec

    @left_out_by_warnings
    def exec_module(self, module: types.ModuleType) -> None:
        source = self._sources[module.__name__]
        exec(compile(source.source, source.origin, "exec", dont_inherit=True), module.__dict__)
        self._executed[module.__name__] = source.hash

    def get_source(self, fullname: str) -> str | None:
        module = self._sources.get(fullname)
        return None if module is None else module.source

    def get_resource_reader(
        self, fullname: str
    ) -> importlib.resources.abc.TraversableResources | None:
        """For ``importlib.resources``: the package's folder, or what was sent of it."""
        module = self._sources.get(fullname)
        return PackageData(module) if module is not None and module.package else None

    def get_data(self, path: str) -> bytes:
        """For ``pkgutil.get_data``: a file beside the package's source.

        Raises:
            OSError: it is neither here, nor was it sent.
        """
        for module in self._sources.values():
            name = os.path.relpath(path, os.path.dirname(module.origin))
            if module.data and (found := unpacked_data(module.data).joinpath(name)).is_file():
                return found.read_bytes()
        return Path(path).read_bytes()

    def is_package(self, fullname: str) -> bool:
        return self._sources[fullname].package

    def _stale(self) -> list[str]:
        """Modules that are loaded and must be executed again, in topological order: each after those that it imports."""
        loaded = {name for name in self._sources if name in sys.modules}
        stale = {name for name in loaded if self._executed.get(name) != self._sources[name].hash}
        while more := {name for name in loaded - stale if self._imports[name] & stale}:
            stale |= more
        # depth-first; modules that import each other in a circle come in the order of their names
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
        self._executed.pop(module.__name__, None)  # should it fail, the next cell tries again
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
        """The package's folder; the archive that was sent, where this machine has none."""
        if self._module.data:
            return unpacked_data(self._module.data)
        origin = Path(self._module.origin)
        return origin.parent if self._module.source or origin.suffix == ".py" else origin


def update_in_place(old: object, new: object) -> bool:
    """Give a function or class the contents of its new version; False when that cannot be, and nothing has changed."""
    if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
        return _update_function(old, new)
    if isinstance(old, type) and type(old) is type(new):
        return _update_class(old, new)
    return False


def _update_function(old: types.FunctionType, new: types.FunctionType) -> bool:
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
    bases = [(each.__module__, each.__qualname__) for each in old.__bases__]
    if bases != [(each.__module__, each.__qualname__) for each in new.__bases__]:
        return False
    if old.__module__ != new.__module__ or "__slots__" in vars(old) or "__slots__" in vars(new):
        return False
    if (
        type(old) is not type
    ):  # a metaclass may keep books of its classes: enumerations, fields, tables
        return False
    for name in vars(old).keys() - vars(new).keys() - _CLASS_INTERNALS:
        delattr(old, name)
    for name, member in list(vars(new).items()):
        if name not in _CLASS_INTERNALS:
            _rebind_class_cell(member, new, old)
            setattr(old, name, member)
    return True


def _rebind_class_cell(member: object, new: type, old: type) -> None:
    """Let ``super()`` in a method mean the class that the method now belongs to."""
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


def installed_packages() -> dict[str, Any]:
    """Distributions with their versions, and the names of modules, as `data.capture.installed.present` finds them."""
    from skymagic.data.capture.installed import (
        present,
    )  # a rank imports what reads the environment when it is asked

    found = present()
    return {"versions": dict(found.versions), "modules": sorted(found.modules)}


def rescan_packages() -> list[str]:
    """Something was installed into this environment: let imports find it, and run its ``.pth`` files.

    Returns:
        The names of all modules that this rank has imported already, without those in packages.
    """
    before = list(sys.path)
    for folder in site.getsitepackages():
        site.addsitedir(folder)
    added = [folder for folder in sys.path if folder not in before]
    sys.path[:] = [*before, *added]
    importlib.invalidate_caches()
    return sorted(
        name
        for name in list(sys.modules)
        if "." not in name and name not in sys.stdlib_module_names
    )
