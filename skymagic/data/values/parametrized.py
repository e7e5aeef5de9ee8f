"""torch modules with computed parameters: parametrizations, pruning, weight and spectral norm.

`torch.nn.utils.parametrize` gives each such module its own class, which cannot be pickled. So the
original class is sent with the module's state, and the receiver creates the special class again.
The older functions (`weight_norm`, `spectral_norm`, `prune`) keep their last result as a plain
attribute that belongs to an autograd graph. The receiver recomputes it, as the module's hook does
before each forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from skymagic.data.values.kinds import is_a


def is_parametrized(kind: type) -> bool:
    """Return True for a class that `torch.nn.utils.parametrize` created for one module."""
    # torch's `_inject_new_class` gives the class a `__getstate__` that raises.
    own = getattr(vars(kind).get("__getstate__"), "__qualname__", "")
    return own.startswith("_inject_new_class.<locals>")


def original_class(kind: type) -> type:
    """Return the class that a module had before it was parametrized."""
    while is_parametrized(kind):
        kind = kind.__bases__[0]
    return kind


def computed_by_hooks(module: Any) -> dict[str, object]:
    """Find attributes that a hook recomputes before each forward pass.

    Returns:
        Maps each attribute name to its hook.
    """
    hooks_by_attribute = {}
    for hook in vars(module).get("_forward_pre_hooks", {}).values():
        name = _attribute_of(hook)
        value = vars(module).get(name)
        if value is not None and is_a(type(value), "torch", "Tensor") and not value.is_leaf:
            hooks_by_attribute[name] = hook
    return hooks_by_attribute


def _attribute_of(hook: Any) -> str:
    """Return the attribute that one of torch's own hooks sets, or "" for other hooks."""
    kind = type(hook)
    if is_a(kind, "torch.nn.utils.weight_norm", "WeightNorm") or is_a(
        kind, "torch.nn.utils.spectral_norm", "SpectralNorm"
    ):
        return str(hook.name)
    return str(hook._tensor_name) if is_a(kind, "torch.nn.utils.prune", "BasePruningMethod") else ""


def without_computed(state: dict[str, object], module: Any, computed: Iterable[str]) -> None:
    """Remove computed attributes from a module's state.

    This includes the list of weights that a recurrent layer keeps.
    """
    values = [vars(module)[name] for name in computed]
    for name in computed:
        state.pop(name, None)
    # Recurrent layers list their weights a second time.
    weights = state.get("_flat_weights")
    if isinstance(weights, list):
        # By identity, because `==` of tensors compares their elements.
        state["_flat_weights"] = [
            None if any(weight is value for value in values) else weight for weight in weights
        ]


def recompute(module: Any, computed: Mapping[str, object]) -> None:
    """Recompute the attributes that hooks set."""
    torch = sys.modules["torch"]
    hook: Any
    for name, hook in computed.items():
        # The result must be in an autograd graph even if the caller disabled gradients.
        with torch.enable_grad():
            if hasattr(hook, "apply_mask"):
                value = hook.apply_mask(module)
            elif is_a(type(hook), "torch.nn.utils.spectral_norm", "SpectralNorm"):
                # A power iteration would change the module's buffers.
                value = hook.compute_weight(module, do_power_iteration=False)
            else:
                value = hook.compute_weight(module)
        setattr(module, name, value)


def restore_parametrization(module: Any) -> None:
    """Give a module with parametrizations in its state the class that computes its parameters."""
    import torch.nn.utils.parametrize as parametrize

    parametrize._inject_new_class(module)  # type: ignore[no-untyped-call, unused-ignore]
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
