"""What a cell deletes or rebinds is freed within the cell, wherever it came from."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import gc, weakref, numpy as np", scope="function")

VALUES = {
    "instance": ("x = Big()", "weakref.ref(x)"),
    "array": ("x = np.zeros(300_000)", "weakref.ref(x)"),
    "in a list": ("x = [Big()]", "weakref.ref(x[0])"),
    "in a dict of lists": ("x = {'a': [Big()]}", "weakref.ref(x['a'][0])"),
    "in a tuple": ("x = (Big(), 1)", "weakref.ref(x[0])"),
    "set": ("x = {1, 2}", "weakref.ref(x)"),
    "function": ("def x(): return 1", "weakref.ref(x)"),
    "in a cycle": ("x = Big(); x.me = x", "weakref.ref(x)"),
}
CLASS = "class Big:\n    pass"


@pytest.mark.parametrize("origin", ["notebook", "earlier cell"])
@pytest.mark.parametrize("value", VALUES)
def test_deleted_value_is_freed_within_the_cell(
    notebook: Notebook, value: str, origin: str
) -> None:
    make, reference = VALUES[value]
    notebook.run(CLASS)
    if origin == "notebook":
        notebook.run(make)
        notebook.run("%%sky_broadcast\nx;")
    else:
        notebook.run(f"%%sky_broadcast\n{make}")
    notebook.run(
        f"%%sky_broadcast -o freed\nseen = {reference}\ndel x\ngc.collect()\nseen() is None"
    )
    assert notebook.value("freed") == [True, True]


@pytest.mark.parametrize("origin", ["notebook", "earlier cell"])
def test_rebinding_holds_one_object_at_a_time(notebook: Notebook, origin: str) -> None:
    notebook.run(
        "class Net:\n    alive = 0\n    def __init__(self): self.count()\n"
        "    def __setstate__(self, state): self.count()\n    def __getstate__(self): return {'a': 1}\n"
        "    def count(self): type(self).alive += 1; type(self).most = type(self).alive\n"
        "    def __del__(self): type(self).alive -= 1"
    )
    if origin == "notebook":
        notebook.run("net = Net()")
        notebook.run("%%sky_broadcast\nnet;")
    else:
        notebook.run("%%sky_broadcast\nnet = Net()")
    notebook.run(
        "%%sky_broadcast -o most\nNet.most = Net.alive = 1\nfor _i in range(3):\n    net = None\n    net = Net()\nNet.most"
    )
    assert notebook.value("most") == [1, 1]
    notebook.run("net = 5")
    notebook.run("%%sky_broadcast -o kind\ntype(net).__name__")
    assert notebook.value("kind") == ["int", "int"]


def test_rebound_name_keeps_the_ranks_value(notebook: Notebook) -> None:
    notebook.run("x = {'a': 1}; y = [1]; z = 'text' * 1000; w = np.zeros(3)")
    notebook.run("%%sky_broadcast\nx, y, z, w")
    notebook.run(
        "%%sky_broadcast\nx = None\nx = {'b': 2}\ny = None\ny = [2]\nz = None\nz = 'other' * 1000\nw = None\nw = np.ones(3)"
    )
    notebook.run("%%sky_broadcast -o got\n(x, y, z[:5], float(w.sum()))")
    assert notebook.value("got") == [({"b": 2}, [2], "other", 3.0)] * 2


def test_shown_value_is_freed_once_its_names_are_gone(notebook: Notebook) -> None:
    notebook.run(CLASS)
    notebook.run("%%sky_broadcast\nx = Big()\nx;")
    notebook.run("%%sky_broadcast\n5")
    notebook.run("%%sky_broadcast\n6")
    notebook.run(
        "%%sky_broadcast -o freed\nseen = weakref.ref(x)\ndel x\ngc.collect()\nseen() is None"
    )
    assert notebook.value("freed") == [True, True]


def test_failed_cell_does_not_keep_its_frames(notebook: Notebook) -> None:
    notebook.run(CLASS)
    notebook.fail(
        "%%sky_broadcast\ndef work():\n    global seen\n    big = Big()\n    seen = weakref.ref(big)\n    1 / 0\nwork()"
    )
    notebook.run("%%sky_broadcast -o freed\ngc.collect()\nseen() is None")
    assert notebook.value("freed") == [True, True]
