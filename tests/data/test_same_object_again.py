"""An assignment on a rank counts, also where it binds the object that the name has on the rank already."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

WAYS = {
    "statement": "d = 1",
    "function": "f()",
    "method": "C().m()",
    "object": "box['f']()",
    "condition": "if len('a'):\n    d = 1",
    "loop target": "for d in [1]:\n    pass",
    "walrus": "if (d := 1):\n    pass",
    "unpacking": "d, e = 1, 2",
    "with": "import contextlib\nwith contextlib.nullcontext(1) as d:\n    pass",
    "globals": "globals()['d'] = 1",
    "globals update": "globals().update(d=1)",
    "nested function": "def g():\n    global d\n    d = 1\ng()",
    "try": "try:\n    d = 1\nfinally:\n    pass",
    "augmented": "d -= 2",
}
MADE = (
    "%%sky_broadcast\nd = 1\ndef f():\n    global d\n    d = 1\nbox = {'f': f}\n"
    "class C:\n    def m(self):\n        global d\n        d = 1"
)


@pytest.mark.parametrize("way", WAYS)
def test_assignment_of_the_same_object_counts(notebook: Notebook, way: str) -> None:
    notebook.run(MADE)
    notebook.run("d = 3")
    notebook.run(f"%%sky_broadcast\n{WAYS[way]}")
    notebook.run("%%sky_broadcast -o got\nd")
    assert notebook.value("got") == [1, 1]
    notebook.run("d = 4")
    notebook.run("%%sky_broadcast -o got\nd")
    assert notebook.value("got") == [4, 4]


@pytest.mark.parametrize("value", ["None", "True", "'a'", "()", "int"])
def test_constants_count_too(notebook: Notebook, value: str) -> None:
    notebook.run(MADE.replace("d = 1", f"d = {value}"))
    notebook.run("d = 3")
    notebook.run("%%sky_broadcast\nf()")
    notebook.run(f"%%sky_broadcast -o got\nd is {value} or d == {value}")
    assert notebook.value("got") == [True, True]


def test_assignment_before_an_error_counts(notebook: Notebook) -> None:
    notebook.run(MADE)
    notebook.run("d = 3")
    notebook.fail("%%sky_broadcast\nd = 1\n1 / 0")
    notebook.run("%%sky_broadcast -o got\nd")
    assert notebook.value("got") == [1, 1]


def test_function_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nd = 1")
    notebook.run("d = 3\ndef f():\n    global d\n    d = 1")
    notebook.run("%%sky_broadcast\nf()")
    notebook.run("%%sky_broadcast -o got\nd")
    assert notebook.value("got") == [1, 1]


def test_assignment_that_did_not_run_is_none(notebook: Notebook) -> None:
    notebook.run(MADE)
    notebook.run("d = 3")
    notebook.run("%%sky_broadcast\nif not len('a'):\n    d = 1")
    notebook.run("%%sky_broadcast -o got\nd")
    assert notebook.value("got") == [3, 3]
