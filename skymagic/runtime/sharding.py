"""`shard`: this rank's part of data that every rank has, in the type of the data.

No library is imported for it: if its data is passed in, it is already imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, overload

from skymagic.runtime.info import instance_info, participants

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@overload
def shard(array: T, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> T: ...
@overload
def shard(
    first: T, second: U, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> tuple[T, U]: ...
@overload
def shard(
    first: T,
    second: U,
    third: V,
    /,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> tuple[T, U, V]: ...
@overload
def shard(*arrays: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any: ...


def shard(*arrays: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any:
    """Return this rank's part of each of `arrays`, which all ranks hold in full and in the same
    order.

    Rank r of n takes the items r, r + n, r + 2n, …, optionally in shuffled order. The ranks' parts
    are disjoint and together they are the whole. Several arrays stay aligned: ``x[i]`` still
    belongs to ``y[i]``. Only ranks that take part in the run count. With more ranks than items,
    some parts are empty, of the same type. Outside a pool rank 0's part is the whole.

    Args:
        arrays: of equal length along their first dimension. list, tuple, numpy and JAX arrays,
            torch tensors, pandas objects (the index stays), scipy's sparse rows, pyarrow tables,
            `datasets.Dataset` and torch's map-style datasets (a Subset) keep their type; a dict is
            treated as arrays by name and stays a dict. Any other sequence with a length gives a
            list.
        shuffle: use a shuffled order, ``random.Random(seed).shuffle``, the same on each rank.
        seed: seed of the order, for instance the epoch's number.
        drop_last: leave out the last items of that order, so that all parts are equally long.

    Returns:
        One part for one array, a tuple of parts for several.

    Raises:
        TypeError: text, a set, an iterator: something without an order or a length.
        ValueError: unequal lengths.
    """
    if not arrays:
        raise TypeError("shard() needs something to divide: shard(x) or shard(x, y)")
    sizes = [size for array in arrays for size in _sizes(array)]
    if len(set(sizes)) > 1:
        raise ValueError(
            "arrays to shard together must be equally long; "
            f"these have {', '.join(map(str, sizes))} items"
        )
    ranks = participants()
    position = ranks.index(instance_info().rank)
    indices = _indices(
        sizes[0], position, len(ranks), shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    parts = tuple(_take(array, indices) for array in arrays)
    return parts if len(parts) > 1 else parts[0]


def _indices(
    size: int, rank: int, parts: int, *, shuffle: bool, seed: int, drop_last: bool
) -> Sequence[int]:
    """Return the indices of the part at `rank` of `parts`; a range unless shuffled."""
    order: Sequence[int] = range(size)
    if shuffle:
        order = list(order)
        random.Random(seed).shuffle(order)
    if drop_last:
        order = order[: size - size % parts]
    return order[rank::parts]


def _sizes(array: Any) -> list[int]:
    """Return the length of an array, or of each array in a dict.

    Raises TypeError if it cannot be divided.
    """
    if isinstance(array, Mapping):
        if not array:
            raise TypeError(
                "shard() was given an empty dict; of a dict it divides the arrays, by name"
            )
        return [size for value in array.values() for size in _sizes(value)]
    kind = type(array).__name__
    if isinstance(array, str | bytes | bytearray):
        raise TypeError(
            f"shard() does not divide {kind}: give it a list, such as text.splitlines()"
        )
    if isinstance(array, tuple) and hasattr(array, "_fields"):
        raise TypeError(
            f"shard() does not divide the named tuple {kind}: give it the fields, shard(*data)"
        )
    if isinstance(array, Set):
        raise TypeError(
            f"shard() does not divide a {kind}, which has no order: "
            "give it sorted(...) of it, the same on each rank"
        )
    if isinstance(array, Iterator):
        raise TypeError(
            f"shard() does not divide the iterator {kind}, which has no length: "
            "give it list(...) of it"
        )
    if not hasattr(array, "__getitem__") or _is_a(array, "torch.utils.data", "IterableDataset"):
        raise TypeError(
            f"shard() does not divide {kind}, which gives no item by its number: "
            "give it list(...) of it"
        )
    return [_length(array)]


def _length(array: Any) -> int:
    shape = getattr(array, "shape", None)
    try:
        # A sparse matrix has no len(), and a scalar array's shape is empty.
        return int(shape[0]) if isinstance(shape, tuple) else len(array)
    except (TypeError, IndexError):
        raise TypeError(
            f"shard() does not divide {type(array).__name__}, which has no length: "
            "give it a list, a tuple, an array, a tensor, a DataFrame or a dict of them"
        ) from None


# -- by type ---------------------------------------------------------------------------------------


def _take(array: Any, indices: Sequence[int]) -> Any:
    """Return the items at `indices`, in the type of `array`.

    Returns the array itself if these are all of its items, in order.
    """
    if isinstance(array, Mapping):
        return {name: _take(value, indices) for name, value in array.items()}
    taker = next((take for module, types, take in _TAKERS if _is_a(array, module, *types)), None)
    if taker is None:
        return [array[i] for i in indices]
    return array if indices == range(_length(array)) else taker(array, indices)


def _is_a(array: Any, module: str, *types: str) -> bool:
    """Check isinstance for types of a library; False if it is not imported, as then no instance
    exists.
    """
    library = sys.modules.get(module)
    return any(isinstance(array, getattr(library, name, ())) for name in types)


def _row_numbers(indices: Sequence[int]) -> Any:
    numpy = sys.modules["numpy"]
    if isinstance(indices, range):  # much faster than converting millions of row numbers one by one
        return numpy.arange(indices.start, indices.stop, indices.step)
    return numpy.asarray(indices, dtype=numpy.intp)


def _rows_of_tensor(tensor: Any, indices: Sequence[int]) -> Any:
    torch = sys.modules["torch"]
    if isinstance(indices, range):
        numbers = torch.arange(indices.start, indices.stop, indices.step, device=tensor.device)
    else:
        numbers = torch.tensor(indices, dtype=torch.int64, device=tensor.device)
    return tensor.index_select(0, numbers)


def _rows_of_arrow(table: Any, indices: Sequence[int]) -> Any:
    pyarrow = sys.modules["pyarrow"]
    return table.take(pyarrow.array(indices, type=pyarrow.int64()))


# Module, its types, and how to take rows from them; the first match counts.
_TAKERS: tuple[tuple[str, tuple[str, ...], Callable[[Any, Sequence[int]], Any]], ...] = (
    ("builtins", ("list",), lambda array, indices: [array[i] for i in indices]),
    ("builtins", ("tuple",), lambda array, indices: tuple(array[i] for i in indices)),
    ("numpy", ("ndarray",), lambda array, indices: array[_row_numbers(indices)]),
    ("torch", ("Tensor",), _rows_of_tensor),
    ("jax", ("Array",), lambda array, indices: array[_row_numbers(indices)]),
    ("pandas", ("DataFrame", "Series"), lambda array, indices: array.iloc[_row_numbers(indices)]),
    ("pandas", ("Index",), lambda array, indices: array.take(_row_numbers(indices))),
    ("scipy.sparse", ("spmatrix", "sparray"), lambda array, indices: array[_row_numbers(indices)]),
    ("pyarrow", ("Table", "RecordBatch", "Array", "ChunkedArray"), _rows_of_arrow),
    ("datasets", ("Dataset",), lambda array, indices: array.select(indices)),
    (
        "torch.utils.data",
        ("Dataset",),
        lambda array, indices: sys.modules["torch.utils.data"].Subset(array, list(indices)),
    ),
)
