"""Objects that exist once per process: modules, torch operators and constants, library settings.

They travel as a name that every process resolves to its own object. Code on a rank that sets
`cudnn.benchmark` or calls `jax.config.update` must act on the object that the library itself reads
there, never on a copy of the notebook's.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skymagic.data.values import rebuild
from skymagic.data.values.kinds import is_a

# -- modules ---------------------------------------------------------------------------------------


def reduce_module(module: types.ModuleType) -> Any:
    """Reduce an instance of a `ModuleType` subclass that no import finds to its attributes.

    The attributes set by the import system are left out.
    """
    state = {
        name: value
        for name, value in vars(module).items()
        if name not in _MADE_BY_THE_IMPORT_SYSTEM
    }
    return (
        rebuild.new_module,
        (type(module), rebuild.module_name(module)),
        state,
        None,
        None,
        rebuild.fill_module,
    )


_MADE_BY_THE_IMPORT_SYSTEM = frozenset(
    ("__builtins__", "__name__", "__loader__", "__spec__", "__package__")
)


def replaces_module(kind: type) -> bool:
    """Return True if `sys.modules` holds a non-module of this type, as `sh` and `py.path` do."""
    # Recomputed only after an import.
    if _replacing.count != len(sys.modules):
        kinds = frozenset(map(type, list(sys.modules.values())))
        _replacing.kinds = frozenset(
            other for other in kinds if not issubclass(other, types.ModuleType)
        ) - {type(None)}
        _replacing.count = len(sys.modules)
    return kind in _replacing.kinds


@dataclass
class _Replacing:
    """Types of non-modules in `sys.modules`, valid for this number of entries."""

    count: int = -1
    kinds: frozenset[type] = frozenset()


_replacing = _Replacing()


def reduce_replacement(value: object) -> Any:
    """Reduce an object in `sys.modules` to its name there, or return NotImplemented."""
    for name, entry in list(sys.modules.items()):
        if entry is value and name != "__main__":
            return rebuild.module, (name,)
    return NotImplemented


# -- torch operators -------------------------------------------------------------------------------


def _operator(operator: Any) -> Any:
    """Reduce an operator to its path below `torch.ops`."""
    if is_a(type(operator), "torch", "OpOverloadPacket"):
        path = operator._qualified_op_name.replace("::", ".")
    elif is_a(type(operator), "torch", "OpOverload"):
        path = f"{operator._schema.name.replace('::', '.')}.{operator._overloadname}"
    else:
        path = f"higher_order.{operator.name()}"
    # The path must lead to this very operator, not to another one of the same name.
    if rebuild.attribute_of(sys.modules["torch"].ops, path) is not operator:
        return NotImplemented
    return rebuild.attribute, ("torch", f"ops.{path}")


# -- torch constants -------------------------------------------------------------------------------

_CONSTANTS = ("memory_format", "layout", "dtype", "qscheme")
_LIMITS = ("finfo", "iinfo")


def _constant(value: Any) -> Any:
    """Reduce `torch.channels_last`, `torch.strided` and similar constants.

    torch pickles some of them by a name in the notebook, and some not at all.
    """
    name = str(value).removeprefix("torch.")
    # `str` of such a constant is its dotted name.
    constant = rebuild.attribute_of(sys.modules["torch"], name)
    return (rebuild.attribute, ("torch", name)) if constant is value else NotImplemented


def _limits(value: Any) -> Any:
    """Reduce `torch.finfo(torch.float16)`."""
    return type(value), (getattr(sys.modules["torch"], value.dtype),)


# -- settings --------------------------------------------------------------------------------------

_SETTINGS: dict[tuple[str, str], tuple[str, str]] = {
    ("jax", "Config"): ("jax", "config"),
    ("matplotlib", "RcParams"): ("matplotlib", "rcParams"),
    ("torch", "Generator"): ("torch", "default_generator"),
}
"""Maps package and class to the module and attribute with the settings that the library reads."""


def _setting(value: Any) -> Any:
    """Reduce a library's settings object; a copy that the user made of it is a plain value."""
    for (package, name), (module, attribute) in _SETTINGS.items():
        if is_a(type(value), package, name):
            setting = rebuild.attribute_of(sys.modules.get(module), attribute)
            return (rebuild.attribute, (module, attribute)) if setting is value else NotImplemented
    return NotImplemented


def _pandas_options(options: Any) -> Any:
    """Reduce `pandas.options` or a part of it, such as `pandas.options.display`.

    pandas creates a new object at each access, so the underlying dicts are compared.
    """
    # Any other attribute access is a lookup of an option.
    prefix = object.__getattribute__(options, "prefix")
    path = f"options.{prefix}" if prefix else "options"
    other = rebuild.attribute_of(sys.modules.get("pandas"), path)
    if type(other) is not type(options):
        return NotImplemented
    same = object.__getattribute__(other, "d") is object.__getattribute__(options, "d")
    return (rebuild.attribute, ("pandas", path)) if same else NotImplemented


# -- by type ---------------------------------------------------------------------------------------

_OPERATORS = ("OpOverloadPacket", "OpOverload", "HigherOrderOperator")


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer that replaces objects of this type by their names, or None.

    The reducer returns NotImplemented for objects without a name.
    """
    if any(is_a(kind, "torch", name) for name in _OPERATORS):
        return _operator
    if kind.__module__ == "torch" and kind.__name__ in _CONSTANTS:
        return _constant
    if kind.__module__ == "torch" and kind.__name__ in _LIMITS:
        return _limits
    if any(is_a(kind, *type_path) for type_path in _SETTINGS):
        return _setting
    if is_a(kind, "pandas", "DictWrapper"):
        return _pandas_options
    return None
