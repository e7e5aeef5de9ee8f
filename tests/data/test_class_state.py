"""What a rank changes in a class of the notebook stays there, though instances of the class travel after it."""

from __future__ import annotations

import pytest

from tests.data.far import Notebook, ranks

notebook = ranks(scope="module")


ITEM = """
import enum, dataclasses, numpy as np
class Base:
    seen = []
class Item(Base):
    count = 0
    all = []
    weights = np.zeros(5)
    def __init__(self, n):
        super().__init__()
        self.n = n
    def shown(self): return ["notebook", self.n]
    @classmethod
    def make(cls): return cls(1)
Item.first = Item(0)
one = Item(1)
"""
CHANGES = {  # the others are in the family "state of classes" of the cells that run both ways
    "list": ("Item.all.append(5)", "Item.all", [5]),
    "array": ("Item.weights[1] = 7", "float(Item.weights.sum())", 7.0),
    "base": ("Base.seen.append(1)", "Base.seen", [1]),
    "instance": ("Item.first.n = 9", "Item.first.n", 9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_class_changes_on_ranks_are_kept(notebook: Notebook, change: str) -> None:
    cell, expression, value = CHANGES[change]
    notebook.here(ITEM)
    notebook.there(f"Item, Base, one\n{cell}")
    notebook.here("two = Item(2)")
    notebook.there(f"two.n\ngot = {expression}")
    assert notebook.values("got") == [value] * 2
    assert notebook.values("[type(two) is Item, isinstance(one, Item)]") == [[True, True]] * 2


def test_a_change_in_the_notebook_replaces_it(notebook: Notebook) -> None:
    notebook.here(ITEM)
    notebook.there("Item, Base, one\nItem.count = 5")
    notebook.here("Item.all.append(2); two = Item(2)")
    notebook.there("two")
    assert notebook.values("[Item.count, Item.all]") == [[0, [2]]] * 2


def test_fresh_replaces_it(notebook: Notebook) -> None:
    notebook.here(ITEM)
    notebook.there("Item, Base, one\nItem.count = 5")
    notebook.there("one", fresh=True)
    assert notebook.values("Item.count") == [0] * 2


VIRTUAL = {
    "array": (
        "import numpy as np\nz = np.broadcast_to(np.float64(2.5), (1_000_000, 100_000))",
        "float(z[3, 4])",
    ),
    "row": (
        "import numpy as np\nz = np.broadcast_to(np.arange(3.0), (1_000_000_000_000, 3))",
        "float(z[5, 2] + 0.5)",
    ),
    "windows": (
        "import numpy as np\nz = np.lib.stride_tricks.sliding_window_view(np.full(500_000, 2.5), 400_000)",
        "float(z[9, 9])",
    ),
    "tensor": (
        "import torch\nz = torch.full((1, 1), 2.5).expand(1_000_000, 100_000)",
        "float(z[3, 4])",
    ),
}


@pytest.mark.parametrize("kind", VIRTUAL)
def test_a_value_of_virtual_size_is_its_memory(notebook: Notebook, kind: str) -> None:
    make, expression = VIRTUAL[kind]
    notebook.here(make)
    assert notebook.there(f"got = {expression}").nbytes < 8_000_000
    assert notebook.values("got") == [2.5] * 2
    assert notebook.there("z").nbytes == 0
    notebook.here("z = z[1:]")
    notebook.there("z")
    assert notebook.values("z.shape[0]") == [notebook.namespace["z"].shape[0]] * 2


LISTED = """
class Listed:
    all = []
    def __init__(self, n):
        self.n = n
        self.all.append(self)
first = Listed(1)
"""


def test_instance_listed_by_its_class_keeps_its_identity(
    notebook: Notebook,
) -> None:
    notebook.here(LISTED)
    notebook.there("second = Listed(first.n + 1)")
    notebook.here("holder = [first]")
    notebook.there(
        "got = [holder[0] is first, first is Listed.all[0], second is Listed.all[1], len(Listed.all)]"
    )
    assert notebook.values("got") == [[True, True, True, 2]] * 2
