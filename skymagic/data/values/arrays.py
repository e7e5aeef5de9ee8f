"""Memory of NumPy arrays and pandas frames, and memory-mapped files.

On another machine a map of a file becomes an array with its contents.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from skymagic.data.values import tensors
from skymagic.data.values.kinds import is_a
from skymagic.data.values.memory import (
    SMALL,
    MemoryBlock,
    Reduced,
    Span,
    Storage,
    Tracker,
    memory,
    writable,
)
from skymagic.data.values.rebuild import current_context

# Not `w+` again: it would overwrite the file.
_MODES = {"r": "r", "r+": "r+", "w+": "r+"}
"""Maps the mode of a map to the mode that another process uses to map the file again.

Copy-on-write maps are missing: their changes are in no file.
"""


def reduce_map(array: Any) -> tuple[Any, ...] | None:
    """Reduce a `numpy.memmap` to its file, for a process that sees the same files.

    Return None if the contents have to travel.
    """
    # A slice of a map has an array as its base, but NumPy gives it the offset of the whole map.
    if (
        not current_context.same_files
        or array.mode not in _MODES
        or not isinstance(array.base, mmap.mmap)
    ):
        return None
    try:
        status = Path(array.filename).stat()
    except (OSError, TypeError):  # the file was deleted, or never had a name
        return None
    order = "C" if array.flags.c_contiguous else "F"
    location = (os.fspath(array.filename), status.st_dev, status.st_ino)
    return again, (*location, array.dtype, _MODES[array.mode], array.offset, array.shape, order)


def again(
    path: str,
    device: int,
    inode: int,
    dtype: Any,
    mode: Any,
    offset: int,
    shape: tuple[int, ...],
    order: Any,
) -> Any:
    """Map a file again.

    Raises:
        FileNotFoundError: the file is missing or was replaced.
    """
    import numpy

    status = Path(path).stat()
    if (status.st_dev, status.st_ino) != (device, inode):
        raise FileNotFoundError(
            f"{path} was mapped into memory in the notebook, and has been replaced since"
        )
    return numpy.memmap(path, dtype=dtype, mode=mode, offset=offset, shape=shape, order=order)


def is_map(value: object) -> bool:
    """Return True if a value is a memory map of a file, without importing NumPy."""
    return type(value).__name__ == "memmap" and isinstance(getattr(value, "base", None), mmap.mmap)


def why_as_array(value: object) -> str:
    """Explain why a map of a file arrives as an array, where the user may not expect that.

    Return "" if the value is no map, or stays one.
    """
    if not is_map(value):
        return ""
    path = getattr(value, "filename", None) or "a file"
    if not current_context.same_files:
        return f"it maps {path}, which is on this machine"
    mode = getattr(value, "mode", None)
    return (
        "" if mode not in _MODES or reduce_map(value) else f"it maps {path}, which no longer exists"
    )


# -- NumPy arrays and pandas frames ----------------------------------------------------------------


_MAPPING = ("_mmap", "filename", "offset", "mode")
"""Attributes of a `numpy.memmap` that describe the mapped file."""

Reducer = Callable[[Tracker, Any], Reduced]


def reducer_for(kind: type) -> Reducer | None:
    """Return the reducer that handles the memory of this type's objects, or None."""
    # While another thread imports a module, it is in `sys.modules` before it has any contents.
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "ndarray") and issubclass(kind, numpy.ndarray):
        return reduce_array
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "UntypedStorage"):
        if issubclass(kind, torch.Tensor):
            return tensors.reduce_tensor
        if issubclass(kind, torch.UntypedStorage):
            return tensors.reduce_untyped
        if issubclass(kind, torch.TypedStorage):
            return tensors.reduce_typed
    if kind.__module__.startswith(("pandas.core.internals", "pandas._libs.internals")):
        return reduce_frame
    if is_a(kind, "pandas", "Index"):
        return reduce_index
    if kind is MemoryBlock:
        return tensors.reduce_block
    if kind is Storage:
        return tensors.reduce_planned
    return None


def reduce_array(tracker: Tracker, array: Any) -> Reduced:
    """Reduce an array to one buffer; layouts with large gaps are packed first."""
    import numpy

    if (small := _reduce_small(tracker, array)) is not None:
        return small
    dtype = array.dtype
    # Elements are references, or strings that are stored elsewhere: leave it to NumPy.
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind == "T":
        return NotImplemented
    kind = type(array)
    # Data and mask are two arrays, each of which may share memory with others.
    if kind is numpy.ma.MaskedArray:
        plain = {name: getattr(array, name) for name in ("_fill_value", "_hardmask", "_sharedmask")}
        return _masked, (array._data, array._mask, plain)
    if kind is numpy.memmap and (mapped := reduce_map(array)) is not None:
        return mapped
    if kind is not numpy.ndarray and kind is not numpy.memmap:
        return _reduce_subclass(array)
    description = (_dtype(dtype), array.shape)
    if array.size == 0:
        return _array, (b"", *description, "C")
    start, stop = bounds(array)
    if id(array) not in tracker.private:
        linked_array = tracker.linked.array(start, stop)
        if linked_array is not None:
            # The other side already has an array with this memory: refer to it.
            return _part, (
                linked_array,
                *description,
                array.strides,
                _address(array) - _address(linked_array),
            )
        tracker.spans.append(Span(start, stop, id(array)))
        block = tracker.layout.find(start, stop) if tracker.layout is not None else None
        if block is not None:
            # The memory is sent as one common block, and this array remains a view of it.
            return _view, (block, *description, array.strides, _address(array) - block.start)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        # In the order of memory, so that this needs no copy.
        flat = array.view(numpy.ndarray).reshape(-1, order="A").view(numpy.uint8)
        return _array, (
            pickle.PickleBuffer(flat.data),
            *description,
            "C" if array.flags.c_contiguous else "F",
        )
    # With small gaps send the memory as it is, otherwise pack the elements first.
    if stop - start <= array.nbytes * 1.25:
        return _view, (memory(start, stop), *description, array.strides, _address(array) - start)
    packed = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return _array, (pickle.PickleBuffer(packed.data), *description, "C")


def _reduce_small(tracker: Tracker, array: Any) -> Reduced | None:
    """Reduce one of the many small arrays in a model's state, in 5 µs.

    Return None for arrays that need more than this shortcut.
    """
    import numpy

    if (
        type(array) is not numpy.ndarray
        or not 0 < array.nbytes < SMALL
        or not array.flags.c_contiguous
    ):
        return None
    if tracker.layout is not None or tracker.linked.arrays or array.dtype not in plain_dtypes():
        return None
    # Dtypes and shapes become one object each, which the pickle contains once.
    start, facts = array.__array_interface__["data"][0], tracker.facts
    name, shape = (
        facts.setdefault(array.dtype.num, array.dtype.str),
        facts.setdefault(array.shape, array.shape),
    )
    if id(array) not in tracker.private:
        tracker.spans.append(Span(start, start + array.nbytes, id(array)))
    tracker.leaves[id(array)] = start, start + array.nbytes, ("small array", shape, name)
    return _array, (array.tobytes(), name, shape, "C")


_FACTS = attrgetter("shape", "dtype", "flags.c_contiguous", "nbytes")


def describe(arrays: list[Any]) -> tuple[list[int], list[int], list[Any]] | None:
    """Return address, length in bytes and other facts of many arrays at once.

    Return None unless all are contiguous and of a plain dtype.
    """
    facts = list(map(_FACTS, arrays))
    dtypes = plain_dtypes()
    if not all(dtype in dtypes and contiguous for _, dtype, contiguous, _ in facts):
        return None
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    return addresses, [fact[3] for fact in facts], facts


@lru_cache(maxsize=1)
def plain_dtypes() -> frozenset[Any]:
    """Return NumPy's native numeric dtypes in this machine's byte order.

    A short name identifies each of them.
    """
    import numpy

    return frozenset(map(numpy.dtype, "?bhilqBHILQefdFD"))


def _reduce_subclass(array: Any) -> Reduced:
    import numpy

    kind = type(array)
    if any(
        getattr(kind, name) is not getattr(numpy.ndarray, name)
        for name in ("__reduce__", "__reduce_ex__")
    ):
        return NotImplemented
    attributes = getattr(array, "__dict__", None)
    if issubclass(kind, numpy.memmap):  # leave out the attributes of the map, which stays here
        attributes = {name: value for name, value in vars(array).items() if name not in _MAPPING}
    if not attributes:
        return _subclass, (array.view(numpy.ndarray), kind)
    return _subclass, (array.view(numpy.ndarray), kind), attributes, None, None, _fill_subclass


def bounds(array: Any) -> tuple[int, int]:
    """Return the first address of an array's elements, and the one after the last."""
    start = stop = _address(array)
    for count, stride in zip(array.shape, array.strides, strict=True):
        # The elements after the first lie before it in memory.
        if stride < 0:
            start += (count - 1) * stride
        else:
            stop += (count - 1) * stride
    return start, stop + array.itemsize


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _dtype(dtype: Any) -> Any:
    """Return the dtype's short name if it is unambiguous: it pickles ten times faster."""
    # `isbuiltin` is 2 for dtypes that other packages register: their short names identify nothing.
    return (
        dtype.str
        if dtype.kind in "biufcmMSU" and dtype.metadata is None and dtype.isbuiltin in (0, 1)
        else dtype
    )


def _array(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    import numpy

    return numpy.ndarray(shape, dtype, buffer=writable(buffer), order=order)


def _view(
    buffer: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Any:
    import numpy

    view = numpy.ndarray(shape, dtype, buffer=writable(buffer), strides=strides, offset=offset)
    if any(stride == 0 and count > 1 for stride, count in zip(strides, shape, strict=True)):
        view.flags.writeable = False  # a broadcast view: writing one element would change many
    return view


def _part(
    base: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Any:
    """Return a view of an array that this side already had."""
    import numpy

    return _view(base.reshape(-1, order="A").view(numpy.uint8), dtype, shape, strides, offset)


def reach(array: Any) -> tuple[int, int] | None:
    """Return the bounds of a plain contiguous array, or None for any other object."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(array) is not numpy.ndarray or array.dtype.hasobject or not array.size:
        return None
    return bounds(array) if array.flags.c_contiguous or array.flags.f_contiguous else None


def _subclass(array: Any, kind: type) -> Any:
    return array.view(kind)


def _fill_subclass(array: Any, attributes: dict[str, object]) -> None:
    """Set attributes directly: NumPy's `__setstate__` expects a different state."""
    vars(array).update(attributes)


def _masked(data: Any, mask: Any, plain: dict[str, object]) -> Any:
    import numpy

    array = numpy.ma.MaskedArray(data, mask=mask, copy=False)
    vars(array).update(plain)
    return array


def reduce_index(tracker: Tracker, index: Any) -> Reduced:
    """Mark an index's arrays as private: labels are immutable, so sharing them does not matter."""
    data = getattr(index, "_data", None)
    for array in (data, getattr(data, "_ndarray", None), *(getattr(index, "_codes", None) or ())):
        if array is not None:
            tracker.private.add(id(array))
    return NotImplemented


def reduce_frame(tracker: Tracker, part: Any) -> Reduced:
    """Mark a frame's arrays as private.

    pandas shares memory between frames only until one of them is written.
    """
    for block in getattr(part, "blocks", None) or (part,):
        values = getattr(block, "values", None)
        for array in (values, getattr(values, "_ndarray", None)):
            if array is not None:
                tracker.private.add(id(array))
    return NotImplemented
