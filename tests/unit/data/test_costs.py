"""What a use of a value of many small parts costs the notebook: counted in calls and pickles, not in seconds."""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pandas
import pytest
import torch

from skymagic.content.base import Buffer
from skymagic.content.store import NodeStore, create, remove
from skymagic.data.shipping.shipper import Shipper
from skymagic.data.values import pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for

COUNT = 1_000


class Costs:
    """A notebook that sends one variable, and the calls of functions that this takes."""

    def __init__(self, directory: str, folder: Path) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.store = NodeStore(directory)
        self.shipper = Shipper(self.store, self.namespace, str(folder))

    def use(self) -> Counter[str]:
        """How often functions were called, by their names, C's too, for a cell that uses ``v``."""
        calls: Counter[str] = Counter()

        def called(frame: FrameType, event: str, function: Any) -> None:
            if event in ("call", "c_call"):
                calls[frame.f_code.co_name if event == "call" else function.__name__] += 1

        before = sys.getprofile()
        gc.collect()
        gc.disable()  # callbacks of collections are calls too
        sys.setprofile(called)
        try:
            manifest = self.shipper.prepare("v", [0])
            self.shipper.bound(manifest, 0, completed=True)
        finally:
            sys.setprofile(before)
            gc.enable()
        return calls


@pytest.fixture
def costs(tmp_path: Path) -> Iterator[Costs]:
    directory = create()
    made = Costs(directory, tmp_path)
    yield made
    made.store.close()
    remove(directory)


KINDS: dict[str, tuple[Callable[[int], Any], int]] = {
    "tensor": (lambda n: torch.full((10,), float(n)), 45),
    "parameter": (lambda n: torch.nn.Parameter(torch.full((2, 5), float(n))), 45),
    "array": (lambda n: np.full(10, n / 2), 20),
}
"""How one is made, and how many calls it may take to see that it has not changed."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_use_of_many_small_parts_takes_few_calls_for_each(costs: Costs, kind: str) -> None:
    make, most = KINDS[kind]
    costs.namespace["v"] = value = {f"name {n}": make(n) for n in range(COUNT)}
    costs.use()
    same = costs.use()  # pickled again, after a snapshot
    assert same.total() / COUNT < most, same.most_common(12)
    # nobody asks what is in a value that stays where it is: the pickler's memo is not listed
    assert same["copy"] < 10
    for _ in range(2):
        unchanged = costs.use()
        assert unchanged.total() / COUNT < 14, unchanged.most_common(12)
        assert unchanged["dump"] < 10
    with torch.no_grad():
        value["name 7"][0] = 99
    changed = costs.use()
    # one of them has changed: all are looked at and sent, but nothing else is done for each again
    assert changed.total() < 1.6 * same.total(), (changed - same).most_common(12)
    assert changed["copy"] < 10
    assert (
        changed["dump"] <= same["dump"] + 2
    )  # whether it looks the same each time need not be tried
    assert costs.use().total() < same.total()  # it changed, so no snapshot is taken yet
    assert costs.use().total() < same.total() + COUNT
    assert costs.use() == unchanged


def test_a_use_of_many_small_parts_causes_no_collection(costs: Costs) -> None:
    """A full collection would visit all objects of the process; afterwards the collector is as before."""
    collections: list[str] = []

    def collected(phase: str, _: dict[str, int]) -> None:
        code = sys._getframe(1).f_code
        collections.append(f"{phase} in {code.co_name} of {code.co_filename}")

    costs.namespace["v"] = {f"name {n}": torch.full((10,), float(n)) for n in range(COUNT)}
    gc.callbacks.append(collected)
    try:
        costs.shipper.prepare("v", [0])
    finally:
        gc.callbacks.remove(collected)
    assert [each for each in collections if "data/values" in each] == []
    assert gc.isenabled()
    gc.disable()
    try:
        costs.shipper.prepare("v", [0])
        assert not gc.isenabled()
    finally:
        gc.enable()


# the short way does what the long one does


def mixed() -> list[Any]:
    """Small arrays and tensors in all kinds of containers, together with what is none."""
    line, tensor, pairs = np.arange(6.0), torch.arange(4.0), (np.ones(2), torch.ones(2))
    leaf, large = grown(), np.zeros(10_000)
    state = {"step": torch.tensor(3.0), "average": torch.ones(5), "names": ["a", "b"], "rate": 0.1}
    itself: list[Any] = [np.ones(3)]
    itself.append((itself, {"again": itself}))
    return [
        {"a": line, "b": tensor},
        [np.full(3, n) for n in range(5)],
        {
            "state": {0: state, 1: {**state, "step": torch.tensor(4.0)}},
            "groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        [line, line[2:], tensor, tensor[1:]],
        [line, line, pairs, pairs],
        [leaf, torch.nn.Parameter(torch.ones(2)), torch.ones(3, 2).T],
        [line, large, large[5:8], torch.zeros(100_000)[5:8]],
        {"frame": pandas.DataFrame({"x": [1, 2], "y": [3.0, 4.0]}), "array": line},
        (line, {1, 2}, bytearray(b"x"), frozenset((3,))),
        [line, np.ones(2).view(np.matrix), np.array(["a", None], object), np.arange(0)],
        itself,
        [line, lambda: line, types.SimpleNamespace(part=line)],
        [(line,), ((line,),)],
        [line, 3 + 4j],
        [leaf, torch.ones(2)],
    ]


@pytest.mark.parametrize("number", range(15))
def test_small_parts_are_described_the_same_on_a_second_look(
    number: int,
) -> None:
    value = mixed()[number]
    pickled = pickling.dumps(value, {"__name__": "__main__"}, folder="/nowhere")
    known = pickling.leaves(pickled)
    reduce = pickling.reducer({"__name__": "__main__"})
    fast, slow = (
        contents_hash(value, reduce, form_for, lambda memory: None, leaves)
        for leaves in (known, {})
    )
    assert fast == slow
    assert pickling.objects(pickled) == pickling.numbers(pickled).keys()


def copy(value: Any) -> Any:
    pickled = pickling.dumps(value, {})
    return pickling.loads(
        pickled.pieces, [bytearray(cast("Buffer", each)) for each in pickled.buffers], {}
    )


def contents(value: Any) -> str:
    return contents_hash(value, pickling.reducer({}), form_for, lambda memory: None)


def grown() -> Any:
    leaf = torch.arange(4.0, requires_grad=True)
    (leaf * 3).sum().backward()
    return leaf


BASE = torch.arange(24.0).reshape(4, 6)


def test_small_tensors_and_arrays_keep_shared_memory() -> None:
    whole, line = torch.arange(12.0).reshape(3, 4), np.arange(6)
    first, second, array, part, same = copy([whole[0], whole[:, 1], line, line[2:], whole.numpy()])
    first[1] = 50
    array[3] = 60
    assert (second[0].item(), part[1], same[0, 1]) == (50, 60, 50)


def test_small_parts_are_identified_by_number_not_by_layout() -> None:
    column = np.arange(12.0).reshape(3, 4)[:, 1]
    assert contents(column) == contents(column.copy())
    assert contents(BASE[:, 1]) == contents(BASE[:, 1].clone())
    assert contents(np.zeros(2)) != contents(np.zeros((1, 2)))
    assert contents(np.zeros(2)) != contents(np.zeros(2, "i8"))
    assert contents(np.zeros(1)) != contents(np.full(1, -0.0))
    shared = np.zeros(3)
    assert contents([shared, shared[:2]]) != contents([shared, np.zeros(2)])
    ones = torch.ones(2)
    assert contents(ones) != contents(torch.nn.Parameter(ones))
    assert contents([ones, ones[:1]]) != contents([ones, torch.ones(1)])


def test_a_storage_of_which_little_is_used_is_cut() -> None:
    large = torch.zeros(100_000)
    sent = pickling.dumps([large[5:8], torch.ones(2)], {})
    assert sent.nbytes < 2_000
    assert torch.equal(copy([large[5:8]])[0], large[5:8])
