"""What functions on the ranks read is used by a cell as much as what its text names; what the notebook assigns again is new."""

from __future__ import annotations

import pytest

from skymagic.display import text as display
from tests.data.far import Notebook, moved, ranks

MADE = {  # the others are in the family "read by functions" of the cells that run both ways
    "instance": ("class T:\n    def __call__(self): return lr\ntrain = T()", "got = train()"),
    "hook": (
        "import types\nhooks = types.SimpleNamespace()\nhooks.f = lambda: lr",
        "got = hooks.f()",
    ),
    "of a function of the notebook": ("train = helper", "got = train()"),
    "of a class of the notebook": ("train = Helper()", "got = train()"),
    "by a query": (
        "class Df:\n    def query(self, text): return lr\ndef train(): return Df().query('a > @lr')",
        "got = train()",
    ),
}


shared = ranks(scope="module")


@pytest.fixture
def notebook(shared: Notebook) -> Notebook:
    empty = "for _name in [name for name in list(globals()) if name[:1] != '_']:\n    del globals()[_name]\nimport gc as _gc\n_gc.collect()"  # classes go with the collector
    shared.here(empty)
    shared.there(empty)
    return shared


@pytest.mark.parametrize("made", MADE)
def test_names_read_by_a_ranks_function_are_sent_again(notebook: Notebook, made: str) -> None:
    definition, call = MADE[made]
    notebook.here(
        "lr = 0.1\ndef helper(): return lr\nclass Helper:\n    def __call__(self): return lr"
    )
    notebook.there(f"{definition}\nlr")
    notebook.here("lr = 0.5")
    notebook.there(call)
    assert notebook.values("got") == [0.5] * 2


def test_a_helper_that_was_redefined(notebook: Notebook) -> None:
    notebook.here("def helper(): return 1")
    notebook.there("def train(): return helper()\ntrain()")
    notebook.here("def helper(): return 2")
    preview = notebook.shipper.prepare("got = train()", [0, 1], dry_run=True)
    (row,) = [
        line.split()
        for line in display.shipment(preview.items).splitlines()
        if line.startswith("helper")
    ]
    assert (row[1], row[-4:]) == ("function", ["used", "by", "train", "travels"])
    manifest = notebook.there("got = train()")
    assert notebook.values("got") == [2] * 2
    assert [(item.name, item.why) for item in manifest.items if item.moved] == [
        ("helper", "used by train")
    ]


def test_functions_that_are_gone_read_nothing(notebook: Notebook) -> None:
    notebook.here("lr = 1")
    notebook.there("def train(): return lr\ntrain()")
    notebook.there("del train")
    notebook.here("lr = 2")
    assert moved(notebook.there("x = 5")) == []


def test_large_value_is_compared_if_the_cell_names_its_reader(notebook: Notebook) -> None:
    notebook.here("import numpy as np\nbig = np.zeros(300_000)\nsmall = np.zeros(3)")
    notebook.there("def train(): return float(big[0] + small[0])\ntrain()")
    notebook.here("big[0] = 1")
    assert moved(notebook.there("x = 5")) == []
    assert moved(notebook.there("got = train()")) == ["big"]
    notebook.here("small[0] = 1")
    assert moved(notebook.there("x = 5")) == ["small"]
    notebook.here("big = np.ones(300_000)")
    assert moved(notebook.there("x = 5")) == ["big"]


def test_unpicklable_value_matters_only_to_cells_that_name_it(notebook: Notebook) -> None:
    notebook.here("import threading\nlock = 1")
    notebook.there("def train(): return lock\ntrain()")
    notebook.here("lock = threading.Lock()")
    assert moved(notebook.there("x = 5")) == []


def test_pulled_value_belongs_to_the_ranks(notebook: Notebook) -> None:
    notebook.here("n = 1")
    notebook.there("def train(): return n\nn = n + 6")
    notebook.here("n = 2")
    assert moved(notebook.there("x = 1", gather=["n"])) == []
    assert moved(notebook.there("x = 1", no_push=["n"])) == []
    assert moved(notebook.there("")) == []
    assert moved(notebook.there("x = 1")) == ["n"]


# assigned again: what that means for a cell is in the family of this name of the cells that run both ways


def test_present_bytes_are_not_sent_again(notebook: Notebook) -> None:
    notebook.here("import numpy as np\nbig = np.zeros(300_000)")
    notebook.there("big[0] = 5")
    notebook.here("big = np.zeros(300_000)")
    manifest = notebook.there("big")
    assert (moved(manifest), manifest.nbytes < 1000) == (["big"], True)
    assert notebook.values("big[0]") == [0] * 2


def test_unassigned_names_are_no_change(notebook: Notebook) -> None:
    notebook.here("n, m = 0, []")
    notebook.there("n, m = n + 1, m + [1]")
    notebook.here("if m:\n    n = 0\nn\nm")
    assert moved(notebook.there("n, m")) == []
    assert notebook.values("[n, m]") == [[1, [1]]] * 2
