"""How the memory of arrays and tensors travels: out of band, without a copy, and shared where it was shared.

numpy and torch are never imported here, only used when the value itself has brought them in.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SMALL = 16 << 10
"""Buffers below this many bytes stay in the pickle."""

_ALIGN = 16
_WASTE = 0.9
"""A storage of which the tensors in a value use less than this part is cut to the part in use."""


@dataclass(frozen=True)
class Span:
    """Memory that a value uses: addresses, and what owns them."""

    start: int
    stop: int
    owner: int
    """Identity of the array, or the storage's handle."""
    whole: tuple[int, int] | None = None
    """A torch storage's full range; None for an array."""


@dataclass(frozen=True, eq=False)
class Block:
    """Memory that several objects of one value look at; it travels once and they stay views of it."""

    start: int
    stop: int
    owner: int
    """Of its first span; the handle of the storage when it lies on a device."""


@dataclass(frozen=True, eq=False)
class Storage:
    """A torch storage that consists of a block."""

    block: Block


@dataclass
class Layout:
    """Which memory of a value must travel as common blocks."""

    blocks: Sequence[Block]
    storages: dict[int, Storage] = field(default_factory=dict)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [block.start for block in self.blocks]

    def find(self, start: int, stop: int) -> Block | None:
        """The block that covers these addresses."""
        index = bisect_right(self.starts, start) - 1
        block = self.blocks[index] if index >= 0 else None
        return block if block is not None and stop <= block.stop else None


def layout(spans: Iterable[Span], apart: frozenset[int] | set[int] = frozenset()) -> Layout | None:
    """Blocks for memory that overlaps, and for storages of which little is used; None when there are none.

    Args:
        apart: owners that stay as they are.
    """
    owners: dict[int, Span] = {}
    for span in spans:
        if span.owner in apart:
            continue
        known = owners.get(span.owner, span)
        owners[span.owner] = Span(
            min(known.start, span.start), max(known.stop, span.stop), span.owner, span.whole
        )
    blocks = []
    for cluster in clusters(list(owners.values())):
        start, stop = cluster[0].start // _ALIGN * _ALIGN, max(span.stop for span in cluster)
        if len(cluster) > 1 or _wasteful(cluster[0], stop - start):
            blocks.append(Block(start, stop, cluster[0].owner))
    return Layout(blocks) if blocks else None


def clusters(spans: list[Span]) -> list[list[Span]]:
    """Spans that overlap, together; sorted by address."""
    groups: list[list[Span]] = []
    reach = -1
    for span in sorted(spans, key=lambda span: span.start):
        if span.start < reach:
            groups[-1].append(span)
        else:
            groups.append([span])
        reach = max(reach, span.stop)
    return groups


def _wasteful(span: Span, used: int) -> bool:
    if span.whole is None:
        return False
    whole = span.whole[1] - span.whole[0]
    return whole - used > SMALL and used < whole * _WASTE


def memory(start: int, stop: int) -> pickle.PickleBuffer:
    """Raw memory by address; its owner must be kept alive by the caller."""
    return pickle.PickleBuffer((ctypes.c_ubyte * (stop - start)).from_address(start))


def writable(buffer: Any) -> memoryview:
    """The buffer itself, or a copy of one that cannot be written."""
    view = memoryview(buffer)
    return memoryview(bytearray(view)) if view.readonly else view


class Tracker:
    """What one pickling pass has learned about memory, and the layout that it follows."""

    def __init__(self, follow: Layout | None = None) -> None:
        self.layout = follow
        self.spans: list[Span] = []
        self.private: set[int] = set()
        self.whole: set[int] = set()
        self.storages: dict[int, Any] = {}


Reduced = tuple[Any, ...] | Any
Reducer = Callable[[Tracker, Any], Reduced]


def reducer_for(kind: type) -> Reducer | None:
    """How objects of this type give away their memory; None when they have none of their own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "ndarray") and issubclass(kind, numpy.ndarray):
        return reduce_array
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "UntypedStorage"):
        if issubclass(kind, torch.Tensor):
            return reduce_tensor
        if issubclass(kind, torch.UntypedStorage):
            return reduce_untyped
        if issubclass(kind, torch.TypedStorage):
            return reduce_typed
    if kind.__module__.startswith(("pandas.core.internals", "pandas._libs.internals")):
        return reduce_frame
    if kind is Block:
        return reduce_block
    if kind is Storage:
        return lambda tracker, storage: (_storage, (storage.block,))
    return None


# numpy ----------------------------------------------------------------------------------------------------------------


def reduce_array(tracker: Tracker, array: Any) -> Reduced:
    """Memory of an array as one buffer; layouts with gaps are packed first."""
    import numpy

    dtype = array.dtype
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind == "T":
        return NotImplemented
    kind = type(array)
    if kind is numpy.ma.MaskedArray:
        plain = {name: getattr(array, name) for name in ("_fill_value", "_hardmask", "_sharedmask")}
        return _masked, (array._data, array._mask, plain)
    if kind is not numpy.ndarray and kind is not numpy.memmap:
        return _reduce_subclass(array)
    described = (_dtype(dtype), array.shape)
    if array.size == 0:
        return _array, (b"", *described, "C")
    start, stop = _bounds(array)
    if id(array) not in tracker.private:
        tracker.spans.append(Span(start, stop, id(array)))
        block = tracker.layout.find(start, stop) if tracker.layout is not None else None
        if block is not None:
            return _view, (block, *described, array.strides, _address(array) - block.start)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        flat = array.view(numpy.ndarray).reshape(-1, order="A").view(numpy.uint8)
        return _array, (pickle.PickleBuffer(flat.data), *described, "C" if array.flags.c_contiguous else "F")
    if stop - start <= array.nbytes * 1.25:
        return _view, (memory(start, stop), *described, array.strides, _address(array) - start)
    packed = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return _array, (pickle.PickleBuffer(packed.data), *described, "C")


def _reduce_subclass(array: Any) -> Reduced:
    import numpy

    kind = type(array)
    if any(
        getattr(kind, name) is not getattr(numpy.ndarray, name) for name in ("__reduce__", "__reduce_ex__")
    ):
        return NotImplemented
    return _subclass, (array.view(numpy.ndarray), kind)


def _bounds(array: Any) -> tuple[int, int]:
    """First and last address of an array's elements."""
    start = stop = _address(array)
    for count, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            start += (count - 1) * stride
        else:
            stop += (count - 1) * stride
    return start, stop + array.itemsize


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _dtype(dtype: Any) -> Any:
    """The dtype, or its short name where that says everything: it pickles ten times faster."""
    return (
        dtype.str
        if dtype.kind in "biufcmMSU" and dtype.metadata is None and dtype.isbuiltin in (0, 1)
        else dtype
    )


def _array(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    import numpy

    return numpy.ndarray(shape, dtype, buffer=writable(buffer), order=order)


def _view(buffer: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
    import numpy

    view = numpy.ndarray(shape, dtype, buffer=writable(buffer), strides=strides, offset=offset)
    if any(stride == 0 and count > 1 for stride, count in zip(strides, shape, strict=True)):
        view.flags.writeable = False  # a broadcast view: writing one element would change many
    return view


def _subclass(array: Any, kind: type) -> Any:
    return array.view(kind)


def _masked(data: Any, mask: Any, plain: dict[str, Any]) -> Any:
    import numpy

    array = numpy.ma.MaskedArray(data, mask=mask, copy=False)
    vars(array).update(plain)
    return array


def _block(buffer: Any) -> memoryview:
    return writable(buffer)


# pandas ---------------------------------------------------------------------------------------------------------------


def reduce_frame(tracker: Tracker, part: Any) -> Reduced:
    """Keep a frame's arrays its own: pandas shares memory between frames only until one of them is written."""
    for block in getattr(part, "blocks", None) or (part,):
        values = getattr(block, "values", None)
        for array in (values, getattr(values, "_ndarray", None)):
            if array is not None:
                tracker.private.add(id(array))
    return NotImplemented


# torch ----------------------------------------------------------------------------------------------------------------


def reduce_tensor(tracker: Tracker, tensor: Any) -> Reduced:
    """A tensor as a view of its storage; every kind that torch rebuilds otherwise is left to torch."""
    torch = sys.modules["torch"]
    reduced = tensor.__reduce_ex__(5)
    if reduced[0] is not torch._utils._rebuild_tensor_v2:
        return reduced
    typed, offset, size, stride, *rest = reduced[1]
    storage = _canonical(tracker, typed._untyped_storage)
    place: Any = storage
    if storage.nbytes() and tensor.numel() and storage.data_ptr():
        first = storage.data_ptr() + offset * tensor.element_size()
        extent = sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + 1
        stop = first + extent * tensor.element_size()
        full = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        tracker.spans.append(Span(first, stop, storage._cdata, full))
        block = tracker.layout.find(first, stop) if tracker.layout is not None else None
        if block is not None and tracker.layout is not None:
            place = tracker.layout.storages.setdefault(storage._cdata, Storage(block))
            offset = (first - block.start) // tensor.element_size()
    return _tensor, (place, typed.dtype, offset, tuple(size), tuple(stride), *rest)


def reduce_typed(tracker: Tracker, storage: Any) -> Reduced:
    """A storage with a dtype, as torch's other kinds of tensors hold it."""
    untyped = _canonical(tracker, storage._untyped_storage)
    tracker.whole.add(untyped._cdata)
    return _typed, (untyped, storage.dtype)


def reduce_block(tracker: Tracker, block: Block) -> Reduced:
    """The bytes of a block; of a part of a device's storage, only that part comes to the CPU."""
    storage = tracker.storages.get(block.owner)
    if storage is None or storage.device.type == "cpu":
        return _block, (memory(block.start, block.stop),)
    torch = sys.modules["torch"]
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    first = storage.data_ptr()
    part = whole[max(block.start - first, 0) : block.stop - first].cpu()
    tracker.storages[id(part)] = part  # alive until it is written
    return _block, (memory(part.data_ptr(), part.data_ptr() + part.nbytes),)


def reduce_untyped(tracker: Tracker, storage: Any) -> Reduced:
    """The bytes of a storage; from whatever device, they arrive on the CPU."""
    known = _canonical(tracker, storage)
    if known is not storage:
        return _same, (known,)
    if storage.device.type != "cpu":
        storage = storage.cpu()
        tracker.storages[id(storage)] = storage
    if not storage.nbytes():
        return _storage, (b"",)
    start = storage.data_ptr()
    return _storage, (memory(start, start + storage.nbytes()),)


def _canonical(tracker: Tracker, storage: Any) -> Any:
    """One Python object for each storage: torch may make a new one at each access."""
    return tracker.storages.setdefault(storage._cdata, storage)


def _same(value: Any) -> Any:
    return value


def _storage(buffer: Any) -> Any:
    import torch

    view = writable(buffer)
    return (
        torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        if view.nbytes
        else torch.UntypedStorage(0)
    )


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor(storage: Any, dtype: Any, *rest: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v2(_typed(storage, dtype), *rest)
