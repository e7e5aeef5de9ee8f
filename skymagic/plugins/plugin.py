"""`Plugin`: the hooks of a framework as one frozen value, and `Cluster`: the pool being planned.

On a rank, `active_plugins` lists the plugins that are set up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymagic.plan.accelerators import Accelerator
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec
from skymagic.runtime.info import InstanceInfo


@dataclass(frozen=True)
class Cluster:
    """Properties of a pool that a plugin may use before the pool exists."""

    nodes: int = 1
    procs_per_node: int = 1
    accelerator: Accelerator | None = None
    gpus: int = 0
    """GPUs of each node, if their number is known but not their kind."""

    @property
    def cuda(self) -> bool:
        """Whether the nodes have GPUs that run CUDA programs."""
        return self.gpus > 0 if self.accelerator is None else self.accelerator.cuda


@dataclass(frozen=True, repr=False)
class Plugin:
    """Hooks that set up one framework. A hook that is not given does nothing.

    Attributes:
        name: unique in a pool.
        transform: ``(image, cluster) -> image``: add packages and variables with ``image.replace``.
            The notebook calls it while planning, on every plan, so it must be pure. Calling it
            twice is safe.
        bootstrap: ``(cluster) -> commands``: shell commands that run on each new node after its
            packages are installed. Called while planning, like `transform`. A reused node skips
            them.
        around_app: ``(info) -> context manager``: entered once in each rank's process before its
            first cell, and left when the process is stopped, in the reverse order of plugins. Never
            entered twice in a process. An exception fails the start of the pool.
        around_client: ``(pool) -> context manager``: entered in the notebook when the pool is
            ready, and left when it goes away, also on errors. Once per pool; two pools may be open
            at once.
        release: free the rank's main thread from a blocked collective, and return how many things
            were closed. Called on another thread, at any time, even before `around_app` and twice.
        rejoin: ``(info) -> notes``: form again what `release` broke, with all ranks of the pool.
            Returns a sentence for each thing that could not be carried over. Called between cells,
            any number of times. If it raises, this rank is restarted, `release` frees the others,
            and it is called again. None if a process can join only once: then all ranks are
            restarted when one of them has died. Wait for other ranks in ``with
            rendezvous.waiting()`` (`skymagic.runtime`): a rank that blocks elsewhere while others
            wait for it counts as hanging after some seconds.
        settle: ``() -> notes``: clean up what a failed cell left half-done if nobody had to be
            freed, on all ranks of the pool. Returns a sentence for each thing that the user must
            know. Called between cells. If it raises, `rejoin` follows. None if there is nothing to
            do.
        around_run: ``() -> context manager``: entered around each cell of a rank, when
            `runtime.participants` knows which ranks take part. It must cost only microseconds.
        joined: whether what `around_app` set up still exists; called after each cell.
        collectives: number of collectives that this rank has started; None if nobody counts them.
            Called on any thread, at any time.
        sequence: the same number for each group of this rank, under names that are equal on all its
            members. If the numbers differ after a failed cell, the next collective would never
            match, so `rejoin` follows.
        preload: modules that each node imports once, before it forks its ranks. Importing them must
            not start threads or use a GPU.
        before: names of plugins whose `around_app` must run after this one's, whatever the user's
            order.
        needs: names of plugins that are added before this one, without options, unless the user has
            named them.
        options: arguments of the factory call, with which a rank creates the same plugin again;
            None for a plugin that was built by hand. Never shown, because a token may be among
            them.
    """

    name: str
    transform: Callable[[Image, Cluster], Image] = lambda image, cluster: image
    bootstrap: Callable[[Cluster], Sequence[str]] = lambda cluster: ()
    around_app: Callable[[InstanceInfo], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )
    around_client: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    release: Callable[[], int] = lambda: 0
    rejoin: Callable[[InstanceInfo], Sequence[str]] | None = lambda info: ()
    around_run: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    settle: Callable[[], Sequence[str]] | None = None
    joined: Callable[[], bool] = lambda: True
    collectives: Callable[[], int | None] = lambda: None
    sequence: Callable[[], Mapping[str, int]] = dict
    preload: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    options: Mapping[str, object] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Plugin({self.name!r})"

    @property
    def spec(self) -> PluginSpec | None:
        """Specification for `load` to create this plugin again; None if it was built by hand."""
        return None if self.options is None else PluginSpec(self.name, self.options)


active_plugins: list[Plugin] = []
"""Plugins that are set up in this rank's process, in hook order; empty in other processes."""
