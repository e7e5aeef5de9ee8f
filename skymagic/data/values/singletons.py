"""Objects of which each process has one of its own: modules, torch's operators and constants, a library's settings.

They travel as the name under which a process finds its own. Code on a rank that sets `cudnn.benchmark` or calls
`jax.config.update` must act on the object that the library itself reads there, never on a copy of the notebook's.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skymagic.data.values import rebuild
from skymagic.data.values.kinds import is_a

# -- modules -----------------------------------------------------------------------------------------------------------


def reduce_module(module: types.ModuleType) -> Any:
    """Reduce an instance of a subclass of `ModuleType` that no import finds: its attributes, without the import system's own."""
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
    """Return True if an object of this type, which is no module, stands in `sys.modules`, as that of `sh` or `py.path`."""
    if _replacing.count != len(sys.modules):
        kinds = frozenset(map(type, list(sys.modules.values())))
        _replacing.kinds = frozenset(
            each for each in kinds if not issubclass(each, types.ModuleType)
        ) - {type(None)}
        _replacing.count = len(sys.modules)
    return kind in _replacing.kinds


@dataclass
class _Replacing:
    """Types of the objects in `sys.modules` that are no modules, as of this count of entries."""

    count: int = -1
    kinds: frozenset[type] = frozenset()


_replacing = _Replacing()


def reduce_replacement(value: object) -> Any:
    """Reduce an object in `sys.modules` to its name there; NotImplemented for others of its type."""
    for name, known in list(sys.modules.items()):
        if known is value and name != "__main__":
            return rebuild.module, (name,)
    return NotImplemented


# -- torch's operators -------------------------------------------------------------------------------------------------


def _operator(operator: Any) -> Any:
    """Reduce what lies below `torch.ops`, by its path there."""
    if is_a(type(operator), "torch", "OpOverloadPacket"):
        path = operator._qualified_op_name.replace("::", ".")
    elif is_a(type(operator), "torch", "OpOverload"):
        path = f"{operator._schema.name.replace('::', '.')}.{operator._overloadname}"
    else:
        path = f"higher_order.{operator.name()}"
    if rebuild.attribute_of(sys.modules["torch"].ops, path) is not operator:
        return NotImplemented
    return rebuild.attribute, ("torch", f"ops.{path}")


# -- torch's constants -------------------------------------------------------------------------------------------------

_CONSTANTS = ("memory_format", "layout", "dtype", "qscheme")
_LIMITS = ("finfo", "iinfo")


def _constant(value: Any) -> Any:
    """Reduce `torch.channels_last`, `torch.strided` and their like: torch pickles some by a name in the notebook, some not at all."""
    name = str(value).removeprefix("torch.")
    known = rebuild.attribute_of(sys.modules["torch"], name)
    return (rebuild.attribute, ("torch", name)) if known is value else NotImplemented


def _limits(value: Any) -> Any:
    """Reduce `torch.finfo(torch.float16)`."""
    return type(value), (getattr(sys.modules["torch"], value.dtype),)


# -- settings ----------------------------------------------------------------------------------------------------------

_SETTINGS: dict[tuple[str, str], tuple[str, str]] = {
    ("jax", "Config"): ("jax", "config"),
    ("matplotlib", "RcParams"): ("matplotlib", "rcParams"),
    ("torch", "Generator"): ("torch", "default_generator"),
}
"""Package and class → module and attribute that hold the settings which the library reads."""


def _setting(value: Any) -> Any:
    """Reduce a library's settings; a copy that the user has made of them is no setting."""
    for (package, name), (where, attribute) in _SETTINGS.items():
        if is_a(type(value), package, name):
            known = rebuild.attribute_of(sys.modules.get(where), attribute)
            return (rebuild.attribute, (where, attribute)) if known is value else NotImplemented
    return NotImplemented


def _pandas_options(options: Any) -> Any:
    """Reduce `pandas.options` or a part of it, such as `pandas.options.display`: pandas makes a new object at each look."""
    prefix = object.__getattribute__(options, "prefix")
    path = f"options.{prefix}" if prefix else "options"
    known = rebuild.attribute_of(sys.modules.get("pandas"), path)
    if type(known) is not type(options):
        return NotImplemented
    same = object.__getattribute__(known, "d") is object.__getattribute__(options, "d")
    return (rebuild.attribute, ("pandas", path)) if same else NotImplemented


# -- by type -----------------------------------------------------------------------------------------------------------

_OPERATORS = ("OpOverloadPacket", "OpOverload", "HigherOrderOperator")


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """Return what reduces objects of this type to their names; NotImplemented from it for those that have none."""
    if any(is_a(kind, "torch", name) for name in _OPERATORS):
        return _operator
    if kind.__module__ == "torch" and kind.__name__ in _CONSTANTS:
        return _constant
    if kind.__module__ == "torch" and kind.__name__ in _LIMITS:
        return _limits
    if any(is_a(kind, *each) for each in _SETTINGS):
        return _setting
    if is_a(kind, "pandas", "DictWrapper"):
        return _pandas_options
    return None
