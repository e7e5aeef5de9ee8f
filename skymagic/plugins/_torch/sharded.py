"""Models and tensors that are sharded over ranks: FSDP, FSDP2, DTensor, and the meshes that they are sharded over."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection
from typing import Any

FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def reset_steps(*, waits: bool) -> None:
    """End what a failed cell has left half-done in FSDP2 models of this rank: the next step begins as after a whole one.

    Gradients that were on their way are gone, as with ``FSDPModule.reset_iter_state``.

    Args:
        waits: whether collectives that were begun end; else they are left, for their group is gone.
    """
    for state in _fsdp2_states():
        for group in state._fsdp_param_groups:
            if not waits:
                group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
        if state._is_root:
            with contextlib.suppress(Exception):  # another version of torch, or more is broken: it is named as lost
                state._reset_iter_state()


def _fsdp2_states() -> list[Any]:
    module = sys.modules.get(FSDP2_STATE)
    if module is None:
        return []
    return [one for one in gc.get_objects() if issubclass(type(one), module.FSDPState)]


def lost(variables: dict[str, Any], alive: Collection[int], world_size: int | None) -> list[str]:
    """What is sharded and cannot go on, in sentences.

    Args:
        variables: the rank's.
        alive: the ranks that hold what they had.
        world_size: of the pool, if it has changed: what was sharded over all ranks is over others now.
    """
    found = []
    for name, value in sorted(variables.items(), key=lambda item: item[0]):
        if name.startswith("_"):
            continue
        what, ranks = _kind(value), _ranks(value)
        if what and ranks is None:
            found.append(f"{name}: {what} whose process group is gone; make it again")
        elif what and (gone := sorted(set(ranks or ()) - set(alive))):
            where = ", ".join(map(str, gone))
            found.append(f"{name}: {what} has lost its part on rank {where}; make it again, from a checkpoint")
        elif what and world_size is not None:
            found.append(f"{name}: {what} is sharded over another number of ranks than {world_size}; make it again")
        elif what and _torn(value):
            found.append(f"{name}: {what} was interrupted within a step and cannot be carried over; make it again")
    return found


def _kind(value: Any) -> str:
    """What a sharded value is, in words; empty for others."""
    names = {kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch.distributed")}
    words = {
        "FullyShardedDataParallel": "an FSDP module",
        "FSDPModule": "an FSDP module",
        "DTensor": "a DTensor",
        "DeviceMesh": "a device mesh",
    }
    return next((text for name, text in words.items() if name in names), "")


def _ranks(value: Any) -> list[int] | None:
    """Over which ranks a value is sharded; None where its group cannot tell any more."""
    import torch.distributed as dist

    try:
        if hasattr(value, "process_group"):
            return list(dist.get_process_group_ranks(value.process_group))
        if hasattr(value, "get_group"):
            meshes = [value]
        elif hasattr(value, "device_mesh"):
            meshes = [value.device_mesh]
        else:
            states = [getattr(module, "_get_fsdp_state", lambda: None)() for module in value.modules()]
            groups = [group for state in states if state is not None for group in state._fsdp_param_groups]
            meshes = [group.mesh_info.mesh for group in groups]
        for mesh in meshes:
            for group in mesh.get_all_groups():
                dist.get_process_group_ranks(group)  # raises where it is gone
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    except Exception:
        return None


def _torn(value: Any) -> bool:
    """Whether an FSDP module is within a step still; those of the first kind have no way to begin anew."""
    parts = []
    for module in value.modules() if hasattr(value, "modules") else ():
        with contextlib.suppress(AttributeError):
            parts += [module.training_state, module._handle._training_state]
        with contextlib.suppress(AttributeError):
            state = module._get_fsdp_state()
            parts += [state._training_state, *(group._training_state for group in state._fsdp_param_groups)]
    return any(part.name != "IDLE" for part in parts)
