"""PyTorch: the right wheels, one process group per pool, and DDP wrappers that survive failures."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from skymagic.plan.image import LATEST
from skymagic.plan.units import duration
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime.info import InstanceInfo

if TYPE_CHECKING:
    from skymagic.plan.image import Image
    from skymagic.plugins._torch.groups import Group

PRELOAD = (
    "torch",
    "torch.distributed",
    # Its functions capture the group that exists when it is imported.
    "torch.distributed.nn.functional",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.optim",
)
WHEELS = "https://download.pytorch.org/whl/"
DEFAULT_CUDA = "cu128"
"""Index that stands for "any CUDA". On other machines uv takes the one that fits the driver."""


def torch(
    backend: str | None = None,
    cuda: str | None = None,
    version: str | None = None,
    vision: str | None = None,
    audio: str | None = None,
    timeout: str | None = None,
) -> Plugin:
    """Install PyTorch and form its process group on every rank before the first cell.

    Args:
        backend: ``"nccl"``, ``"gloo"``, ``"cpu:gloo,cuda:nccl"``, another one of torch, or None for
            one that serves all tensors: gloo on CPUs; on GPUs NCCL, or gloo if ranks share a GPU or
            have a part of one (MIG).
        cuda: suffix of the wheel index for pools with CUDA GPUs (``"cu126"``); None for the one
            that fits each node's driver.
        version: None for the notebook's version, ``"latest"``, a version (``"2.3.0"`` means
            ``==2.3.0``) or a constraint (``">=2.3"``).
        vision: the same for torchvision; None omits it, and ``"latest"`` is the one that fits
            torch's `version`.
        audio: the same for torchaudio.
        timeout: maximum duration of a collective, such as ``"30m"``; None for torch's own 30
            minutes (10 with ``backend="nccl"``).
    """
    versions = {"torch": version, "torchvision": vision, "torchaudio": audio}
    requested = {
        name: text for name, text in versions.items() if text is not None or name == "torch"
    }
    # The newest torchvision would need another torch than the notebook's.
    if version is None:
        requested = {name: None if text == "latest" else text for name, text in requested.items()}
    packages = tuple(name + constraint(text) for name, text in requested.items())

    def transform(image: Image, cluster: Cluster) -> Image:
        index = WHEELS + ((cuda or DEFAULT_CUDA) if cluster.cuda else "cpu")
        return image.replace(pip=(*image.pip, *packages), pip_indexes=(*image.pip_indexes, index))

    return replace(
        group_plugin("torch", backend, None if timeout is None else duration(timeout)),
        transform=transform,
        preload=PRELOAD,
    )


def constraint(text: str | None) -> str:
    """Return a version as pip wants it after a name.

    It is "" for the notebook's version, and a bare version gets ``==``.
    """
    if text is None:
        return ""
    if text == "latest":
        return LATEST
    return f"=={text}" if re.match(r"\d", text) else text


def group_plugin(name: str, backend: str | None, timeout: float | None = None) -> Plugin:
    """Return a plugin with the hooks of one rank's process group.

    Args:
        timeout: seconds that its collectives may take; None for torch's default.
    """
    groups: list[Group] = []

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        from skymagic.plugins._torch import unblock

        unblock.set_variables()
        import torch

        from skymagic.plugins import _reports
        from skymagic.plugins._torch import devices, launched
        from skymagic.plugins._torch.groups import Group

        launched.adapt_libraries()
        _reports.adapt_transformers()
        _reports.adapt_lightning()
        posted = devices.take()
        devices.watch()
        if not posted.gpu and not torch.accelerator.is_available():
            # Without this, accelerate, and Trainer through it, ignore a CPU-only group, and each
            # rank trains separately.
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        group = Group(backend, None if timeout is None else timedelta(seconds=timeout), posted)
        groups.append(group)
        with group.patched():
            group.join(info)
            try:
                yield
            finally:
                groups.clear()
                group.leave()

    return Plugin(
        name=name,
        around_app=around_app,
        collectives=lambda: groups[0].collectives() if groups else None,
        sequence=lambda: groups[0].sequence() if groups else {},
        release=lambda: sum(group.free() for group in groups),
        rejoin=lambda info: [note for group in groups for note in group.reform(info)],
        settle=lambda: [note for group in groups for note in group.settle()],
        joined=lambda: not groups or groups[0].is_formed(),
    )
