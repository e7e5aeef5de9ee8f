"""Refuse collectives that would wait forever for ranks that do not take part in the run.

If all ranks take part, this adds one comparison to a collective.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from skymagic.plan.units import rank_words
from skymagic.runtime import info
from skymagic.runtime.on_import import Patches, wraps

COLLECTIVES = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
]


@contextlib.contextmanager
def collectives_checked() -> Iterator[None]:
    """Check participants in torch's collectives and DDP wrappers inside the context."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel as DDP

    with Patches() as patches:
        for name in COLLECTIVES:
            plain = getattr(c10d, name, None)
            # Another version of torch has it.
            if plain is None:
                continue
            guarded = guarded_collective(plain)
            for module in (c10d, dist):
                if getattr(module, name, None) is plain:
                    patches.put(module, name, guarded)
        new_group = guarded_collective(c10d.new_group, unless="use_local_synchronization")
        for module in (c10d, dist):
            patches.put(module, "new_group", new_group)
        patches.put(DDP, "__init__", guarded_ddp(DDP.__init__, "DistributedDataParallel"))
        # Called by forward, and hidden from torch.compile.
        if hasattr(DDP, "_pre_forward"):
            patches.put(
                DDP,
                "_pre_forward",
                guarded_ddp(DDP._pre_forward, "the forward pass of DistributedDataParallel"),
            )
        yield


def guarded_collective(collective: Callable[..., Any], unless: str = "") -> Callable[..., Any]:
    """Wrap a collective so that it raises if its group has ranks that do not take part.

    Args:
        collective: the function of torch.
        unless: name of a parameter that, if true, lets the callers proceed without the others.
    """
    signature = inspect.signature(collective)

    @wraps(collective)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # IPython hides this frame in tracebacks.
        __tracebackhide__ = True
        if not info.all_ranks_take_part():
            arguments = signature.bind_partial(*args, **kwargs).arguments
            if not arguments.get(unless):
                check(arguments.get("group"), f"dist.{collective.__name__}")
        return collective(*args, **kwargs)

    return guarded


def guarded_ddp(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap a method of DDP so that it raises if its group has ranks that do not take part."""
    signature = inspect.signature(method)

    @wraps(method)
    # positional-only, because DDP(module=…) is an argument of the wrapped method
    def guarded(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not info.all_ranks_take_part():
            arguments = signature.bind_partial(wrapper, *args, **kwargs).arguments
            check(wrapper.__dict__.get("process_group", arguments.get("process_group")), what)
        return method(wrapper, *args, **kwargs)

    return guarded


def check(group: Any, what: str) -> None:
    """Raise RuntimeError if a group has ranks that do not take part in the run.

    None stands for the default group.
    """
    import torch.distributed as dist

    default = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        group = default
    # This rank is not a member, and torch has its own message for that.
    if not isinstance(group, dist.ProcessGroup):
        return
    ranks, participants = dist.get_process_group_ranks(group), info.participants()
    absent = sorted(set(ranks) - set(participants))
    if not absent:
        return
    member_words, participant_words = (
        rank_words(numbers).replace("–", " to ") for numbers in (ranks, participants)
    )
    raise RuntimeError(
        f"{what} waits for {member_words}, and only {participant_words} "
        f"{'takes' if len(participants) == 1 else 'take'} part in this run: run it on all of them "
        "(f() @ pool, or a cell without --targets), or use a group of those that take part: "
        f"dist.new_group({list(participants)}, use_local_synchronization=True)"
    )
