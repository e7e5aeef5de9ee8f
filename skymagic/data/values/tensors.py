"""Pickle torch tensors by their storages, from any device, onto the CPU.

torch is never imported just to pickle a value: it is used only if the value itself has loaded it.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from functools import lru_cache
from operator import attrgetter
from typing import Any

from skymagic.content.device import DeviceBytes, placeholder_buffer
from skymagic.data.values import hooks
from skymagic.data.values.memory import (
    SMALL,
    MemoryBlock,
    MemoryRegion,
    Reduced,
    Span,
    Storage,
    Tracker,
    memory,
    writable,
)
from skymagic.data.values.rebuild import same


def reduce_tensor(tracker: Tracker, tensor: Any) -> Reduced:
    """Reduce a tensor with its gradient and its hooks.

    A tensor that is part of a computation is detached, or refused if the tracker accepts leaves
    only.
    """
    if not tensor.is_leaf:
        if tracker.leaves_only:
            made_by = type(tensor.grad_fn).__name__
            raise pickle.PicklingError(
                f"a tensor in it is part of a computation ({made_by}): pass tensor.detach()"
            )
        tensor = tensor.detach()
    reduced = _reduce(tracker, tensor)
    grad = tensor.grad if tensor.requires_grad else None
    # Checked inline, without a call: a state dict has thousands of tensors, and few have hooks.
    has_hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    if grad is None and not has_hooks:
        return reduced
    registered = hooks.tensor_hooks(tensor) if has_hooks else {}
    if grad is None and not registered:
        return reduced
    # torch's own reduction sets a state already, so there is no place for hooks or a gradient.
    if len(reduced) > 2:
        if registered:
            raise pickle.PicklingError(
                f"a {type(tensor).__name__} in it has hooks, which cannot travel with it: "
                "register them in the cell"
            )
        return reduced
    # The short hash of a small tensor covers neither its gradient nor its hooks.
    tracker.leaves.pop(id(tensor), None)
    if registered:  # in the state, not the arguments: a hook may refer to its tensor
        return *reduced, (grad, registered), None, None, _set_grad_and_hooks
    return *reduced, grad, None, None, _set_grad


def _set_grad(tensor: Any, grad: Any) -> None:
    tensor.grad = grad


def _set_grad_and_hooks(tensor: Any, parts: tuple[Any, hooks.HooksByAttribute]) -> None:
    tensor.grad, registered = parts
    hooks.set_tensor_hooks(tensor, registered)


def _reduce(tracker: Tracker, tensor: Any) -> Reduced:
    """Reduce a tensor to a view of its storage, or let torch reduce it if it is of another kind."""
    if (
        is_plain(tensor)
        and tracker.layout is None
        and not tracker.linked.storages
        and tensor.numel()
    ):
        return _reduce_plain(tracker, tensor)
    torch = sys.modules["torch"]
    reduced = hooks.without_warning(tensor)
    if reduced[0] is torch._utils._rebuild_tensor_v2:
        typed, offset, size, stride, *remaining = reduced[1]
        rebuild, dtype, untyped = _tensor, typed.dtype, typed._untyped_storage
    elif reduced[0] is torch._utils._rebuild_tensor_v3:
        # Used for dtypes that have no typed storage: uint16, float8, …
        untyped, offset, size, stride, requires_grad, no_hooks, dtype, *metadata = reduced[1]
        rebuild, remaining = _untyped_tensor, [requires_grad, no_hooks, dtype, *metadata]
    else:
        return reduced
    storage = _canonical(tracker, untyped)
    if storage.device.type != "cpu":
        # Version counters show changes without a copy of the device's memory.
        tracker.versions.setdefault(storage._cdata, []).append(version(tensor))
    target: Any = storage
    if storage.nbytes() and tensor.numel() and storage.data_ptr():
        first = storage.data_ptr() + offset * tensor.element_size()
        stop = first + extent_of(size, stride) * tensor.element_size()
        linked_storage, start, end = tracker.linked.storages.get(storage._cdata, (None, 0, 0))
        # The other side already has this memory: refer to its storage.
        if linked_storage is not None and start <= first and stop <= end:
            return rebuild, (
                linked_storage,
                dtype,
                (first - start) // tensor.element_size(),
                tuple(size),
                tuple(stride),
                *remaining,
            )
        # The first pass records spans. The second pass follows the layout planned from them, in
        # which overlapping memory is one block.
        full = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        tracker.spans.append(Span(first, stop, storage._cdata, full))
        block = tracker.layout.find(first, stop) if tracker.layout is not None else None
        if block is not None and tracker.layout is not None:
            target = tracker.layout.storages.setdefault(storage._cdata, Storage(block))
            offset = (first - block.start) // tensor.element_size()
    return rebuild, (target, dtype, offset, tuple(size), tuple(stride), *remaining)


def is_plain(tensor: Any) -> bool:
    """Return True for a strided CPU tensor of plain numbers, ignoring its gradient and hooks.

    A cheap check: torch's own code takes 30 µs to find out.
    """
    kinds, strided, dtypes, has_names = _of_torch()
    return (
        type(tensor) in kinds
        and tensor.is_cpu
        and tensor.layout is strided
        and tensor.dtype in dtypes
        # Negation and conjugation may be bits of the tensor: its memory holds other numbers.
        and not (tensor.__dict__ or tensor.is_neg() or tensor.is_conj())
        and not (has_names is not None and has_names(tensor))
    )


_FACTS = attrgetter("shape", "dtype", "requires_grad", "layout", "is_leaf", "is_cpu", "__dict__")
_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def describe(tensors: list[Any]) -> tuple[list[int], list[int], list[Any]] | None:
    """Return address, length in bytes and other facts of many tensors at once.

    Return None unless all are plain and contiguous, and have neither gradients nor hooks.
    """
    kinds, strided, dtypes, has_names = _of_torch()
    tensor = kinds[0]
    facts = list(map(_FACTS, tensors))
    if (
        any(
            layout is not strided or dtype not in dtypes or not is_leaf or not is_cpu or attributes
            for _, dtype, _, layout, is_leaf, is_cpu, attributes in facts
        )
        or not all(map(tensor.is_contiguous, tensors))
        or any(map(tensor.is_neg, tensors))
        or any(map(tensor.is_conj, tensors))
        or any(hooks != (None, None) for hooks in map(_HOOKS, tensors))
        or any(one.grad is not None for one in tensors if one.requires_grad)
        or (has_names is not None and any(map(has_names, tensors)))
    ):
        return None
    addresses, sizes = map(tensor.data_ptr, tensors), map(attrgetter("nbytes"), tensors)
    return list(addresses), list(sizes), [fact[:3] for fact in facts]


@lru_cache(maxsize=1)
def _of_torch() -> tuple[Any, ...]:
    """Return plain tensor classes, their layout, their dtypes, and the check for named dimensions.

    The check is None from torch 2.13 on.
    """
    import torch

    names = (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
    dtypes = frozenset(getattr(torch, name) for name in (*names, "complex64", "complex128"))
    return (
        (torch.Tensor, torch.nn.Parameter),
        torch.strided,
        dtypes,
        getattr(torch.Tensor, "has_names", None),
    )


def _reduce_plain(tracker: Tracker, tensor: Any) -> Reduced:
    """Reduce a plain tensor without torch's `__reduce_ex__`.

    A state dict has thousands of them, so the shortcut pays off.
    """
    storage, facts = tensor.untyped_storage(), tracker.facts
    storage = tracker.storages.setdefault(storage._cdata, storage)
    offset, dtype, itemsize, kind = (
        tensor.storage_offset(),
        tensor.dtype,
        tensor.itemsize,
        type(tensor).__name__,
    )
    size, stride, requires_grad = tuple(tensor.size()), tensor.stride(), tensor.requires_grad
    # Equal tuples become one object, which the pickle contains once.
    size, stride = facts.setdefault(size, size), facts.setdefault(stride, stride)
    start = storage.data_ptr()
    first = start + offset * itemsize
    contiguous = tensor.is_contiguous()
    stop = first + (tensor.numel() if contiguous else extent_of(size, stride)) * itemsize
    tracker.spans.append(Span(first, stop, storage._cdata, (start, start + storage.nbytes())))
    if contiguous and stop - first < SMALL:
        tracker.leaves[id(tensor)] = first, stop, small_tensor(kind, dtype, size, requires_grad)
    rebuild = _plain_tensor if kind == "Tensor" else _plain_parameter
    return rebuild, (storage, dtype, offset, size, stride, requires_grad)


def small_tensor(
    kind: str, dtype: Any, size: tuple[int, ...], requires_grad: bool
) -> tuple[Any, ...]:
    """Return the part of a small tensor's content hash that precedes its elements."""
    return "small tensor", kind, _dtype_name(dtype), size, requires_grad


_dtype_name = lru_cache(maxsize=None)(str)


def extent_of(size: Any, stride: Any) -> int:
    """Return the number of elements from the first to the last one in memory."""
    return int(sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + 1)


def _plain_tensor(
    storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> Any:
    import torch

    tensor = torch.empty((0,), dtype=dtype, device=storage.device).set_(
        storage, offset, size, stride
    )
    if requires_grad:
        tensor.requires_grad = True
    return tensor


def _plain_parameter(
    storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> Any:
    import torch

    return torch.nn.Parameter(
        _plain_tensor(storage, dtype, offset, size, stride, False), requires_grad
    )


def reduce_typed(tracker: Tracker, storage: Any) -> Reduced:
    """Reduce a `TypedStorage`, which other kinds of tensors still hold."""
    untyped = _canonical(tracker, storage._untyped_storage)
    # A typed storage gives access to all its bytes, so it must not be cut.
    tracker.whole.add(untyped._cdata)
    return _typed, (untyped, storage.dtype)


def reduce_block(tracker: Tracker, block: MemoryBlock) -> Reduced:
    """Reduce a block to its bytes.

    For a block in a device's storage, copy only that part to the CPU.
    """
    storage = tracker.storages.get(block.owner)
    if storage is None or storage.device.type == "cpu":
        return writable, (memory(block.start, block.stop),)
    first = storage.data_ptr()
    return writable, (
        _on_its_device(tracker, storage, max(block.start - first, 0), block.stop - first),
    )


def reduce_untyped(tracker: Tracker, storage: Any) -> Reduced:
    """Reduce a storage on any device to its bytes, which arrive on the CPU."""
    canonical = _canonical(tracker, storage)
    # Another Python object for the same storage, whose bytes travel once.
    if canonical is not storage:
        return same, (canonical,)
    if storage.device.type != "cpu":
        # Another rank puts the storage on its own device; in the notebook it stays on the CPU.
        buffer = _on_its_device(tracker, storage, 0, storage.nbytes()) if storage.nbytes() else b""
        return (
            (_device_storage, (buffer, storage.device.type))
            if tracker.between_ranks
            else (_storage, (buffer,))
        )
    if not storage.nbytes():
        return _storage, (b"",)
    start, nbytes = storage.data_ptr(), storage.nbytes()
    return _storage, (
        # Small storages stay in the pickle stream.
        ctypes.string_at(start, nbytes) if nbytes < SMALL else memory(start, start + nbytes),
    )


def _on_its_device(tracker: Tracker, storage: Any, start: int, stop: int) -> pickle.PickleBuffer:
    """Return a reference to bytes of a device's storage.

    They are copied to the host only when the pickle's buffers are written.
    """
    torch = sys.modules["torch"]
    all_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return placeholder_buffer(
        DeviceBytes(all_bytes[start:stop], tracker.versions.setdefault(storage._cdata, []))
    )


def on_host(tensor: Any) -> Any:
    """Return a tensor in host memory: the same tensor if it is already there."""
    torch = sys.modules["torch"]
    if tensor.device.type == "cpu":
        return tensor
    # The memory of a lazily conjugated or negated tensor holds other numbers.
    plain = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    copy = DeviceBytes(plain.view(torch.uint8), []).read()
    flat = torch.frombuffer(copy, dtype=torch.uint8) if copy else torch.empty(0, dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape)


def version(tensor: Any) -> int | None:
    """Return torch's in-place version counter, which tensors with the same memory share.

    Inference tensors have none: return None for them.
    """
    return None if tensor.is_inference() else int(tensor._version)


def _canonical(tracker: Tracker, storage: Any) -> Any:
    """Return one Python object per storage: torch may create a new one at each access."""
    return tracker.storages.setdefault(storage._cdata, storage)


def reduce_planned(tracker: Tracker, storage: Storage) -> Reduced:
    """Reduce a storage that travels as a block."""
    owner = tracker.storages.get(storage.block.owner)
    if owner is not None and owner.device.type != "cpu" and tracker.between_ranks:
        return _device_storage, (storage.block, owner.device.type)
    return _storage, (storage.block,)


def regions(tracker: Tracker) -> dict[int, MemoryRegion]:
    """Return the memory of the storages seen in a pickling pass, by their handles."""
    planned = {} if tracker.layout is None else tracker.layout.storages
    regions_by_handle = {}
    for handle, storage in tracker.storages.items():
        if handle in planned:
            block = planned[handle].block
            regions_by_handle[handle] = MemoryRegion(planned[handle], block.start, block.stop)
        elif hasattr(storage, "_cdata") and storage._cdata == handle and storage.nbytes():
            regions_by_handle[handle] = MemoryRegion(
                storage, storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            )
    return regions_by_handle


def _storage(buffer: Any) -> Any:
    import torch

    view = writable(buffer)
    # `torch.frombuffer` refuses an empty buffer.
    return (
        torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        if view.nbytes
        else torch.UntypedStorage(0)
    )


def _device_storage(buffer: Any, kind: str) -> Any:
    """Return the storage on this rank's device of the given kind."""
    return _storage(buffer).to(device=sys.modules["torch"].device(kind))


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor(storage: Any, dtype: Any, *options: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v2(_typed(storage, dtype), *options)


def _untyped_tensor(storage: Any, dtype: Any, *options: Any) -> Any:
    import torch

    # torch requires a typed storage here too, but uses only its bytes.
    return torch._utils._rebuild_tensor_v3(_typed(storage, torch.uint8), *options)
