"""Snapshots of many small arrays: equal to themselves, and to nothing that has changed in any way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skymagic.data.values.snapshots import LEAST, Snapshot

torch = pytest.importorskip("torch")

State = dict[str, Any]


def state() -> State:
    """Half tensors, half arrays, and some that are nested."""
    count = LEAST
    return {
        **{f"weight {n}": torch.full((3, 2), n / 2) for n in range(count)},
        **{f"array {n}": np.full(4, n / 3) for n in range(count)},
        "step": 12345678,
        "nested": [{"bias": torch.zeros(7)}, (np.arange(5), "text")],
    }


def replace_tensor(one: State) -> None:
    one["weight 3"] = one["weight 3"] + 1


def share_memory(one: State) -> None:
    one["weight 4"].data = one["weight 5"].data


def swap(one: State) -> None:
    one["weight 1"], one["weight 2"] = one["weight 2"], one["weight 1"]


def rename(one: State) -> None:
    one["another"] = one.pop("step")


def reorder(one: State) -> None:
    one["step"] = one.pop("step")


def in_the_nested_array(one: State) -> None:
    one["nested"][1][0][4] = 9


def with_gradient(one: State) -> None:
    one["weight 0"].requires_grad_()
    one["weight 0"].sum().backward()


CHANGES: dict[str, Callable[[State], object]] = {
    "an element": lambda one: one["weight 7"].__setitem__((0, 0), 5),
    "through its data": lambda one: one["weight 7"].data.add_(1),
    "an element of an array": lambda one: one["array 7"].__setitem__(0, 5),
    "in a nested list": lambda one: one["nested"][0]["bias"].add_(1),
    "in a nested array": in_the_nested_array,
    "another number": lambda one: one.__setitem__("step", 12345679),
    "a shape": lambda one: one["weight 7"].resize_(2, 3),
    "an array's shape": lambda one: setattr(one["array 7"], "shape", (2, 2)),
    "an array's dtype": lambda one: setattr(one["array 7"], "dtype", np.dtype("i8")),
    "a transposition": lambda one: one["weight 7"].t_(),
    "a gradient wanted": lambda one: one["weight 7"].requires_grad_(),
    "a gradient": with_gradient,
    "a hook": lambda one: one["weight 7"].requires_grad_().register_hook(lambda grad: grad),
    "an attribute": lambda one: setattr(one["weight 7"], "note", 1),
    "another tensor": replace_tensor,
    "shared memory": share_memory,
    "two swapped": swap,
    "a key": rename,
    "the order": reorder,
    "one less": lambda one: one.pop("array 0"),
    "one more": lambda one: one.__setitem__("more", 1),
    "a set": lambda one: one.__setitem__("step", {1}),
}


def test_what_has_not_changed_is_held() -> None:
    one = state()
    taken = Snapshot.take(one)
    assert taken is not None
    assert Snapshot.take(one) == taken
    assert Snapshot.take(one) == taken
    assert Snapshot.take(dict(one)) != taken
    assert Snapshot.take(None) != taken


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(change: str) -> None:
    one = state()
    taken = Snapshot.take(one)
    assert taken is not None
    CHANGES[change](one)
    assert Snapshot.take(one) != taken


def test_nothing_is_kept_alive() -> None:
    one = state()
    taken = Snapshot.take(one)
    dead = weakref.ref(one["weight 3"]), weakref.ref(one["array 3"])
    del one
    gc.collect()
    assert [each() for each in dead] == [None, None]
    assert taken is not None


@pytest.mark.parametrize(
    "add",
    [
        lambda: torch.zeros(10).requires_grad_() * 2,
        lambda: torch.zeros(3, 4).t(),
        lambda: torch.zeros(100_000),
        lambda: torch.zeros(0),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.zeros(3).to_sparse(),
        lambda: np.array([object()]),
        lambda: np.zeros((3, 4)).T,
        lambda: np.float64(3),
        lambda: {1, 2},
        lambda: bytearray(3),
        lambda: object(),
        lambda: "x" * 2_000_000,
    ],
)
def test_what_is_not_small_and_plain_is_pickled(add: Callable[[], Any]) -> None:
    assert Snapshot.take({**state(), "odd": add()}) is None


def test_arrays_may_be_nested() -> None:
    assert Snapshot.take({"model": state()}) is not None
    assert Snapshot.take(([state()],)) is not None


def test_few_arrays_are_pickled() -> None:
    assert Snapshot.take({str(n): np.zeros(3) for n in range(LEAST - 1)}) is None
