"""PyTorch: the right wheels, one process group per pool, and DDP wrappers that outlive a failure."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
    "torch.distributed.nn.functional",  # its functions take hold of the group that is there when it is imported
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.optim",
)
WHEELS = "https://download.pytorch.org/whl/"
DEFAULT_CUDA = "cu128"
"""The index that stands for "any CUDA": on other machines uv takes the one that fits the driver."""


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
        backend: ``"nccl"``, ``"gloo"``, ``"cpu:gloo,cuda:nccl"``, another that torch knows, or None for the one that serves all tensors:
            gloo for those on CPUs; for those on GPUs NCCL, or gloo where ranks share a GPU or have a part of one (MIG).
        cuda: suffix of the wheel index for pools with CUDA GPUs (``"cu126"``); None for the one that fits each node's
            driver.
        version: None for the notebook's, ``"latest"``, a version (``"2.3.0"`` means ``==2.3.0``) or a constraint
            (``">=2.3"``).
        vision, audio: torchvision and torchaudio, likewise; None leaves one out, ``"latest"`` is what fits the torch that
            `version` says.
        timeout: how long a collective may take, as ``"30m"``; None for torch's own 30 minutes (10 with ``backend="nccl"``).
    """
    wanted = {"torch": version, "torchvision": vision, "torchaudio": audio}
    asked = {name: text for name, text in wanted.items() if text is not None or name == "torch"}
    if version is None:  # the newest torchvision would want another torch than the notebook's
        asked = {name: None if text == "latest" else text for name, text in asked.items()}
    packages = tuple(name + constraint(text) for name, text in asked.items())

    def transform(image: Image, cluster: Cluster) -> Image:
        index = WHEELS + ((cuda or DEFAULT_CUDA) if cluster.cuda else "cpu")
        return image.replace(pip=(*image.pip, *packages), pip_indexes=(*image.pip_indexes, index))

    return Plugin(
        name="torch",
        transform=transform,
        preload=PRELOAD,
        **hooks(backend, None if timeout is None else duration(timeout)),
    )


def constraint(text: str | None) -> str:
    """A version as pip wants it behind a name: nothing for the notebook's, ``==`` before a bare version."""
    if text is None:
        return ""
    if text == "latest":
        return LATEST
    return f"=={text}" if re.match(r"\d", text) else text


def hooks(backend: str | None, timeout: float | None = None) -> dict[str, Any]:
    """The hooks of one rank's process group; its collectives may take `timeout` seconds."""
    made: list[Group] = []

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
            # without it accelerate, and Trainer with it, leave a group on CPUs alone, and each rank trains for itself
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        group = Group(backend, None if timeout is None else timedelta(seconds=timeout), posted)
        made.append(group)
        with group.patched():
            group.join(info)
            try:
                yield
            finally:
                made.clear()
                group.leave()

    return {
        "around_app": around_app,
        "collectives": lambda: made[0].collectives() if made else None,
        "sequence": lambda: made[0].sequence() if made else {},
        "release": lambda: sum(group.free() for group in made),
        "rejoin": lambda info: [note for group in made for note in group.reform(info)],
        "settle": lambda: [note for group in made for note in group.settle()],
        "joined": lambda: not made or made[0].is_formed(),
    }
