"""What hung on a rank's process group: rebound to the new one where that can be, named as lost where it cannot. Among it models and tensors
that are sharded over ranks (FSDP, FSDP2, DTensor), and the meshes that they are sharded over.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Mapping
from types import CellType, FunctionType
from typing import Any

from skymagic.plugins._torch import membership

SYNC = "for p in {name}.parameters(): dist.broadcast(p.data, 0)"
PIECE = 1 << 20  # elements that are compared at a time: 8 MB in double precision
DEFAULT = "default_pg"
"""How torch describes a default group, also one that is gone."""


def rebind(new: Any, before: list[Any], made: Mapping[int, Any]) -> None:
    """Put groups in the place of earlier ones: in variables, in objects that hold them, and where they are the default of a parameter.

    ``def f(x, group=dist.group.WORLD)`` holds the group of the time when it was read. torch has such functions too, in
    modules that the first DDP wrapper imports; they would use a group that is gone, and keep its threads and connections.

    Args:
        new: the default group, for all that were before.
        before: the groups that are gone.
        made: by their ``id``: what is in their place.
    """
    kind = type(new)

    def now(value: Any) -> Any:  # isinstance would ask any object for attributes
        if type(value) is not kind or value is new:
            return value
        return made.get(id(value), new if value.group_desc == DEFAULT else value)

    def update(names: dict[Any, Any]) -> None:
        names.update(
            {name: now(value) for name, value in list(names.items()) if now(value) is not value}
        )

    # some 100,000, so few words for each; their tuples are not known to gc where all that is in them is groups
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        if (values := function.__defaults__) and kind in map(type, values):
            function.__defaults__ = tuple(map(now, values))
        if (names := function.__kwdefaults__) and kind in map(type, names.values()):
            update(names)
    update(namespace_of_rank())
    for holder in gc.get_referrers(*before):
        if holder is before or holder is made:
            continue
        if isinstance(holder, list):
            holder[:] = map(now, holder)
        elif isinstance(holder, CellType):
            holder.cell_contents = now(holder.cell_contents)
        elif isinstance(names := holder if isinstance(holder, dict) else _attributes(holder), dict):
            update(names)


def _attributes(holder: object) -> Any:
    """An object's own attributes, of those kinds that hold groups; a frame has none."""
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None


def complete(wrapper: Any) -> None:
    """Give a DDP wrapper whose reducer is new what torch's own `__setstate__` leaves out."""
    import torch.distributed as dist

    wrapper._has_rebuilt_buckets = False
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


def on_own_device(state: dict[str, Any]) -> dict[str, Any]:
    """A DDP wrapper's state, for the device that its module is on here."""
    device = next((each.device for each in state["_modules"]["module"].parameters()), None)
    if not state.get("device_ids") or device is None or state["device_ids"] == [device.index]:
        return state
    return {**state, "device_ids": [device.index], "output_device": device.index, "device": device}


def with_existing_devices(
    arguments: tuple[Any, ...], options: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `DistributedDataParallel` with device numbers that this process has.

    accelerate, and transformers' Trainer with it, pass the local rank as the device. Where ranks share a
    GPU that number may not exist: the device that the module is on takes its place.

    Args:
        arguments: positional arguments, as the caller wrote them.
        options: keyword arguments.
        count: the GPUs that this process sees.
    """
    names = ("module", "device_ids", "output_device")
    given = {**dict(zip(names, arguments, strict=False)), **options}
    device_ids = given.get("device_ids")
    if not device_ids or len(device_ids) != 1:
        return arguments, options
    number = getattr(device_ids[0], "index", device_ids[0])
    devices = {parameter.device for parameter in given["module"].parameters()}
    device = devices.pop() if len(devices) == 1 else None
    if not isinstance(number, int) or number < count or device is None or device.index is None:
        return arguments, options
    given |= {"device_ids": [device.index]}
    if given.get("output_device") is not None:
        given["output_device"] = device.index
    positional = tuple(given.pop(name) for name in names[: len(arguments)])
    return (*positional, *arguments[len(names) :]), given


def namespace_of_rank() -> dict[str, Any]:
    """The rank's variables; empty outside a kernel."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return {} if shell is None else shell.user_ns


def variables() -> dict[str, Any]:
    """The rank's variables, as a copy."""
    return dict(namespace_of_rank())


def name_of(value: object) -> str:
    """The variable that holds a value, or its type."""
    return next(
        (name for name, held in variables().items() if held is value and name[:1] != "_"),
        type(value).__name__,
    )


def lost_groups(variables: Mapping[str, Any]) -> list[str]:
    """Variables that hold groups which could not be made again."""
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
    """DDP wrappers whose parameters are not the same on all ranks, for one rank had stepped and others had not.

    Compared by sums in double precision; each rank takes part, in the order of the wrappers' parameter counts. In double precision is a
    piece of a parameter at a time: a model that fills its GPU is compared, too.
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
        return repr(
            [total.tolist() for total in totals.values()]
        )  # as text, for two NaN are the same here

    with torch.no_grad():
        mine = {name_of(wrapper): fingerprint(wrapper) for wrapper in wrappers}
    everyone = membership.tell_all(list(mine.items()))
    told = {
        name: (membership.digest(name), membership.digest(value)) for name, value in mine.items()
    }
    unequal = sorted(
        name
        for name, (key, value) in told.items()
        if any(o.get(key, value) != value for o in everyone)
    )
    why = "its parameters differ between ranks, because only some had stepped; take rank 0's on all"
    return [f"{name}: {why}: {SYNC.format(name=name)}" for name in unequal]


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
            with contextlib.suppress(
                Exception
            ):  # another version of torch, or more is broken: it is named as lost
                state._reset_iter_state()


def _fsdp2_states() -> list[Any]:
    module = sys.modules.get(FSDP2_STATE)
    if module is None:
        return []
    return [one for one in gc.get_objects() if issubclass(type(one), module.FSDPState)]


def lost_shards(
    variables: dict[str, Any], alive: Collection[int], world_size: int | None
) -> list[str]:
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
            found.append(
                f"{name}: {what} has lost its part on rank {where}; make it again, from a checkpoint"
            )
        elif what and world_size is not None:
            found.append(
                f"{name}: {what} is sharded over another number of ranks than {world_size}; make it again"
            )
        elif what and _torn(value):
            found.append(
                f"{name}: {what} was interrupted within a step and cannot be carried over; make it again"
            )
    return found


def _kind(value: Any) -> str:
    """What a sharded value is, in words; empty for others."""
    names = {
        kind.__name__
        for kind in type(value).__mro__
        if kind.__module__.startswith("torch.distributed")
    }
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
            states = [
                getattr(module, "_get_fsdp_state", lambda: None)() for module in value.modules()
            ]
            groups = [
                group for state in states if state is not None for group in state._fsdp_param_groups
            ]
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
            parts += [
                state._training_state,
                *(group._training_state for group in state._fsdp_param_groups),
            ]
    return any(part.name != "IDLE" for part in parts)
