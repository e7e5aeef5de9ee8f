"""`shard`: the parts are a partition, aligned, typed as what came in, and the same for every caller."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

import skymagic as sky
from skymagic.runtime import info
from skymagic.runtime.info import InstanceInfo
from tests.lab.golden import Golden


@pytest.fixture(autouse=True)
def _outside_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPUTE_POOL", "")  # and put back what the tests change


def on(rank: int, world: int) -> None:
    info.enter(InstanceInfo(node=rank, total_nodes=world, rank=rank, world_size=world))


def parts(world: int, *arrays: Any, **options: Any) -> list[Any]:
    """What each rank gets."""
    found = []
    for rank in range(world):
        on(rank, world)
        found.append(sky.shard(*arrays, **options))
    return found


# ---------------------------------------------------------------------------------------- which items

worlds = st.integers(1, 9)
sizes = st.integers(0, 60)


@given(size=sizes, world=worlds, shuffle=st.booleans(), seed=st.integers(0, 3))
def test_parts_are_a_partition(size: int, world: int, shuffle: bool, seed: int) -> None:
    found = parts(world, list(range(size)), shuffle=shuffle, seed=seed)
    assert sorted(item for part in found for item in part) == list(range(size))
    lengths = [len(part) for part in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(
    size=sizes, world=worlds, shuffle=st.booleans(), seed=st.integers(0, 3), drop_last=st.booleans()
)
def test_the_rule_is_the_documented_one(
    size: int, world: int, shuffle: bool, seed: int, drop_last: bool
) -> None:
    indices = list(range(size))
    if shuffle:
        random.Random(seed).shuffle(indices)
    if drop_last:
        del indices[size - size % world :]
    found = parts(world, tuple(range(size)), shuffle=shuffle, seed=seed, drop_last=drop_last)
    assert found == [tuple(indices[rank::world]) for rank in range(world)]


@given(size=sizes, world=worlds, shuffle=st.booleans(), drop_last=st.booleans())
def test_arrays_stay_aligned_whatever_their_types(
    size: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    numbers = np.arange(size)
    data = (
        list(range(size)),
        numbers,
        torch.arange(size),
        pd.Series(numbers),
        {"x": numbers, "y": numbers.tolist()},
    )
    for part in parts(world, *data, shuffle=shuffle, drop_last=drop_last):
        plain, array, tensor, series, named = part
        assert (
            plain
            == array.tolist()
            == tensor.tolist()
            == series.tolist()
            == named["x"].tolist()
            == named["y"]
        )


def test_another_seed_another_order() -> None:
    items = list(range(50))
    assert parts(2, items, shuffle=True, seed=1) == parts(2, items, shuffle=True, seed=1)
    assert parts(2, items, shuffle=True, seed=1) != parts(2, items, shuffle=True, seed=2)
    state = random.getstate()
    sky.shard(items, shuffle=True)
    assert random.getstate() == state
    assert items == list(range(50))


def test_only_ranks_that_take_part_count() -> None:
    found = []
    for rank in (1, 3):
        on(rank, 4)
        with info.participation([3, 1]):
            found.append(sky.shard(list(range(5))))
    assert found == [[0, 2, 4], [1, 3]]
    on(3, 4)
    assert sky.shard(list(range(5))) == [3]


def test_outside_a_pool_it_is_the_identity() -> None:
    x, y = [1, 2, 3], np.arange(3)
    assert sky.shard(x) is x
    assert sky.shard(x, y) == (x, y)
    assert sorted(sky.shard(x, shuffle=True)) == x
    assert sky.shard({"a": x}) == {"a": x}


def test_one_gives_a_part_and_several_a_tuple() -> None:
    on(0, 2)
    assert sky.shard([1, 2, 3]) == [1, 3]
    assert sky.shard([1, 2, 3], (4, 5, 6)) == ([1, 3], (4, 6))


# ------------------------------------------------------------------------------------------- types


class Squares:
    """A sequence by its two methods."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < 5:
            raise IndexError(i)
        return i * i


class Images(torch.utils.data.Dataset[int]):
    """A map-style dataset that would be slow to read."""

    read: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> int:
        self.read.append(i)
        return i * i


KINDS: dict[str, tuple[Callable[[], Any], type, Callable[[Any], list[Any]]]] = {
    "list": (lambda: [0, 1, 4, 9, 16], list, list),
    "tuple": (lambda: (0, 1, 4, 9, 16), tuple, list),
    "range": (lambda: range(0, 25, 5), list, lambda x: [(i // 5) ** 2 for i in x]),
    "sequence": (Squares, list, list),
    "ndarray": (lambda: np.arange(5) ** 2, np.ndarray, list),
    "tensor": (lambda: torch.arange(5) ** 2, torch.Tensor, lambda x: x.tolist()),
    "Series": (lambda: pd.Series(np.arange(5) ** 2, index=list("abcde")), pd.Series, list),
    "Index": (lambda: pd.Index(np.arange(5) ** 2), pd.Index, list),
    "DataFrame": (
        lambda: pd.DataFrame({"a": np.arange(5) ** 2, "b": list("abcde")}),
        pd.DataFrame,
        lambda x: list(x["a"]),
    ),
    "arrow array": (lambda: pa.array([0, 1, 4, 9, 16]), pa.Int64Array, lambda x: x.to_pylist()),
    "arrow table": (
        lambda: pa.table({"a": [0, 1, 4, 9, 16]}),
        pa.Table,
        lambda x: x["a"].to_pylist(),
    ),
    "sparse": (
        lambda: scipy.sparse.csr_array(np.arange(5)[:, None] ** 2),
        scipy.sparse.csr_array,
        lambda x: list(x.toarray()[:, 0]),
    ),
    "torch dataset": (Images, torch.utils.data.Dataset, list),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_types_are_kept(kind: str, shuffle: bool) -> None:
    make, expected, values = KINDS[kind]
    found = parts(3, make(), shuffle=shuffle)
    assert all(isinstance(part, expected) for part in found)
    assert sorted(item for part in found for item in values(part)) == [0, 1, 4, 9, 16]
    order = list(range(5))
    if shuffle:
        random.Random(0).shuffle(order)
    assert values(found[1]) == [i * i for i in order[1::3]]
    last = parts(7, make(), shuffle=shuffle)[6]
    assert isinstance(last, expected), "also where there are more ranks than items"
    assert values(last) == []


@pytest.mark.parametrize(
    "empty", [[], (), np.zeros((0, 3)), torch.zeros(0, 2), pd.DataFrame({"a": []})], ids=str
)
def test_empty_data_keeps_its_type(empty: Any) -> None:
    for part in parts(2, empty, shuffle=True):
        assert type(part) is type(empty)
        assert getattr(part, "shape", len(part)) == getattr(empty, "shape", 0)


def test_further_dimensions_and_number_types_stay() -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    for whole in (array, torch.from_numpy(array)):
        part = parts(4, whole, shuffle=True, seed=3)[1]
        assert part.shape == (2, 2, 2)
        assert part.dtype == whole.dtype
    assert parts(9, array)[8].shape == (0, 2, 2)
    assert parts(9, torch.from_numpy(array))[8].shape == (0, 2, 2)


def test_a_part_is_a_copy_that_can_be_reshaped() -> None:
    array = np.arange(8.0).reshape(4, 2)
    first, _ = parts(2, array)
    first[:] = -1
    assert array.sum() == 28
    assert first.flags.c_contiguous
    assert parts(2, torch.arange(8).view(4, 2))[1].view(-1).tolist() == [2, 3, 6, 7]


def test_pandas_keeps_its_index_and_columns() -> None:
    frame = pd.DataFrame({"a": [1, 2, 3], "b": pd.Categorical(["x", "y", "x"])}, index=[10, 20, 30])
    part = parts(2, frame)[0]
    assert part.index.tolist() == [10, 30]
    assert part.dtypes.equals(frame.dtypes)


def test_subclasses_of_arrays() -> None:
    class Marked(np.ndarray):
        pass

    assert isinstance(parts(2, np.arange(4).view(Marked))[1], Marked)
    masked = parts(2, np.ma.masked_array([1, 2, 3, 4], mask=[False, True, False, True]))[1]
    assert masked.mask.all()
    assert parts(2, torch.nn.Parameter(torch.ones(4)))[1].requires_grad


def test_a_dataset_is_not_read() -> None:
    Images.read.clear()
    part = parts(2, Images())[1]
    assert Images.read == []
    assert (len(part), part[1]) == (2, 9)


def test_dicts_are_arrays_by_name() -> None:
    data = {"x": np.arange(4), "inner": {"y": ["a", "b", "c", "d"]}}
    part = parts(2, data)[1]
    assert type(part) is dict
    assert part["x"].tolist() == [1, 3]
    assert part["inner"] == {"y": ["b", "d"]}


# ----------------------------------------------------------------------------------------- bad input

Point = namedtuple("Point", "x y")


def _iterator() -> Iterator[int]:
    yield 1


class _Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("text", "does not divide str: give it a list, such as text.splitlines"),
        (b"bytes", "does not divide bytes"),
        ({1, 2}, r"set, which has no order: give it sorted\(\.\.\.\) of it"),
        (frozenset({1}), "frozenset, which has no order"),
        ({"a": 1}.keys(), "no order"),
        (_iterator(), r"iterator generator, which has no length: give it list\(\.\.\.\) of it"),
        (zip([1], [2], strict=True), "iterator zip"),
        ({"a": [1]}.values(), r"gives no item by its number: give it list\(\.\.\.\) of it"),
        (3, "int"),
        (None, "NoneType"),
        (np.array(3), "has no length"),
        (torch.tensor(3), "has no length"),
        ({}, "empty dict"),
        ({"a": "text"}, "str"),
        (Point(1, 2), r"named tuple Point: give it the fields, shard\(\*data\)"),
        (_Stream(), "no item by its number"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("world", [1, 2])
def test_indivisible_data_is_refused_with_a_remedy(data: Any, words: str, world: int) -> None:
    on(0, world)
    with pytest.raises(TypeError, match=words):
        sky.shard([1], data)


def test_nothing_at_all(golden: Golden) -> None:
    with golden.raises(TypeError):
        sky.shard()


@pytest.mark.parametrize(
    "data", [([1, 2], [1, 2, 3]), (np.zeros((3, 2)), [1, 2]), ({"a": [1, 2], "b": [1, 2, 3]},)]
)
def test_unequal_lengths_are_refused_everywhere(golden: Golden, data: Any) -> None:
    with golden.raises(ValueError):
        sky.shard(*data)
