"""The GPU of a rank: one number, by its place among the ranks of its node; and what the others are told of it."""

from __future__ import annotations

import os
from typing import Any

from skymagic.plugins._torch.backends import Posted
from skymagic.runtime import info
from skymagic.wire.processes import boot_id


def number() -> int | None:
    """This rank's GPU as its process counts them; None without one. CUDA is not initialised by it."""
    import torch

    if not torch.cuda.is_available():
        return None
    # not the place in a run of some ranks: a process keeps its GPU
    mine = info.instance_info().gpus_of_rank(torch.cuda.device_count())
    return mine[0] if len(mine) else None


def take() -> Posted:
    """Make this rank's GPU the current device of its main thread.

    Raises:
        RuntimeError: the pool has GPUs and this process cannot use them, in words.
    """
    import torch

    machine, cuda = boot_id(), str(torch.version.cuda or "")
    mine = number()
    if mine is None:
        if info.instance_info().accelerators:
            raise RuntimeError(_unusable(torch, cuda))
        return Posted(machine, cuda=cuda)
    torch.cuda.set_device(mine)
    return Posted(machine, uuid(mine), torch.cuda.get_device_name(mine), cuda)


def uuid(device: int) -> str:
    """Of a device of this process, as nvidia-smi writes it. Of a part of a GPU (MIG) it is the part's, which CUDA may give as the GPU's."""
    import torch

    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device < len(words) and words[device].startswith(("GPU-", "MIG-")):
        return words[device]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _unusable(torch: Any, cuda: str) -> str:
    if not cuda:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA, and the pool has GPUs: install a build for CUDA on the nodes, or take "
            "CPUs (--gpu none)"
        )
    try:
        torch.cuda.init()
        why = "none is visible"
    except Exception as problem:
        why = str(problem).partition("\n")[0]
    return f"CUDA {cuda} of PyTorch {torch.__version__} cannot use this node's GPUs ({why}): update the driver, or take CPUs (--gpu none)"
