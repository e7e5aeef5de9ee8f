"""Gather sharded values for the notebook: DTensor, FSDP modules, and objects that refer to them.

They travel as a whole: a DTensor as the full tensor, a module as an instance of the user's own
class with full parameters. Gathering is a collective, so all ranks in a run follow the same steps,
whether or not they send the value:

1. `Search`: a pickling pass that only collects the shards, in the order of traversal;
2. each rank publishes its result and reads those of the other ranks, so that no rank waits in a
   collective for one that never joins;
3. `whole`: the collectives run in that order; then the value is pickled with the gathered tensors.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.data.values import hooks
from skymagic.data.values.kinds import is_a
from skymagic.data.values.rebuild import same
from skymagic.data.values.tensors import on_host
from skymagic.runtime import info, rendezvous

WAIT = 86400.0
"""Seconds to wait for the other ranks, which may still be running their cells.

A failure or an interrupt ends the wait.
"""
MODULES = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""If neither of these is loaded, the process has no shards."""
KEPT = 8
"""Number of runs whose results other ranks can still read: slow ranks may be behind."""
_posted: deque[str] = deque()
ALL_RANKS = (
    "bring it from all ranks (-o, -g, %sky_pull without -t; `@` for a call), "
    "or gather it in the cell"
)
NOT_GATHERED = f"holds this rank's part alone: {ALL_RANKS}"
OPTIMIZER = (
    "an optimizer of FullyShardedDataParallel holds this rank's part alone: "
    "bring get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
)
GROUP = "a process group lives on its ranks alone: leave it out, and pass what was computed with it"
MESH = "a DeviceMesh lives on its ranks alone: leave it out, or bring mesh.mesh, the ranks in it"


class PartlyElsewhere(pickle.PicklingError):
    """Raised for a value that is not whole on one rank; the message is a sentence."""


class Shards:
    """Handling of shards if nothing was gathered: refuse them."""

    def tensor(self, part: Any) -> Any:
        """Reduce a DTensor."""
        raise PartlyElsewhere(f"a {type(part).__name__} {NOT_GATHERED} with full_tensor()")

    def wrapper(self, module: Any) -> Any:
        """Reduce a FullyShardedDataParallel module."""
        raise PartlyElsewhere(
            f"an FSDP module {NOT_GATHERED} with get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))"
        )


REFUSED = Shards()


class ShardLayout(NamedTuple):
    """Layout of a value's shards, which the ranks of a run exchange as JSON and compare."""

    signature: list[str]
    """Description that must be equal on all ranks that hold shards."""
    holders: list[int]
    """Ranks that hold other shards of the same tensors and modules."""


@dataclass
class Search(Shards):
    """Collects the shards of a value, in the order of traversal."""

    tensors: list[Any] = field(default_factory=list)
    wrappers: list[Any] = field(default_factory=list)

    def tensor(self, part: Any) -> Any:
        self.tensors.append(part)
        if part.grad is not None:
            self.tensors.append(part.grad)
        # Any reduction will do: the pickle of this pass is discarded.
        return str, ()

    def wrapper(self, module: Any) -> Any:
        self.wrappers.append(module)
        return str, ()

    def signature(self) -> list[str]:
        """Return a description that must be equal on all ranks that hold shards."""
        return [
            *(f"{tuple(part.shape)} {part.dtype} {part.placements}" for part in self.tensors),
            *(type(wrapper.module).__name__ for wrapper in self.wrappers),
        ]

    def holders(self) -> list[int]:
        """Return the ranks that hold other shards of the same tensors and modules."""
        dist = sys.modules["torch.distributed"]
        ranks = {rank for part in self.tensors for rank in part.device_mesh.mesh.flatten().tolist()}
        return sorted(
            ranks.union(
                *(dist.get_process_group_ranks(wrapper.process_group) for wrapper in self.wrappers)
            )
        )


@dataclass
class GatheredShards(Shards):
    """Gathered values: the full tensor for each shard, by the shard's identity."""

    tensors: dict[int, Any] = field(default_factory=dict)
    wrappers: set[int] = field(default_factory=set)
    """Ids of the FSDP modules whose parameters are whole at present."""
    problems: dict[str, str] = field(default_factory=dict)
    """By name: why a value was not gathered."""

    def tensor(self, part: Any) -> Any:
        full = self.tensors.get(id(part))
        return super().tensor(part) if full is None else (same, (full,))

    def wrapper(self, module: Any) -> Any:
        return (same, (module.module,)) if id(module) in self.wrappers else super().wrapper(module)


def reducer(kind: type) -> Callable[[Any, Shards], Any] | None:
    """Return the reducer for objects of this type on their way to the notebook, or None."""
    if is_a(kind, "torch.distributed.tensor", "DTensor"):
        return lambda obj, shards: shards.tensor(obj)
    if is_a(kind, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        return lambda obj, shards: shards.wrapper(obj)
    if is_a(kind, "torch.nn", "Module"):
        return lambda obj, shards: (
            _plain_module(obj) if "_is_fsdp_managed_module" in vars(obj) else NotImplemented
        )
    if is_a(kind, "torch.optim", "Optimizer"):
        return lambda obj, shards: _optimizer(obj)
    if is_a(kind, "torch.distributed", "ProcessGroup") or is_a(
        kind, "torch._C._distributed_c10d", "ProcessGroup"
    ):
        return lambda obj, shards: _refuse(GROUP)
    if is_a(kind, "torch.distributed.device_mesh", "DeviceMesh"):
        return lambda obj, shards: _refuse(MESH)
    return None


@contextlib.contextmanager
def gathered_shards(
    values: Mapping[str, object], search: Callable[[object, Search], object], sent: Container[str]
) -> Iterator[Shards]:
    """Gather values that are sharded over several ranks.

    All ranks in a run call this with the same names.

    Args:
        values: values to be sent, by this rank or by others.
        search: pickles a value with a `Search`.
        sent: names of the values that this rank sends; it keeps nothing of the others.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not values or not dist.is_initialized():
        yield REFUSED
        return
    searched = values.items() if sys.modules.keys() & set(MODULES) else ()
    searches = {
        name: shards
        for name, value in searched
        if (shards := _search_if_sharded(value, search)) is not None
    }
    # A single rank without shards needs no agreement with others.
    if not searches and len(info.participants()) == 1:
        yield REFUSED
        return
    matching, problems = _match_across_ranks(searches)
    gathered = GatheredShards(problems=problems)
    # The parameters stay whole until the caller, inside this context, has pickled the values.
    with contextlib.ExitStack() as stack:
        # Sorted, because the collectives must run in the same order on all ranks.
        for name in sorted(matching):
            for module in searches[name].wrappers:
                if id(module) not in gathered.wrappers:
                    summon = type(module).summon_full_params
                    # Without `use_orig_params` the parameters are temporary and have no gradients.
                    grads = module._use_orig_params
                    stack.enter_context(summon(module, writeback=False, with_grads=grads))
                    # `summon_full_params` includes nested FSDP modules by default.
                    nested = (
                        submodule
                        for submodule in module.modules()
                        if isinstance(submodule, type(module))
                    )
                    gathered.wrappers.update(map(id, nested))
            _gather(searches[name].tensors, gathered.tensors, keep=name in sent)
        yield gathered


def _search_if_sharded(value: object, search: Callable[[object, Search], object]) -> Search | None:
    """Return the shards in a value, or None if it has none."""
    shards = Search()
    with contextlib.suppress(Exception):  # errors are reported when the value is pickled for real
        search(value, shards)
    return shards if shards.tensors or shards.wrappers else None


def _match_across_ranks(searches: Mapping[str, Search]) -> tuple[list[str], dict[str, str]]:
    """Compare the shards with those of the other ranks; the result is the same on all ranks.

    Returns:
        Names whose shards match on all ranks that hold them, and the reason by name for the others.
    """
    ranks, rank = info.participants(), info.instance_info().rank
    published = {
        name: ShardLayout(search.signature(), search.holders()) for name, search in searches.items()
    }
    key = f"shards/{info.run_number()}"
    rendezvous.put(f"{key}/{rank}", published)
    _posted.append(f"{key}/{rank}")
    # Old entries are deleted late, because other ranks may still read them.
    if len(_posted) > KEPT:
        rendezvous.delete(_posted.popleft())
    if not searches:
        # Without shards this rank need not know which values match. It had to publish its result
        # all the same, because the others may be waiting for it.
        return [], {}
    shards_by_rank = {
        other: {
            name: ShardLayout(*layout)
            for name, layout in rendezvous.get(f"{key}/{other}", WAIT).items()
        }
        for other in ranks
    }
    problems = {
        name: _problem(name, shards_by_rank)
        for name in dict.fromkeys(name for names in shards_by_rank.values() for name in names)
    }
    return [name for name in searches if not problems[name]], {
        name: why for name, why in problems.items() if why
    }


def _problem(name: str, layouts: Mapping[int, Mapping[str, ShardLayout]]) -> str:
    """Return why the shards of a value cannot be gathered, or "" if they can."""
    for rank, (signature, holders) in (
        (rank, shards[name]) for rank, shards in layouts.items() if name in shards
    ):
        absent = [holder for holder in holders if holder not in layouts]
        if absent:
            holder_ranks = ", ".join(map(str, holders))
            return (
                f"its parts lie on ranks {holder_ranks}, and rank {absent[0]} "
                f"does not take part in this run: {ALL_RANKS}"
            )
        different = next(
            (
                holder
                for holder in holders
                if name not in layouts[holder] or layouts[holder][name].signature != signature
            ),
            None,
        )
        if different is not None:
            return (
                f"its parts on rank {rank} and rank {different} are not of one value: "
                "make it on all ranks alike"
            )
    return ""


def _gather(parts: Sequence[Any], into: dict[int, Any], *, keep: bool) -> None:
    """Gather the full tensors one at a time, so that a GPU holds only one of them.

    Parameters stay parameters and keep their gradients.

    Args:
        into: filled with the full tensors in host memory.
        keep: False if this rank does not need them; it still joins the collectives.
    """
    torch = sys.modules["torch"]
    done: set[int] = set()
    for part in parts:
        if id(part) not in done:
            # Only within this value, so that all ranks do the same: a shard that was gathered for
            # another name is gathered again.
            done.add(id(part))
            # Detached, because `full_tensor` is differentiable and would record the gathering.
            gathered = full_tensor(part.detach())
            if keep and id(part) not in into:
                into[id(part)] = on_host(gathered)
            del gathered  # free it before the next one is gathered
    for part in parts if keep else ():
        # `full_tensor` returns plain tensors: restore parameters with their gradients and hooks.
        if isinstance(part, torch.nn.Parameter) and not isinstance(
            into[id(part)], torch.nn.Parameter
        ):
            parameter = torch.nn.Parameter(into[id(part)], requires_grad=part.requires_grad)
            if part.grad is not None:
                parameter.grad = into[id(part.grad)]
            for name, registered in hooks.tensor_hooks(part).items():
                user_hooks = {key: hook for key, hook in registered.items() if not _of_torch(hook)}
                hooks.set_tensor_hooks(
                    parameter, {name: OrderedDict(user_hooks)} if user_hooks else {}
                )
            into[id(part)] = parameter


def full_tensor(part: Any) -> Any:
    """Gather a DTensor from all ranks of its mesh, on the mesh's device or in host memory.

    Functional collectives crash the process (SIGSEGV) when gloo carries CUDA tensors, which it does
    where ranks share a GPU; seen with torch 2.11 on an H100, under torchrun as well. Such shards
    are copied to host memory first and gathered there.
    """
    if not _is_gpu_over_gloo(part.device_mesh):
        return part.full_tensor()
    host = _host_mesh(part.device_mesh)
    local = part.to_local().cpu()
    on_hosts = type(part).from_local(
        local,
        host,
        part.placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )
    return on_hosts.full_tensor()


def _is_gpu_over_gloo(mesh: Any) -> bool:
    """Return True if gloo carries the tensors of this mesh of GPUs."""
    if mesh.device_type == "cpu":
        return False
    device = sys.modules["torch"].device(mesh.device_type)
    return any(group._get_backend(device).name() == "gloo" for group in mesh.get_all_groups())


def _host_mesh(mesh: Any) -> Any:
    """Return a CPU mesh with the ranks, dimensions and process groups of a mesh."""
    groups = mesh.get_all_groups()
    if mesh.ndim == 1:
        return type(mesh).from_group(groups[0], "cpu")
    return type(mesh).from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _plain_module(module: Any) -> Any:
    """Reduce a module that FSDP manages, without FSDP's hooks.

    A module that `fully_shard` was applied to gets its own class back.
    """
    own = type(module)
    if is_a(own, "torch.distributed.fsdp", "FSDPModule"):
        own = next(
            base
            for base in own.__mro__[1:]
            if not is_a(base, "torch.distributed.fsdp", "FSDPModule")
        )
    state = dict(module.__getstate__())
    for name in [
        name
        for name in state
        if name.startswith(("__composable_api", "_is_fsdp_managed", "_fsdp_"))
    ]:
        del state[name]
    # Keep the user's hooks, and drop those of FSDP.
    for name, registered in state.items():
        if name.endswith("_hooks") and isinstance(registered, dict):
            state[name] = type(registered)(
                (key, hook) for key, hook in registered.items() if not _of_torch(hook)
            )
    return _blank, (own,), state


def _of_torch(hook: Any) -> bool:
    """Return True if a hook belongs to `torch.distributed`."""
    # A wrapped hook refers to the function as `hook` or `func`.
    hook = getattr(hook, "hook", getattr(hook, "func", hook))
    owner = getattr(hook, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(hook, "__module__", "")
    return str(module).startswith("torch.distributed")


def _optimizer(optimizer: Any) -> Any:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    # FSDP sets this attribute on its flat parameters.
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        _refuse(OPTIMIZER)
    return NotImplemented


def _refuse(reason: str) -> Any:
    raise PartlyElsewhere(reason)


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)
