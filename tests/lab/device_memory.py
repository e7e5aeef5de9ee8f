"""Stand-in memory of a GPU: tensors of the CPU that say that they are CUDA's, and count what is copied to the host.

What they stand in for is where bytes lie, and nothing else: pinned buffers and streams are left out, as for devices that have none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

DEVICE = torch.device("cuda", 0)


@dataclass
class DeviceMemory:
    """Which storages are on the device, and the bytes that have been copied from there."""

    copied: int = 0
    _keep: list[Any] = field(default_factory=list)
    _storages: set[int] = field(default_factory=set)

    def put(self, *tensors: torch.Tensor) -> None:
        """These tensors are on the device from now on."""
        for tensor in tensors:
            self._keep.append(tensor.untyped_storage())
            self._storages.add(tensor.untyped_storage()._cdata)

    def put_module(self, module: torch.nn.Module) -> None:
        """A model's parameters and buffers, with their gradients."""
        tensors = [*module.parameters(), *module.buffers()]
        self.put(*tensors, *(each.grad for each in tensors if each.grad is not None))

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def since(self) -> int:
        """Bytes copied since it was asked last."""
        copied, self.copied = self.copied, 0
        return copied


@contextmanager
def device_memory() -> Iterator[DeviceMemory]:
    """Inside, memory may say that it is on a GPU."""
    memory = DeviceMemory()
    empty, copy, to_host = torch.empty, torch.Tensor.copy_, torch.Tensor.cpu
    real = torch.Tensor.device

    def device(tensor: torch.Tensor) -> torch.device:
        return DEVICE if memory.has(tensor) else real.__get__(tensor)

    def copy_(
        target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if memory.has(source) and not memory.has(target):
            memory.copied += source.nbytes
        return copy(target, source)

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if not memory.has(tensor):
            return to_host(tensor)
        memory.copied += tensor.nbytes
        return tensor.detach().clone()

    def whole_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        memory.copied += storage.nbytes()
        raw = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).untyped_storage()

    def on_host(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    place = property(
        lambda storage: DEVICE if storage._cdata in memory._storages else torch.device("cpu")
    )
    with (
        patch.object(torch.UntypedStorage, "device", place),
        patch.object(torch.UntypedStorage, "cpu", whole_storage),
        patch.object(torch.Tensor, "device", property(device)),
        patch.object(torch.Tensor, "is_cpu", property(lambda tensor: device(tensor).type == "cpu")),
        patch.object(torch.Tensor, "copy_", copy_),
        patch.object(torch.Tensor, "cpu", cpu),
        patch.object(torch, "empty", on_host),
    ):
        yield memory
