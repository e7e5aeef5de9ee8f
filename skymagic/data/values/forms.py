"""Contents of arrays, tensors, frames, figures and Keras models, independent of layout and caches.

None of the libraries is imported: if a value belongs to one, the library is loaded already.
"""

from __future__ import annotations

import ctypes
import io
import sys
from collections.abc import Iterable
from typing import Any

import xxhash

from skymagic.content.device import DeviceBytes
from skymagic.data.values import hooks
from skymagic.data.values.arrays import bounds, plain_dtypes
from skymagic.data.values.contents import Contents, Form
from skymagic.data.values.kinds import is_a
from skymagic.data.values.memory import SMALL, memory
from skymagic.data.values.tensors import extent_of, is_plain, small_tensor

_BLOCK = 1 << 15
"""Array elements that are brought into C order at a time."""
_VIRTUAL = 4
"""If an array's elements are this many times the size of its memory (`broadcast_to`, `expand`,
sliding windows), its memory and strides are hashed instead.
"""


def form_for(kind: type) -> Form | None:
    """Return how objects of this type are added, or None if they are taken apart."""
    numpy, torch, pandas = (sys.modules.get(name) for name in ("numpy", "torch", "pandas"))
    if numpy is not None and kind in (
        getattr(numpy, "ndarray", None),
        getattr(numpy, "memmap", None),
    ):
        return _array
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return _tensor
    if pandas is not None and kind.__module__.partition(".")[0] == "pandas":
        for name, form in _PANDAS.items():
            if is_a(kind, "pandas", name):
                return form
    if is_a(kind, "matplotlib", "Artist"):
        return _artist
    if is_a(kind, "keras", "Model"):
        return _keras_model
    return None


# -- NumPy -----------------------------------------------------------------------------------------


def _array(contents: Contents, array: Any) -> None:
    """Add an array's elements in C order."""
    import numpy

    dtype = array.dtype
    if type(array) is numpy.ndarray and 0 < array.nbytes < SMALL and dtype in plain_dtypes():
        contents.span(*bounds(array), array)
        contents.add_plain("small array", array.shape, dtype.str, array.tobytes())
        return
    if dtype.kind == "O":
        contents.add_plain("objects", array.shape)
        contents.sequence(array.ravel().tolist())
        return
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind == "T":
        contents.add_parts(array)
        return
    contents.add_plain("array", array.shape)
    contents.add(type(array))
    contents.add(
        dtype.str if dtype.names is None and dtype.metadata is None and dtype.kind != "V" else dtype
    )
    if not array.size:
        return
    start, stop = bounds(array)
    contents.span(start, stop, array)
    # Hashing each element of a broadcast array would read the same memory many times.
    if array.nbytes > _VIRTUAL * (stop - start):
        contents.add_plain(
            "overlapping", array.strides, array.__array_interface__["data"][0] - start
        )
        contents.memory(memory(start, stop).raw())
    elif array.flags.c_contiguous:
        contents.memory(memoryview(_bytes(array)))
    else:
        # Block by block, without a contiguous copy of the whole array.
        contents.hashed(array.nbytes, _in_order(array))


def _bytes(array: Any) -> Any:
    import numpy

    return array.view(numpy.ndarray).reshape(-1).view(numpy.uint8).data


def _in_order(array: Any) -> str:
    """Return the hash that a C-ordered copy would have."""
    import numpy

    state = xxhash.xxh3_128()
    parts: Iterable[Any] = numpy.nditer(  # type: ignore[call-overload, unused-ignore]
        array.view(numpy.ndarray),
        flags=["external_loop", "buffered"],
        op_flags=[["readonly", "contig"]],
        order="C",
        buffersize=_BLOCK,
    )
    for part in parts:
        state.update(part.view(numpy.uint8).data)
    return str(state.hexdigest())


# -- torch -----------------------------------------------------------------------------------------


def _tensor(contents: Contents, tensor: Any) -> None:
    """Add a tensor's elements in C order, from any device, and the gradient and hooks of a leaf."""
    torch = sys.modules["torch"]
    if tensor.is_leaf and tensor.grad is not None:
        contents.add_plain("grad")
        contents.add(tensor.grad)
    has_hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    if has_hooks and tensor.is_leaf and (registered := hooks.tensor_hooks(tensor)):
        contents.add_plain("hooks")
        contents.add(registered)
    if tensor.is_leaf and is_plain(tensor) and 0 < tensor.nbytes < SMALL:
        _small_tensor(contents, tensor)
        return
    reduced = hooks.without_warning(tensor)
    plain = reduced[0] is torch._utils._rebuild_tensor_v2 and len(reduced) == 2
    # Other kinds of tensors, and metadata such as a conjugate bit, are left to torch.
    if not plain or any(reduced[1][6:]) or not tensor.numel():
        contents.add_parts(tensor)
        return
    size, stride, requires_grad = reduced[1][2:5]
    contents.add_plain("tensor", str(tensor.dtype), tuple(size), bool(requires_grad))
    data = tensor.detach()
    start = data.data_ptr()
    stop = start + extent_of(size, stride) * data.element_size()
    contents.span(start, stop, data)
    if data.device.type == "cpu" and data.nbytes > _VIRTUAL * (stop - start):
        contents.add_plain("overlapping", tuple(stride))
        contents.memory(memory(start, stop).raw())
        return
    # Bound to a name, because `memory` does not keep the tensor alive.
    data = data.contiguous()
    if data.device.type == "cpu":
        contents.memory(memory(data.data_ptr(), data.data_ptr() + data.nbytes).raw())
    else:
        contents.memory(DeviceBytes(data.view(-1).view(torch.uint8), []))


def _small_tensor(contents: Contents, tensor: Any) -> None:
    start, data = tensor.data_ptr(), tensor
    if tensor.is_contiguous():
        stop = start + tensor.nbytes
    else:
        data = tensor.detach().contiguous()
        stop = start + extent_of(tensor.size(), tensor.stride()) * tensor.itemsize
    contents.span(start, stop, tensor)
    facts = small_tensor(
        type(tensor).__name__, tensor.dtype, tuple(tensor.size()), tensor.requires_grad
    )
    contents.add_plain(*facts, ctypes.string_at(data.data_ptr(), tensor.nbytes))


# -- pandas ----------------------------------------------------------------------------------------


def _frame(contents: Contents, frame: Any) -> None:
    """Add a frame by columns, independent of its internal blocks."""
    if type(frame).__module__.partition(".")[0] != "pandas":  # a subclass may hold more
        contents.add_parts(frame)
        return
    contents.add(type(frame))
    contents.add(frame.index)
    contents.add(frame.attrs)
    contents.add_plain(frame.flags.allows_duplicate_labels)
    with contents.unshared():
        if frame.ndim == 1:
            contents.add(frame.name)
            # Not `values`, which converts extension arrays to NumPy and drops time zones.
            contents.add(frame._values)
            return
        contents.add(frame.columns)
        for _, column in frame.items():
            contents.add(column._values)


def _index(contents: Contents, index: Any) -> None:
    """Add an index by its labels, and by its frequency if that is known."""
    contents.add(type(index))
    contents.add(list(index.names))
    contents.add_plain(str(getattr(index, "freq", None)))
    with contents.unshared():
        if is_a(type(index), "pandas", "RangeIndex"):
            contents.add_plain(index.start, index.stop, index.step)
        elif is_a(type(index), "pandas", "MultiIndex"):
            contents.sequence(list(index.levels))
            contents.sequence([codes.tolist() for codes in index.codes])
        else:
            contents.add(index._values)


def _extension(contents: Contents, array: Any) -> None:
    """Add an extension array that is backed by a NumPy array."""
    contents.add(type(array))
    contents.add(array.dtype)
    with contents.unshared():
        contents.add(array._ndarray)


def _dtype(contents: Contents, dtype: Any) -> None:
    """Add a dtype by its name: everything else in it is a cache."""
    contents.add_plain(type(dtype).__qualname__, str(dtype))


_PANDAS = {
    "NDFrame": _frame,
    "Index": _index,
    "NDArrayBacked": _extension,
    "DatetimeTZDtype": _dtype,
    "PeriodDtype": _dtype,
}


# -- matplotlib ------------------------------------------------------------------------------------


def _artist(contents: Contents, artist: Any) -> None:
    """Add a figure as its rendered picture: drawing it changes most of its attributes."""
    contents.add(type(artist))
    figure = getattr(artist, "figure", None)
    if figure is None:
        contents.add_parts(artist)
    elif figure is not artist:
        # An artist is identified by its position among those of its type in the figure.
        same_type_artists = figure.findobj(
            lambda artist_of_type: type(artist_of_type) is type(artist)
        )
        contents.add_plain(
            [other is artist for other in same_type_artists].index(True)
            if artist in same_type_artists
            else None
        )
        contents.add(figure)
    else:
        picture = io.BytesIO()
        # Raw pixels, without the metadata of a file format.
        artist.savefig(picture, format="rgba", dpi="figure")
        contents.add_plain("picture", *map(float, artist.bbox.size))
        contents.memory(picture.getvalue())


# -- keras -----------------------------------------------------------------------------------------


def _keras_model(contents: Contents, model: Any) -> None:
    """Add a Keras model's configuration and weights.

    It pickles as an archive that contains the current time, so its pickle always differs.
    """
    contents.add(type(model))
    contents.add(model.get_config())
    contents.add(model.get_compile_config() if model.compiled else None)
    optimizer = model.optimizer if model.compiled else None
    contents.sequence([variable.trainable for variable in model.variables])
    contents.sequence(
        [variable.numpy() for variable in (*model.variables, *getattr(optimizer, "variables", ()))]
    )
