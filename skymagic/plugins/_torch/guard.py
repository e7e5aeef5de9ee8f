"""A collective that waits for ranks that do not take part in the run would wait for ever: it is refused, in words.

Where all ranks take part, what is added to a collective is one comparison.
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
def installed() -> Iterator[None]:
    """Inside, torch's collectives and DDP wrappers look at who takes part."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel as DDP

    with Patches() as patches:
        for name in COLLECTIVES:
            plain = getattr(c10d, name, None)
            if plain is None:  # of another version of torch
                continue
            guarded = guarded_collective(plain)
            for module in (c10d, dist):
                if getattr(module, name, None) is plain:
                    patches.put(module, name, guarded)
        new_group = guarded_collective(c10d.new_group, unless="use_local_synchronization")
        for module in (c10d, dist):
            patches.put(module, "new_group", new_group)
        patches.put(DDP, "__init__", guarded_ddp(DDP.__init__, "DistributedDataParallel"))
        if hasattr(DDP, "_pre_forward"):  # called by forward, and out of the sight of torch.compile
            patches.put(
                DDP,
                "_pre_forward",
                guarded_ddp(DDP._pre_forward, "the forward pass of DistributedDataParallel"),
            )
        yield


def guarded_collective(collective: Callable[..., Any], unless: str = "") -> Callable[..., Any]:
    """The collective, refused where its group has ranks that do not take part.

    Args:
        unless: a parameter that, when it is true, lets those that call do without the others.
    """
    signature = inspect.signature(collective)

    @wraps(collective)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        if not info.everyone():
            given = signature.bind_partial(*args, **kwargs).arguments
            if not given.get(unless):
                check(given.get("group"), f"dist.{collective.__name__}")
        return collective(*args, **kwargs)

    return guarded


def guarded_ddp(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A method of a DDP wrapper, refused where the wrapper's group has ranks that do not take part."""
    signature = inspect.signature(method)

    @wraps(method)
    def guarded(
        wrapper: Any, /, *args: Any, **kwargs: Any
    ) -> Any:  # DDP(module=…) is an argument of its own
        __tracebackhide__ = True
        if not info.everyone():
            given = signature.bind_partial(wrapper, *args, **kwargs).arguments
            check(wrapper.__dict__.get("process_group", given.get("process_group")), what)
        return method(wrapper, *args, **kwargs)

    return guarded


def check(group: Any, what: str) -> None:
    """Raises RuntimeError where `group` (the default group for None) has ranks that do not take part."""
    import torch.distributed as dist

    default = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        group = default
    if not isinstance(group, dist.ProcessGroup):  # not a member: torch has its own words
        return
    ranks, here = dist.get_process_group_ranks(group), info.participants()
    absent = sorted(set(ranks) - set(here))
    if not absent:
        return
    all_of_them, these = (rank_words(some).replace("–", " to ") for some in (ranks, here))
    raise RuntimeError(
        f"{what} waits for {all_of_them}, and only {these} {'takes' if len(here) == 1 else 'take'} part in this "
        "run: run it on all of them (f() @ pool, or a cell without --targets), or use a group of those that take part: "
        f"dist.new_group({list(here)}, use_local_synchronization=True)"
    )
