"""What a value needs on the other side, and what of it stays one object there."""

from __future__ import annotations

import argparse
import array
import dataclasses
import gc
import typing
import weakref
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
import traitlets

from skymagic.content.base import Buffer
from skymagic.data.values import pickling

# what a value needs: a rank that lacks it gets it before the value is sent


class Meters(np.ndarray):
    """A subclass that travels by value."""


Meters.__module__ = "__main__"

NEEDS: dict[str, tuple[Any, str]] = {
    "array": (np.arange(3), "numpy"),
    "large array": (np.arange(300_000), "numpy"),
    "view": (np.arange(300_000)[::3], "numpy"),
    "subclass of the notebook": (np.arange(3).view(Meters), "numpy"),
    "masked array": (np.ma.masked_array([1, 2], [True, False]), "numpy"),
    "number of numpy": (np.float32(1.5), "numpy"),
    "time of numpy": (np.datetime64("2026-01-01"), "numpy"),
    "dtype": (np.dtype("f4"), "numpy"),
    "ufunc": (np.sin, "numpy"),
    "generator": (np.random.default_rng(0), "numpy"),
    "tensor": (torch.arange(3), "torch"),
    "half-precision tensor": (torch.zeros(3, dtype=torch.float8_e4m3fn), "torch"),
    "sparse tensor": (torch.eye(3).to_sparse(), "torch"),
    "parameter": (torch.nn.Parameter(torch.zeros(3)), "torch"),
    "storage": (torch.zeros(3).untyped_storage(), "torch"),
    "dtype of torch": (torch.float32, "torch"),
    "device": (torch.device("cpu"), "torch"),
    "shape": (torch.zeros(3, 4).shape, "torch"),
    "frame": (pd.DataFrame({"a": [1]}), "pandas"),
    "NA": (pd.NA, "pandas"),
    "timestamp": (pd.Timestamp("2026-01-01"), "pandas"),
    "sparse matrix": (scipy.sparse.csr_matrix([[1]]), "scipy"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", NEEDS)
def test_every_kind_of_value_reports_its_modules(kind: str, nested: bool) -> None:
    value, package = NEEDS[kind]
    pickled = pickling.dumps(
        {"inner": [value]} if nested else value, {"__name__": "__main__"}, folder="/nowhere"
    )
    assert package in {name.partition(".")[0] for name in pickled.required}
    assert package in pickled.packages


# which object it is


def copy(value: Any) -> Any:
    """The value after a pickle, in this process; the first one of a bundle whose objects have numbers, as on a rank."""
    pickled = pickling.dumps(value, SPACE, folder="/nowhere")
    return pickling.loads(
        pickled.pieces,
        [bytearray(cast("Buffer", each)) for each in pickled.buffers],
        SPACE,
        memo={},
    )


SPACE: dict[str, Any] = {"__name__": "__main__"}
BARE = object()
SENTINELS: dict[str, Any] = {
    "of dataclasses": dataclasses.MISSING,
    "of traitlets, with a text in it": traitlets.Undefined,
    "a bare object": BARE,
}


@pytest.mark.parametrize("kind", SENTINELS)
def test_sentinels_of_modules_keep_their_identity(kind: str) -> None:
    value = SENTINELS[kind]
    assert copy(value) is value
    assert copy({"default": [value]})["default"][0] is value


def test_a_bare_object_of_the_notebook_is_one_of_its_own() -> None:
    mine = object()
    first, second = copy([mine, mine])
    assert first is second
    assert first is not mine


def test_parser_of_the_notebook_works_on_ranks() -> None:
    parser = argparse.ArgumentParser("x", argument_default=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    there = copy(parser)
    for line in (["--lr", "0.5"], [], ["--quiet"]):
        assert there.parse_args(line) == parser.parse_args(line)
    assert there.format_help() == parser.format_help()


@pytest.mark.parametrize(
    "whole", [bytearray(b"abcdef" * 10), array.array("i", range(20))], ids=["bytearray", "array"]
)
@pytest.mark.parametrize("readonly", [False, True])
def test_view_keeps_its_base(whole: Any, readonly: bool) -> None:
    view = memoryview(whole)
    own, all_of_it, part = copy((whole, view.toreadonly() if readonly else view, view[4:9]))
    assert all_of_it.obj is own
    assert part.obj is own
    assert all_of_it.readonly == readonly
    own[5] = 7
    assert part[1] == 7
    assert part.format == view.format


class Doubled(dict[Any, Any]):
    """Its own way of filling itself, which needs an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.log.append(key)
        super().__setitem__(key, value * 2)


class Ordered(Doubled, OrderedDict[Any, Any]):
    """The same of another base."""


class Appending(list[Any]):
    """A list that says what it gets."""

    def append(self, value: Any) -> None:
        super().append(value + 1)

    def extend(self, values: Any) -> None:
        for each in values:
            self.append(each)


@pytest.mark.parametrize("kind", [Doubled, Ordered])
def test_self_filling_dict_arrives_unchanged(kind: type[Doubled]) -> None:
    value = kind()
    value["b"], value["a"] = 1, 2
    value["self"] = 0
    dict.__setitem__(value, "self", value)
    there = copy(value)
    assert type(there) is kind
    assert (list(there), there["a"], there["b"], there.log) == (
        ["b", "a", "self"],
        4,
        2,
        ["b", "a", "self"],
    )
    assert there["self"] is there


def test_self_filling_list_arrives_unchanged() -> None:
    value = Appending()
    value.append(1)
    value.note = "kept"  # type: ignore[attr-defined]
    assert (list(copy(value)), copy(value).note) == ([2], "kept")


UserId = typing.NewType("UserId", int)


def test_a_new_type_keeps_its_module() -> None:
    of_a_cell = typing.NewType("of_a_cell", int)
    of_a_cell.__module__ = "__main__"
    there = copy(of_a_cell)
    assert (there.__module__, there.__name__, there.__supertype__, repr(there)) == (
        "__main__", "of_a_cell", int, "__main__.of_a_cell",
    )  # fmt: skip
    assert copy(UserId) is UserId


class Item:
    """Can be referred to weakly."""


WEAK: dict[str, Any] = {
    "set": weakref.WeakSet,
    "keys": lambda items: weakref.WeakKeyDictionary(dict.fromkeys(items, 1)),
    "values": lambda items: weakref.WeakValueDictionary(dict(enumerate(items))),
}


@pytest.mark.parametrize("kind", WEAK)
def test_a_weak_collection_that_travels_alone_is_not_empty(kind: str) -> None:
    items = [Item(), Item()]
    there = copy(WEAK[kind](items))
    gc.collect()
    assert len(there) == 2
    held = weakref.ref(next(iter(there.values() if kind == "values" else there)))
    del there
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("kind", WEAK)
def test_weak_collection_drops_released_objects(kind: str) -> None:
    items = [Item(), Item()]
    own, there = copy((items, WEAK[kind](items)))
    assert len(there) == 2
    own.pop()
    gc.collect()
    assert len(there) == 1
