"""Repeat registrations of a class with libraries: pytree nodes, serializable names, virtual bases.

A decorator such as `jax.tree_util.register_pytree_node_class` leaves its trace in a table of the
library and none in the class. So the tables are read when a class is pickled, and the class is
registered again where it arrives. Nothing is imported for the lookup.

Pickles refer to the functions in this module by name.
"""

from __future__ import annotations

import abc
import copyreg
import dataclasses
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from skymagic.data.values.kinds import is_a

logger = logging.getLogger(__name__)

Registration = tuple[str, Callable[..., object], tuple[Any, ...]]
"""A registration's display name, a function of this module, and its arguments after the class."""


def find(cls: type) -> list[Registration]:
    """Return the registrations of a class in this process, to repeat them elsewhere."""
    return [registration for reader in _READERS for registration in reader(cls)]


def repeat(cls: type, registrations: list[Registration]) -> None:
    """Register a received class; registrations that this process made itself are kept."""
    for name, register, arguments in registrations:
        try:
            register(cls, *arguments)
        except Exception as problem:
            logger.warning("%s of %s failed: %s", name, cls.__qualname__, problem)
            warnings.warn(
                f"{name}({cls.__qualname__}) of the notebook failed on this rank "
                f"({type(problem).__name__}: {problem}): define the class in a broadcast cell",
                RuntimeWarning,
                stacklevel=2,
            )


def _get(module: str, name: str, default: Any) -> Any:
    return getattr(sys.modules.get(module), name, default)


# -- pytrees ---------------------------------------------------------------------------------------

_JAX = "jax._src.tree_util"


def _jax_nodes(cls: type) -> Iterator[Registration]:
    entry = _get(_JAX, "_registry", {}).get(cls)
    if entry is None:
        return
    flatten, unflatten = entry.to_iter, entry.from_iter
    inner = _closure(flatten)
    # `register_dataclass` leaves the fields in the closure of its flatten function.
    if {"data_fields", "meta_fields"} <= inner.keys():
        yield "register_dataclass", jax_dataclass, (inner["data_fields"], inner["meta_fields"])
        return
    with_keys = inner.get("flatten_with_keys")
    if with_keys is None and hasattr(cls, "tree_flatten_with_keys"):
        with_keys = operator.methodcaller("tree_flatten_with_keys")
    yield "register_pytree_node", jax_node, (flatten, unflatten, with_keys)


def _closure(function: Any) -> Mapping[str, object]:
    """Return the variables of a function's closure by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    contents = (cell.cell_contents for cell in cells)
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def jax_dataclass(cls: Any, data: tuple[str, ...], meta: tuple[str, ...]) -> None:
    """Register a class as `jax.tree_util.register_dataclass` does."""
    import jax

    if cls in _get(_JAX, "_registry", {}):
        return
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    # jax raises unless each field of `__init__` is in one of the three lists.
    dropped = [field.name for field in fields if field.init and field.name not in (*data, *meta)]
    jax.tree_util.register_dataclass(cls, list(data), list(meta), dropped)


def jax_node(cls: Any, flatten: Any, unflatten: Any, with_keys: Any) -> None:
    """Register a class as `jax.tree_util.register_pytree_node` does."""
    import jax

    # jax raises for a class that is registered already.
    if cls not in _get(_JAX, "_registry", {}):
        jax.tree_util.register_pytree_node(cls, flatten, unflatten, with_keys)


_TORCH = "torch.utils._pytree"


def _torch_nodes(cls: type) -> Iterator[Registration]:
    node = _get(_TORCH, "SUPPORTED_NODES", {}).get(cls)
    if node is None:
        return
    texts = _get(_TORCH, "SUPPORTED_SERIALIZED_TYPES", {}).get(cls)
    options = {"flatten_with_keys_fn": node.flatten_with_keys_fn}
    if texts is not None:
        unnamed = _get(_TORCH, "NO_SERIALIZED_TYPE_NAME_FOUND", None)
        name = texts.serialized_type_name
        options["serialized_type_name"] = None if name == unnamed else name
        options["to_dumpable_context"] = texts.to_dumpable_context
        options["from_dumpable_context"] = texts.from_dumpable_context
    yield "register_pytree_node", torch_node, (node.flatten_fn, node.unflatten_fn, options)


def torch_node(cls: type, flatten: Any, unflatten: Any, options: dict[str, object]) -> None:
    """Register a class as `torch.utils._pytree.register_pytree_node` does."""
    from torch.utils import _pytree

    # torch raises for a class that is registered already.
    if cls not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(cls, flatten, unflatten, **options)


# -- saving and loading ----------------------------------------------------------------------------


def _torch_safe(cls: type) -> Iterator[Registration]:
    names = _get("torch._weights_only_unpickler", "_marked_safe_globals_set", ())
    if cls in names:
        yield "add_safe_globals", torch_safe, ()


def torch_safe(cls: type) -> None:
    """Let `torch.load` make objects of a class."""
    import torch

    torch.serialization.add_safe_globals([cls])


_KERAS = "keras.src.saving.object_registration"


def _keras_names(cls: type) -> Iterator[Registration]:
    name = _get(_KERAS, "GLOBAL_CUSTOM_NAMES", {}).get(cls)
    if name is not None:
        yield "register_keras_serializable", keras_name, tuple(name.split(">", 1))


def keras_name(cls: type, package: str, name: str) -> None:
    """Register a class as `keras.saving.register_keras_serializable` does."""
    import keras

    keras.saving.register_keras_serializable(package, name)(cls)


def _pickled_by(cls: type) -> Iterator[Registration]:
    function = copyreg.dispatch_table.get(cls)
    if function is not None:
        yield "copyreg.pickle", copyreg_pickle, (function,)


def copyreg_pickle(cls: type, function: Any) -> None:
    """Set how objects of a class are pickled."""
    copyreg.pickle(cls, function)


# -- transformers' Auto classes --------------------------------------------------------------------

_AUTO = "transformers.models.auto."


def _auto_classes(cls: type) -> Iterator[Registration]:
    for name, module in list(sys.modules.items()):
        if not name.startswith(_AUTO):
            continue
        for attribute, mapping in list(vars(module).items()):
            extra = vars(mapping).get("_extra_content") if _is_auto(mapping) else None
            for key, value in (extra or {}).items():
                # A value is a class, a tuple of classes, or a dict of either.
                parts = [*value.values()] if isinstance(value, dict) else [value]
                flat = [p for part in parts for p in (part if isinstance(part, tuple) else (part,))]
                if key is cls or any(part is cls for part in flat):
                    yield "register", auto_class, (name, attribute, key, value)


def _is_auto(mapping: object) -> bool:
    return type(mapping).__name__ in ("_LazyAutoMapping", "_LazyConfigMapping")


def auto_class(_: type, module: str, attribute: str, key: Any, value: Any) -> None:
    """Add an entry to one of the tables behind transformers' Auto classes.

    They are filled by `AutoConfig.register`, `AutoModel.register` and the like.
    """
    __import__(module)
    getattr(sys.modules[module], attribute).register(key, value, exist_ok=True)


# -- virtual base classes --------------------------------------------------------------------------


@dataclasses.dataclass
class _Virtual:
    """Importable abstract classes by the id of a class registered with them, for one token."""

    token: object = None
    bases: dict[int, list[type]] = dataclasses.field(default_factory=dict)


_virtual = _Virtual()


def _virtual_bases(cls: type) -> Iterator[Registration]:
    if _virtual.token != abc.get_cache_token():  # changes with each registration
        _virtual.token = abc.get_cache_token()
        _virtual.bases = _read_virtual_bases()
    for base in _virtual.bases.get(id(cls), ()):
        # By identity once more: the class that had this id may be gone.
        if any(registered is cls for registered in _registered(base)):
            yield f"{base.__name__}.register", virtual_base, (base,)


def _read_virtual_bases() -> dict[int, list[type]]:
    bases_by_id: dict[int, list[type]] = {}
    visited: set[type] = set()
    todo: list[type] = [object]
    while todo:
        # Called through `type`: as a method of the class it would fail for `type` itself.
        bases: list[type] = type.__subclasses__(todo.pop())
        for base in bases:
            if base in visited:
                continue
            visited.add(base)
            todo.append(base)
            # An abstract class of the notebook travels with its registered classes.
            # One that `type.__new__` made, as debugpy does, has no registry.
            abstract = isinstance(base, abc.ABCMeta) and "_abc_impl" in vars(base)
            if abstract and base.__module__ != "__main__":
                for registered in _registered(base):
                    bases_by_id.setdefault(id(registered), []).append(base)
    return bases_by_id


def _registered(base: type) -> Iterator[type]:
    """Iterate over the classes that were registered with an abstract class."""
    # Private to `abc`, which has no public function for this.
    dump: Any = vars(abc)["_get_dump"]
    references, *_ = dump(base)
    return (registered for reference in references if (registered := reference()) is not None)


def virtual_base(cls: type, base: Any) -> None:
    """Register a class with an abstract one."""
    base.register(cls)


_READERS = (
    _jax_nodes,
    _torch_nodes,
    _torch_safe,
    _keras_names,
    _pickled_by,
    _auto_classes,
    _virtual_bases,
)

# -- torch operators of custom_op ------------------------------------------------------------------


def is_custom_op(kind: type) -> bool:
    """Return True for the type of objects that torch's `custom_op` creates."""
    return is_a(kind, "torch._library.custom_ops", "CustomOpDef")


def reduce_custom_op(op: Any) -> Any:
    """Reduce an operator to its schema and the functions registered for it in the notebook."""
    # torch wraps each kernel; the closure of the wrapper holds the user's function.
    kernels = {device: _closure(wrapped)["fn"] for device, wrapped in op._backend_fns.items()}
    facts = (op._namespace, op._name, op._schema, list(op._tags or ()))
    functions = (kernels, op._abstract_fn, op._backward_fn, op._setup_context_fn, op._vmap_fn)
    return custom_op, (facts, op._init_fn, functions)


def custom_op(facts: tuple[Any, ...], function: Any, functions: tuple[Any, ...]) -> Any:
    """Define a torch operator, replacing one of the same name."""
    from torch._library.custom_ops import CustomOpDef

    namespace, name, schema, tags = facts
    kernels, fake, backward, setup_context, vmap = functions
    op = CustomOpDef(namespace, name, schema, function, tags or None)
    for device, kernel in kernels.items():
        op.register_kernel(device)(kernel)
    if fake is not None:
        op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup_context)
    if vmap is not None:
        op.register_vmap(vmap)
    return op
