"""`Plugin`: what a framework needs on the nodes before the first cell, as one frozen value; and what it may know of a pool."""

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
    """What a plugin may know of a pool before there is one."""

    nodes: int = 1
    procs_per_node: int = 1
    accelerator: Accelerator | None = None
    gpus: int = 0
    """GPUs of each node, where that is known without their kind."""

    @property
    def cuda(self) -> bool:
        """Whether the nodes have GPUs that run CUDA programs."""
        return self.gpus > 0 if self.accelerator is None else self.accelerator.cuda


@dataclass(frozen=True, repr=False)
class Plugin:
    """One framework's needs; a hook that is not given does nothing.

    Attributes:
        name: unique in a pool.
        transform: ``(image, cluster) -> image``: add packages and variables, with ``image.replace``. The notebook
            calls it while planning, on every plan, so it must be pure; twice is safe.
        bootstrap: ``(cluster) -> commands``: shell commands that run on each new node after its packages are there.
            Called while planning, like `transform`; a node that is used again skips them.
        around_app: ``(info) -> context manager``: entered once in each rank's process before its first cell, left when
            the process is stopped, in the reverse order of plugins. Never twice in a process. What it raises fails
            the pool's start with that error.
        around_client: ``(pool) -> context manager``: entered in the notebook when the pool is ready, left when it
            goes, also on errors. Once for each pool; two pools may be open at once.
        release: frees the rank's main thread from a blocked collective; returns how many things it closed. Called on
            another thread, at any moment, also before `around_app` and twice.
        rejoin: ``(info) -> notes``: form anew what `release` broke, with all ranks of the pool; a sentence for each
            thing that could not be carried over. Called between cells, any number of times. When it raises, this rank is
            started anew, the others are let out by `release`, and it is called again. None where a process can join
            only once: then all ranks are started anew when one of them has died. It waits for other ranks in
            ``with rendezvous.waiting()`` (`skymagic.runtime`): a rank that sleeps elsewhere, while others wait for it, counts as hanging
            after some seconds.
        settle: ``() -> notes``: put in order what a failed cell has left half-done where nobody had to be freed, on all ranks
            of the pool; a sentence for each thing that the user must know. Called between cells. When it raises, `rejoin`
            follows. None where there is nothing to do.
        around_run: ``() -> context manager``: entered around each cell of a rank, when `runtime.participants` says who
            takes part. It must cost microseconds.
        joined: whether what `around_app` set up is still there; asked after each cell.
        collectives: how many collectives this rank has begun, None where nobody counts. Called on any thread, at any moment.
        sequence: the same for each group of this rank, under names that are the same on all its members: where they differ
            after a failed cell, the next collective would never match, and `rejoin` follows.
        preload: modules that each node imports once, before it forks its ranks. Importing them must start no thread
            and touch no GPU.
        before: names of plugins whose `around_app` must come later than this one's, whatever the user's order.
        needs: names of plugins that are set up too, without options, where the user has not named them; before this one.
        options: what the factory was called with, which is how a rank makes the same plugin again; None for a plugin
            that was built by hand. Never shown, for a token may be among them.
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
    options: Mapping[str, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Plugin({self.name!r})"

    @property
    def spec(self) -> PluginSpec | None:
        """What makes this plugin again elsewhere, by `load`; None for one that was built by hand."""
        return None if self.options is None else PluginSpec(self.name, self.options)
