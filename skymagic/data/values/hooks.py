"""Pickle torch modules, optimizers and tensors together with their hooks.

torch pickles a tensor or an optimizer without its hooks. Here the hooks travel in the dicts that
hold them, so that a `RemovableHandle` in the same value still removes its hook on the other side.
Hooks marked with `torch.utils.hooks.unserializable_hook` are left out, as the mark demands.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from skymagic.data.values import parametrized
from skymagic.data.values.kinds import is_a

HooksByAttribute = dict[str, Mapping[int, Any]]
"""Maps attributes of tensors, modules and optimizers to their dicts of hooks by number."""
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def tensor_hooks(tensor: Any) -> HooksByAttribute:
    """Return a tensor's non-empty dicts of hooks, by attribute name."""
    hooks_by_attribute: HooksByAttribute = {}
    for name in _OF_TENSORS:
        hooks = getattr(tensor, name, None)
        if hooks and (travelling := _serializable_hooks(hooks)):
            hooks_by_attribute[name] = travelling
    return hooks_by_attribute


def _serializable_hooks(hooks: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return the same dict, or a copy without the hooks that are marked as unserializable."""
    if not any(hasattr(hook, "__torch_unserializable__") for hook in hooks.values()):
        return hooks
    serializable = (
        pair for pair in hooks.items() if not hasattr(pair[1], "__torch_unserializable__")
    )
    return OrderedDict(serializable)


def set_tensor_hooks(tensor: Any, hooks: HooksByAttribute) -> None:
    """Register these hooks with a tensor."""
    for name, registered in hooks.items():
        setattr(tensor, name, registered)
        reserve_ids(registered)


def reserve_ids(hooks: Iterable[int]) -> None:
    """Keep torch from giving these hook ids to hooks that are registered later.

    torch silently replaces a hook that has the same id.
    """
    handle = sys.modules["torch"].utils.hooks.RemovableHandle
    handle.next_id = max(handle.next_id, max(hooks, default=-1) + 1)


def without_warning(tensor: Any) -> Any:
    """Reduce a tensor as torch does, but suppress torch's warning about lost hooks."""
    if not getattr(tensor, "_backward_hooks", None):
        return tensor.__reduce_ex__(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.__reduce_ex__(5)


# -- modules and optimizers ------------------------------------------------------------------------


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer for objects of this type if they may have hooks, or None.

    The reducer returns NotImplemented for objects without hooks.
    """
    if is_a(kind, "torch.optim", "Optimizer"):
        return _optimizer
    return _module if is_a(kind, "torch.nn", "Module") else None


def _registered(value: Any) -> HooksByAttribute:
    return {
        name: hooks
        for name, hooks in vars(value).items()
        if name.endswith("_hooks") and isinstance(hooks, dict) and hooks
    }


def _module(module: Any) -> Any:
    """Reduce a module with hooks or with computed parameters."""
    registered = _registered(module)
    computed = parametrized.computed_by_hooks(module)
    own = parametrized.original_class(type(module))
    # Parametrized: use the original class, because the special one refuses to be pickled.
    if own is not type(module):
        function, args = _blank, (own,)
        getstate: Callable[[Any], Any] = own.__getstate__  # type: ignore[assignment]
        state = getstate(module)
    elif registered:
        reduced = module.__reduce_ex__(5)
        if not _has_plain_state(reduced):
            return reduced
        function, args, state = reduced[:3]
    else:
        return NotImplemented
    if computed and isinstance(state, dict):
        state = dict(state)
        parametrized.without_computed(state, module, computed)
    # Hooks registered later on the other side need higher ids.
    facts = own is not type(module), computed, _last(registered)
    return function, args, (state, *facts), None, None, fill_module


def _has_plain_state(reduced: str | tuple[Any, ...]) -> TypeGuard[tuple[Any, ...]]:
    """Return False if only the class's own reduction can rebuild the object."""
    if isinstance(reduced, str) or len(reduced) < 3:
        return False
    return all(part is None for part in reduced[3:])


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)


def fill_module(module: Any, parts: tuple[Any, bool, dict[str, object], int]) -> None:
    """Set a module's state, then restore its parametrizations and computed attributes."""
    state, is_parametrized, computed, last = parts
    _set_state(module, state)
    if is_parametrized:
        parametrized.restore_parametrization(module)
    parametrized.recompute(module, computed)
    reserve_ids((last,))


def _optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with its hooks, which its `__getstate__` leaves out."""
    hooks = _registered(optimizer)
    if not hooks:
        return NotImplemented
    reduced = optimizer.__reduce_ex__(5)
    if not _has_plain_state(reduced):
        return reduced
    return *reduced[:2], (reduced[2], hooks), None, None, fill_optimizer


def fill_optimizer(optimizer: Any, parts: tuple[Any, HooksByAttribute]) -> None:
    """Set an optimizer's state and its hooks."""
    state, hooks = parts
    _set_state(optimizer, state)
    vars(optimizer).update(hooks)
    reserve_ids((_last(hooks),))


def _last(hooks: HooksByAttribute) -> int:
    """Return the highest hook id, or -1."""
    return max((max(ids) for ids in hooks.values()), default=-1)


def _set_state(value: Any, state: Any) -> None:
    if hasattr(type(value), "__setstate__"):
        value.__setstate__(state)
    elif state:
        vars(value).update(state)
