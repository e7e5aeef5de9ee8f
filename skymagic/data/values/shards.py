"""Values whose parts lie on several ranks, on their way to the notebook: DTensor, FSDP's modules, and what refers to them.

They travel as a whole: a DTensor as the tensor that it is a part of, a module as one of the user's own class with whole
parameters. To gather the parts is a collective, so all ranks that take part in a run go through the same steps, whether they
send the value or not:

1. `Search`: a pass of pickling that only notes which parts there are, in the order in which they are met;
2. each rank puts what it has found, and reads what the others have: nobody waits in a collective for a rank that does not come;
3. `whole`: the collectives, in that order; then the value is pickled with what they gave.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.data.values import hooks
from skymagic.data.values.kinds import is_a
from skymagic.data.values.rebuild import same
from skymagic.data.values.tensors import on_host
from skymagic.runtime import info, rendezvous

WAIT = 86400.0
"""Seconds to wait for the other ranks, which may still be at their cells; a failure or an interrupt ends it."""
MODULES = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""Who has imported neither has no parts."""
KEPT = 8
"""Runs of which the other ranks can still read what this one has found: they may be behind."""
_posted: deque[str] = deque()
ALL_RANKS = "bring it from all ranks (-o, -g, %sky_pull without -t; `@` for a call), or gather it in the cell"
NOT_GATHERED = f"holds this rank's part alone: {ALL_RANKS}"
OPTIMIZER = (
    "an optimizer of FullyShardedDataParallel holds this rank's part alone: bring get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
)
GROUP = "a process group lives on its ranks alone: leave it out, and pass what was computed with it"
MESH = "a DeviceMesh lives on its ranks alone: leave it out, or bring mesh.mesh, the ranks in it"


class PartlyElsewhere(pickle.PicklingError):
    """A value that is not whole on one rank; the message is a sentence."""


class Shards:
    """What becomes of parts where nothing was gathered: they are refused."""

    def tensor(self, part: Any) -> Any:
        """How a DTensor is pickled."""
        raise PartlyElsewhere(f"a {type(part).__name__} {NOT_GATHERED} with full_tensor()")

    def wrapper(self, module: Any) -> Any:
        """How a FullyShardedDataParallel is pickled."""
        raise PartlyElsewhere(
            f"an FSDP module {NOT_GATHERED} with get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )


REFUSED = Shards()


@dataclass
class Search(Shards):
    """Notes the parts of a value, in the order in which they are met."""

    tensors: list[Any] = field(default_factory=list)
    wrappers: list[Any] = field(default_factory=list)

    def tensor(self, part: Any) -> Any:
        self.tensors.append(part)
        if part.grad is not None:
            self.tensors.append(part.grad)
        return str, ()

    def wrapper(self, module: Any) -> Any:
        self.wrappers.append(module)
        return str, ()

    def signature(self) -> list[str]:
        """What must be alike on all ranks that hold parts."""
        return [
            *(f"{tuple(each.shape)} {each.dtype} {each.placements}" for each in self.tensors),
            *(type(each.module).__name__ for each in self.wrappers),
        ]

    def holders(self) -> list[int]:
        """The ranks that hold parts of what this one has a part of."""
        dist = sys.modules["torch.distributed"]
        ranks = {rank for each in self.tensors for rank in each.device_mesh.mesh.flatten().tolist()}
        return sorted(
            ranks.union(
                *(dist.get_process_group_ranks(each.process_group) for each in self.wrappers)
            )
        )


@dataclass
class Whole(Shards):
    """What was gathered: by the identity of a part, the tensor that it is a part of."""

    tensors: dict[int, Any] = field(default_factory=dict)
    wrappers: set[int] = field(default_factory=set)
    """FSDP modules whose parameters are whole at present."""
    problems: dict[str, str] = field(default_factory=dict)
    """By name, why a value was not gathered."""

    def tensor(self, part: Any) -> Any:
        known = self.tensors.get(id(part))
        return super().tensor(part) if known is None else (same, (known,))

    def wrapper(self, module: Any) -> Any:
        return (same, (module.module,)) if id(module) in self.wrappers else super().wrapper(module)


def reducer(kind: type) -> Callable[[Any, Shards], Any] | None:
    """How objects of this type are pickled for the notebook; None for those that have no parts elsewhere."""
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
def whole(
    values: Mapping[str, object], search: Callable[[object, Search], object], sent: Container[str]
) -> Iterator[Shards]:
    """Gather what lies on several ranks; called on all ranks that take part in a run, with the same names.

    Args:
        values: what is to be sent, by these ranks or by others.
        search: pickles a value and passes a `Search`.
        sent: names of the values that this rank sends; of the others it keeps nothing.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not values or not dist.is_initialized():
        yield REFUSED
        return
    searched = values.items() if sys.modules.keys() & set(MODULES) else ()
    found = {
        name: each for name, value in searched if (each := _searched(value, search)) is not None
    }
    if not found and len(info.participants()) == 1:
        yield REFUSED
        return
    good, problems = _agreed(found)
    gathered = Whole(problems=problems)
    with contextlib.ExitStack() as stack:
        for name in sorted(good):
            for module in found[name].wrappers:
                if id(module) not in gathered.wrappers:
                    summoned = type(module).summon_full_params
                    grads = (
                        module._use_orig_params
                    )  # the others' parameters are made for the moment, without
                    stack.enter_context(summoned(module, writeback=False, with_grads=grads))
                    inner = (each for each in module.modules() if isinstance(each, type(module)))
                    gathered.wrappers.update(map(id, inner))
            _gather(found[name].tensors, gathered.tensors, keep=name in sent)
        yield gathered


def _searched(value: object, search: Callable[[object, Search], object]) -> Search | None:
    """What a value has of parts; None where it has none."""
    found = Search()
    with contextlib.suppress(Exception):  # what cannot be pickled is told when it is
        search(value, found)
    return found if found.tensors or found.wrappers else None


def _agreed(found: Mapping[str, Search]) -> tuple[list[str], dict[str, str]]:
    """(names whose parts are alike on all ranks that hold them, for the others why not); the same on all ranks."""
    ranks, rank = info.participants(), info.instance_info().rank
    mine = {name: [each.signature(), each.holders()] for name, each in found.items()}
    key = f"shards/{info.run_number()}"
    rendezvous.put(f"{key}/{rank}", mine)
    _posted.append(f"{key}/{rank}")
    if len(_posted) > KEPT:
        rendezvous.delete(_posted.popleft())
    if not found:
        return [], {}  # the others may wait for what this rank has put
    theirs = {each: rendezvous.get(f"{key}/{each}", WAIT) for each in ranks}
    problems = {
        name: _problem(name, theirs)
        for name in dict.fromkeys(n for each in theirs.values() for n in each)
    }
    return [name for name in found if not problems[name]], {
        n: why for n, why in problems.items() if why
    }


def _problem(name: str, found: Mapping[int, Mapping[str, Any]]) -> str:
    """Why the parts of a value cannot be gathered; empty where they can."""
    for rank, (signature, holders) in (
        (rank, each[name]) for rank, each in found.items() if name in each
    ):
        absent = [each for each in holders if each not in found]
        if absent:
            there = ", ".join(map(str, holders))
            return f"its parts lie on ranks {there}, and rank {absent[0]} does not take part in this run: {ALL_RANKS}"
        other = next(
            (
                each
                for each in holders
                if name not in found[each] or found[each][name][0] != signature
            ),
            None,
        )
        if other is not None:
            return f"its parts on rank {rank} and rank {other} are not of one value: make it on all ranks alike"
    return ""


def _gather(parts: Sequence[Any], into: dict[int, Any], *, keep: bool) -> None:
    """The whole tensors, one after the other, so that a GPU holds one of them at a time; parameters stay parameters, with their gradients.

    Args:
        into: gets them, in host memory.
        keep: whether this rank needs them; it takes part in the collectives all the same.
    """
    torch = sys.modules["torch"]
    done: set[int] = set()
    for part in parts:
        if id(part) not in done:
            done.add(
                id(part)
            )  # on all ranks alike: what was gathered for another name is gathered again
            gathered = full_tensor(part.detach())
            if keep and id(part) not in into:
                into[id(part)] = on_host(gathered)
            del gathered  # before the next one is made
    for part in parts if keep else ():
        if isinstance(part, torch.nn.Parameter) and not isinstance(
            into[id(part)], torch.nn.Parameter
        ):
            parameter = torch.nn.Parameter(into[id(part)], requires_grad=part.requires_grad)
            if part.grad is not None:
                parameter.grad = into[id(part.grad)]
            for name, registered in hooks.tensor_hooks(part).items():
                own = {key: hook for key, hook in registered.items() if not _of_torch(hook)}
                hooks.set_tensor_hooks(parameter, {name: OrderedDict(own)} if own else {})
            into[id(part)] = parameter


def full_tensor(part: Any) -> Any:
    """Gather a DTensor from all ranks of its mesh: the whole tensor, on the mesh's device or in host memory.

    Functional collectives crash the process (SIGSEGV) when gloo carries CUDA tensors, which it does where
    ranks share a GPU; seen with torch 2.11 on an H100, under torchrun as well. Such parts are copied to
    host memory first and gathered there.
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
    """Return the mesh of CPUs with the ranks, dimensions and process groups of a mesh."""
    groups = mesh.get_all_groups()
    if mesh.ndim == 1:
        return type(mesh).from_group(groups[0], "cpu")
    return type(mesh).from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _plain_module(module: Any) -> Any:
    """A module that FSDP manages, without its hooks; one that `fully_shard` was called on is of its own class again."""
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
    for name, registered in state.items():
        if name.endswith("_hooks") and isinstance(registered, dict):
            state[name] = type(registered)(
                (key, hook) for key, hook in registered.items() if not _of_torch(hook)
            )
    return _blank, (own,), state


def _of_torch(hook: Any) -> bool:
    """Whether a hook belongs to torch.distributed."""
    hook = getattr(hook, "hook", getattr(hook, "func", hook))
    owner = getattr(hook, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(hook, "__module__", "")
    return str(module).startswith("torch.distributed")


def _optimizer(optimizer: Any) -> Any:
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if any(getattr(each, "_fsdp_flattened", False) for each in parameters):
        _refuse(OPTIMIZER)
    return NotImplemented


def _refuse(words: str) -> Any:
    raise PartlyElsewhere(words)


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)
