"""Modules of torch whose parameters are computed from others: parametrizations, pruning, weight and spectral norm.

`torch.nn.utils.parametrize` gives each such module a class of its own, which refuses to be pickled: here its own class
travels with its state, and the other side makes that class again. The older functions (`weight_norm`, `spectral_norm`,
`prune`) keep the result of their last computation as a plain attribute, which is part of that computation: it is
computed again on the other side, as their hook does before each forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from skymagic.data.values.kinds import is_a


def is_parametrized(kind: type) -> bool:
    """Return True for a class that `torch.nn.utils.parametrize` has made for one module."""
    own = getattr(vars(kind).get("__getstate__"), "__qualname__", "")
    return own.startswith("_inject_new_class.<locals>")


def own_class(kind: type) -> type:
    """Return the class that a module had before it was parametrized."""
    while is_parametrized(kind):
        kind = kind.__bases__[0]
    return kind


def computed_by_hooks(module: Any) -> dict[str, Any]:
    """Return attributes that are part of a computation which a hook repeats before each forward pass: name → hook."""
    found = {}
    for hook in vars(module).get("_forward_pre_hooks", {}).values():
        name = _attribute_of(hook)
        value = vars(module).get(name)
        if value is not None and is_a(type(value), "torch", "Tensor") and not value.is_leaf:
            found[name] = hook
    return found


def _attribute_of(hook: Any) -> str:
    """Return the attribute that a hook of torch's own sets, or an empty text for other hooks."""
    kind = type(hook)
    if is_a(kind, "torch.nn.utils.weight_norm", "WeightNorm") or is_a(
        kind, "torch.nn.utils.spectral_norm", "SpectralNorm"
    ):
        return str(hook.name)
    return str(hook._tensor_name) if is_a(kind, "torch.nn.utils.prune", "BasePruningMethod") else ""


def without_computed(state: dict[str, Any], module: Any, computed: Mapping[str, Any]) -> None:
    """Take what is computed out of a module's state, also where a recurrent layer lists its weights."""
    values = [vars(module)[name] for name in computed]
    for name in computed:
        state.pop(name, None)
    weights = state.get("_flat_weights")
    if isinstance(weights, list):
        state["_flat_weights"] = [
            None if any(each is value for value in values) else each for each in weights
        ]


def compute_again(module: Any, computed: Mapping[str, Any]) -> None:
    """Set the attributes that hooks compute, as part of a new computation."""
    torch = sys.modules["torch"]
    for name, hook in computed.items():
        with torch.enable_grad():
            if hasattr(hook, "apply_mask"):
                value = hook.apply_mask(module)
            elif is_a(type(hook), "torch.nn.utils.spectral_norm", "SpectralNorm"):
                value = hook.compute_weight(module, do_power_iteration=False)
            else:
                value = hook.compute_weight(module)
        setattr(module, name, value)


def parametrize_again(module: Any) -> None:
    """Give a module, whose state has parametrizations, the class that computes its parameters."""
    import torch.nn.utils.parametrize as parametrize

    parametrize._inject_new_class(module)  # type: ignore[no-untyped-call, unused-ignore]
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
