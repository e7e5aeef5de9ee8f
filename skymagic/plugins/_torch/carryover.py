"""Move models and variables of a rank to its new process group, or report them as lost.

This includes models and tensors that are sharded over ranks (FSDP, FSDP2, DTensor), and their
meshes.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Mapping
from types import CellType, FunctionType
from typing import Any

from skymagic.data.namespace import Namespace
from skymagic.plugins._torch import membership

SYNC = "for p in {name}.parameters(): dist.broadcast(p.data, 0)"
PIECE = 1 << 20
"""Number of elements that are compared at a time: 8 MB in double precision."""
DEFAULT = "default_pg"
"""torch's description of a default group, even one that was destroyed."""


def rebind(new: Any, before: list[Any], replacements: Mapping[int, Any]) -> None:
    """Replace old groups by new ones in variables, in objects, and in parameter defaults.

    ``def f(x, group=dist.group.WORLD)`` holds the group from the time of its definition. torch has
    such functions too, in modules that the first DDP wrapper imports. They would use a group that
    was destroyed, and keep its threads and connections.

    Args:
        new: the default group, which replaces all earlier ones.
        before: the groups that were destroyed.
        replacements: their replacements, by ``id``.
    """
    kind = type(new)

    # isinstance would ask any object for attributes.
    def now(value: Any) -> Any:
        if type(value) is not kind or value is new:
            return value
        return replacements.get(id(value), new if value.group_desc == DEFAULT else value)

    def update(names: dict[Any, Any]) -> None:
        names.update(
            {name: now(value) for name, value in list(names.items()) if now(value) is not value}
        )

    # There are some 100,000 functions, so little is done for each. gc does not know tuples of
    # defaults that hold only groups, so functions are searched.
    for function in [
        candidate for candidate in gc.get_objects() if type(candidate) is FunctionType
    ]:
        if (values := function.__defaults__) and kind in map(type, values):
            function.__defaults__ = tuple(map(now, values))
        if (names := function.__kwdefaults__) and kind in map(type, names.values()):
            update(names)
    update(namespace_of_rank())
    for holder in gc.get_referrers(*before):
        # The arguments must keep the old groups.
        if holder is before or holder is replacements:
            continue
        if isinstance(holder, list):
            holder[:] = map(now, holder)
        elif isinstance(holder, CellType):
            holder.cell_contents = now(holder.cell_contents)
        elif isinstance(names := holder if isinstance(holder, dict) else _attributes(holder), dict):
            update(names)


def _attributes(holder: object) -> Any:
    """Return the attributes of an object that may hold groups; None for others, such as frames."""
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None


def complete(wrapper: Any) -> None:
    """Restore what torch's own `__setstate__` omits in a DDP wrapper with a new reducer."""
    import torch.distributed as dist

    wrapper._has_rebuilt_buckets = False
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


def on_own_device(state: dict[str, object]) -> dict[str, object]:
    """Return a DDP wrapper's state, adapted to the device that its module is on here."""
    modules: Any = state["_modules"]
    device = next((parameter.device for parameter in modules["module"].parameters()), None)
    if not state.get("device_ids") or device is None or state["device_ids"] == [device.index]:
        return state
    return {**state, "device_ids": [device.index], "output_device": device.index, "device": device}


def with_existing_devices(
    arguments: tuple[Any, ...], options: dict[str, object], count: int
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return the arguments of `DistributedDataParallel` with device numbers that this process has.

    accelerate, and through it transformers' Trainer, pass the local rank as the device. If ranks
    share a GPU, that number may not exist. Then it is replaced by the device that the module is on.

    Args:
        arguments: positional arguments as the caller wrote them.
        options: keyword arguments.
        count: number of GPUs that this process sees.
    """
    names = ("module", "device_ids", "output_device")
    by_name = {**dict(zip(names, arguments, strict=False)), **options}
    device_ids: Any = by_name.get("device_ids")
    if not device_ids or len(device_ids) != 1:
        return arguments, options
    number = getattr(device_ids[0], "index", device_ids[0])
    module: Any = by_name["module"]
    devices = {parameter.device for parameter in module.parameters()}
    device = devices.pop() if len(devices) == 1 else None
    if not isinstance(number, int) or number < count or device is None or device.index is None:
        return arguments, options
    by_name |= {"device_ids": [device.index]}
    if by_name.get("output_device") is not None:
        by_name["output_device"] = device.index
    positional = tuple(by_name.pop(name) for name in names[: len(arguments)])
    return (*positional, *arguments[len(names) :]), by_name


def namespace_of_rank() -> Namespace:
    """Return the rank's variables; empty outside a kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return {} if shell is None else shell.user_ns


def variables() -> Namespace:
    """Return a copy of the rank's variables."""
    return dict(namespace_of_rank())


def name_of(value: object) -> str:
    """Return the name of the variable that holds a value, or the value's type."""
    return next(
        (name for name, held in variables().items() if held is value and name[:1] != "_"),
        type(value).__name__,
    )


def lost_groups(variables: Namespace) -> list[str]:
    """Report variables that hold groups which could not be formed again."""
    from torch.distributed import ProcessGroup
    from torch.distributed import distributed_c10d as c10d

    return [
        f"{name}: this process group is gone; make it again with dist.new_group"
        for name, value in sorted(variables.items(), key=lambda item: item[0])
        if isinstance(value, ProcessGroup)
        and value not in c10d._world.pg_map
        and not name.startswith("_")
    ]


def differing(wrappers: list[Any]) -> list[str]:
    """Report DDP wrappers whose parameters differ between ranks, because only some had stepped.

    The comparison uses sums in double precision. Each rank takes part, in the order of the
    wrappers' parameter counts. Only a piece of a parameter at a time is converted to double
    precision, so that a model that fills its GPU can be compared too.
    """
    import torch

    def fingerprint(wrapper: Any) -> str:
        totals: dict[Any, Any] = {}
        for parameter in wrapper.parameters():
            total = totals.setdefault(
                parameter.device, torch.zeros(2, dtype=torch.float64, device=parameter.device)
            )
            for piece in parameter.detach().contiguous().view(-1).split(PIECE):
                values = piece.double()
                total += torch.stack([values.sum(), values.dot(values)])
        # As text, because two NaN must compare equal here.
        return repr([total.tolist() for total in totals.values()])

    with torch.no_grad():
        fingerprints = {name_of(wrapper): fingerprint(wrapper) for wrapper in wrappers}
    tables = membership.all_gather_pairs(list(fingerprints.items()))
    digests = {
        name: (membership.digest(name), membership.digest(value))
        for name, value in fingerprints.items()
    }
    unequal = sorted(
        name
        for name, (key, value) in digests.items()
        if any(table.get(key, value) != value for table in tables)
    )
    why = "its parameters differ between ranks, because only some had stepped; take rank 0's on all"
    return [f"{name}: {why}: {SYNC.format(name=name)}" for name in unequal]


FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""Module of FSDP2's state, which is loaded once a model is sharded."""


def reset_steps(*, waits: bool) -> None:
    """Discard what a failed cell left half-done in this rank's FSDP2 models.

    The next step starts clean. Gradients in flight are lost, as with
    ``FSDPModule.reset_iter_state``.

    Args:
        waits: whether collectives that were started will end; otherwise they are dropped, because
            their group was destroyed.
    """
    for state in _fsdp2_states():
        for group in state._fsdp_param_groups:
            if not waits:
                group._all_gather_result = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
        if state._is_root:
            # Another version of torch has no such method, or more is broken. Then the model is
            # reported as lost.
            with contextlib.suppress(Exception):
                state._reset_iter_state()


def _fsdp2_states() -> list[Any]:
    module = sys.modules.get(FSDP2_STATE)
    if module is None:
        return []
    # Not isinstance, which also asks each object for its `__class__`: a proxy may compute it.
    return [
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), module.FSDPState)
    ]


def lost_shards(variables: Namespace, alive: Collection[int], world_size: int | None) -> list[str]:
    """Return a sentence for each sharded value that cannot be used any more.

    Args:
        variables: the rank's variables.
        alive: ranks that still hold their parts.
        world_size: new size of the pool if it has changed: values that were sharded over all ranks
            no longer match it.
    """
    notes = []
    for name, value in sorted(variables.items(), key=lambda item: item[0]):
        if name.startswith("_"):
            continue
        what, ranks = _kind(value), _ranks(value)
        if what and ranks is None:
            notes.append(f"{name}: {what} whose process group is gone; make it again")
        elif what and (lost_ranks := sorted(set(ranks or ()) - set(alive))):
            numbers = ", ".join(map(str, lost_ranks))
            notes.append(
                f"{name}: {what} has lost its part on rank {numbers}; make it again, from a "
                "checkpoint"
            )
        elif what and world_size is not None:
            notes.append(
                f"{name}: {what} is sharded over another number of ranks than {world_size}; make "
                "it again"
            )
        elif what and _is_within_step(value):
            notes.append(
                f"{name}: {what} was interrupted within a step and cannot be carried over; make "
                "it again"
            )
    return notes


def _kind(value: Any) -> str:
    """Describe a sharded value; "" for other values."""
    names = {
        kind.__name__
        for kind in type(value).__mro__
        if kind.__module__.startswith("torch.distributed")
    }
    descriptions = {
        "FullyShardedDataParallel": "an FSDP module",
        "FSDPModule": "an FSDP module",
        "DTensor": "a DTensor",
        "DeviceMesh": "a device mesh",
    }
    return next((text for name, text in descriptions.items() if name in names), "")


def _ranks(value: Any) -> list[int] | None:
    """Return the ranks that a value is sharded over; None if its group was destroyed."""
    import torch.distributed as dist

    try:
        if hasattr(value, "process_group"):
            return list(dist.get_process_group_ranks(value.process_group))
        if hasattr(value, "get_group"):
            meshes = [value]
        elif hasattr(value, "device_mesh"):
            meshes = [value.device_mesh]
        else:
            states = [
                getattr(module, "_get_fsdp_state", lambda: None)() for module in value.modules()
            ]
            groups = [
                group for state in states if state is not None for group in state._fsdp_param_groups
            ]
            meshes = [group.mesh_info.mesh for group in groups]
        for mesh in meshes:
            for group in mesh.get_all_groups():
                dist.get_process_group_ranks(group)  # raises if it was destroyed
        return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    except Exception:
        return None


def _is_within_step(value: Any) -> bool:
    """Return True if an FSDP module is still within a step.

    FSDP1 modules cannot start the step again.
    """
    parts = []
    for module in value.modules() if hasattr(value, "modules") else ():
        with contextlib.suppress(AttributeError):
            parts += [module.training_state, module._handle._training_state]
        with contextlib.suppress(AttributeError):
            state = module._get_fsdp_state()
            parts += [
                state._training_state,
                *(group._training_state for group in state._fsdp_param_groups),
            ]
    return any(part.name != "IDLE" for part in parts)
