"""Functions made on a rank find what the notebook defines later, however the cell reaches them."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

REACHED = {
    "dict": ("box = {'f': f}", "box['f']()"),
    "list": ("box = [f]", "box[0]()"),
    "attribute": ("import types\nbox = types.SimpleNamespace(f=f)", "box.f()"),
    "instance": ("class C:\n    def m(self): return later\nbox = C()", "box.m()"),
    "partial": ("import functools\nbox = {'f': functools.partial(f)}", "box['f']()"),
    "lambda": ("box = {'f': lambda: later}", "box['f']()"),
    "alias": ("box = f", "box()"),
    "closure": (
        "def make():\n    def inner(): return later\n    return inner\nbox = (make(),)",
        "box[0]()",
    ),
}


@pytest.mark.parametrize("way", REACHED)
def test_reached_function_finds_later_names(notebook: Notebook, way: str) -> None:
    made, call = REACHED[way]
    notebook.run(f"%%sky_broadcast\ndef f(): return later\n{made}")
    notebook.run("later = helper = 5")
    notebook.run(f"%%sky_broadcast -o got\n{call}")
    assert notebook.value("got") == [5, 5]
    notebook.run("later = 6")
    notebook.run(f"%%sky_broadcast -o got\n{call}")
    assert notebook.value("got") == [6, 6]


CACHED = "import functools\nclass C:\n    def __init__(self): self.n = 1\n    @functools.cached_property\n    def twice(self): return [self.n * 2]\n"
HOLDERS = {
    "instance": ("c = C()", "c"),
    "in a dict": ("c = {'a': C()}", "c['a']"),
    "in a list of two": ("c = [C(), C()]", "c[0]"),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass D(C):\n    n: int = 1\nc = D()",
        "c",
    ),
    "subclass of dict": ("class D(C, dict): pass\nc = D()", "c"),
    "own state": (
        "class D(C):\n    def __getstate__(self): return dict(self.__dict__)\nc = D()",
        "c",
    ),
    "torch-like": (
        "class D(C):\n    def __setstate__(self, state): self.__dict__.update(state)\nc = D()",
        "c",
    ),
}


@pytest.mark.parametrize("where", ["notebook", "rank"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_reading_a_cached_property_is_no_change(
    notebook: Notebook, holder: str, where: str
) -> None:
    make, path = HOLDERS[holder]
    notebook.run(CACHED + make)
    notebook.run(f"%%sky_broadcast\n{path}.n = 7;")
    if where == "notebook":
        notebook.run(f"{path}.twice")
    else:
        notebook.run(f"%%sky_broadcast\n{path}.twice;")
    notebook.run(f"%%sky_broadcast -o got\n{path}.n")
    assert notebook.value("got") == [7, 7]
    notebook.run(f"{path}.n = 3")
    notebook.run(f"%%sky_broadcast -o got\n{path}.n")
    assert notebook.value("got") == [3, 3]
