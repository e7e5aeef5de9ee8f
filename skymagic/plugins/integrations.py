"""Decorators that set up a framework for one function, such as ``@sky.integrations.torch``.

They are written below ``@sky.function``, and do the same as the pool's plugin of that name, for
pools created without it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, overload

from skymagic.plugins.plugin import Plugin, active_plugins
from skymagic.runtime import info as runtime
from skymagic.runtime.info import InstanceInfo
from skymagic.runtime.on_import import wraps


@overload
def torch(function: Callable[..., Any], /) -> Callable[..., Any]: ...
@overload
def torch(*, backend: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def torch(function: Callable[..., Any] | None = None, /, *, backend: str | None = None) -> Any:
    """Run a function inside a process group of the ranks that take part in its run.

    The group is formed before the function and destroyed after it. On a pool with the torch plugin,
    the pool's own group is used. Outside a pool the function simply runs.

    Args:
        function: the function to decorate.
        backend: ``"nccl"``, ``"gloo"``, ``"cpu:gloo,cuda:nccl"``, …; None for the one that fits the
            ranks' devices.

    Raises:
        TypeError: this is not a function, or it is already lazy: ``@sky.function`` must be above.
    """
    if function is None:
        return functools.partial(_in_group, backend=backend)
    return _in_group(function, backend=backend)


def _in_group(function: Callable[..., Any], *, backend: str | None) -> Callable[..., Any]:
    if getattr(function, "__sky_lazy__", False):
        raise TypeError(
            "@sky.function must be outermost: write it above @sky.integrations.torch, not below"
        )
    if inspect.isclass(function) or not callable(function):
        raise TypeError(f"@sky.integrations.torch decorates a function, not {function!r}")

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # IPython hides this frame in tracebacks.
        __tracebackhide__ = True
        with process_group(backend) if runtime.on_a_rank() else contextlib.nullcontext():
            return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def process_group(backend: str | None = None) -> Iterator[None]:
    """Form a default process group of the ranks that take part in the run, on a rank.

    Like the pool's own group, it is freed when a rank fails.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    from skymagic.plugins._torch.plugin import group_plugin
    from skymagic.runtime import rendezvous

    info = position_among(runtime.participants(), runtime.instance_info())
    group = group_plugin("integrations.torch", backend)
    with rendezvous.key_prefix(f"run {runtime.run_number()}"):
        # A rank's group that others wait in is found through this plugin. It is not formed again,
        # because the function is over by then.
        plugin = Plugin("integrations.torch", release=group.release, collectives=group.collectives)
        active_plugins.append(plugin)
        try:
            with group.around_app(info):
                if info.rank == 0:
                    rendezvous.delete("torch")
                yield
        finally:
            active_plugins.remove(plugin)


def position_among(ranks: tuple[int, ...], info: InstanceInfo) -> InstanceInfo:
    """Return this process's position among some ranks of its pool. The first rank is the head."""
    per_node = info.local_world_size
    on_node = [rank for rank in ranks if rank // per_node == info.node]
    addresses = {peer.node: peer.addr for peer in info.peers}
    head = ranks[0] // per_node
    return replace(
        info,
        rank=ranks.index(info.rank),
        world_size=len(ranks),
        head_addr=addresses.get(head, info.head_addr),
        local_rank=on_node.index(info.rank),
        local_world_size=len(on_node),
    )
