"""Values that belong to this process or page are refused by name, and objects that answer everything do not confuse us."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

STRUCTURE = "import ctypes\nclass S(ctypes.Structure): _fields_ = [('a', ctypes.c_int)]\n"
PROXY = """
class P:
    def __init__(self, inner): object.__setattr__(self, 'inner', inner)
    def __getattr__(self, name): return getattr(object.__getattribute__(self, 'inner'), name)
    def __setattr__(self, name, value): setattr(object.__getattribute__(self, 'inner'), name, value)
    @property
    def __class__(self): return type(object.__getattribute__(self, 'inner'))
"""
CLAIMS = """
import threading, types
class C:
    def __init__(self): self.lock = threading.Lock()
    @property
    def __class__(self): return {}
x = [C()]"""
MOCK = """
import threading, types, unittest.mock
x = unittest.mock.NonCallableMagicMock(spec={})
x.lock = threading.Lock()"""
REFUSED = {
    "bar of a notebook": ("from tqdm.notebook import tqdm\nx = tqdm(range(3))", "progress bar"),
    "bar in a list": ("from tqdm.auto import tqdm\nx = [tqdm(total=3)]", "progress bar"),
    "widget": ("import ipywidgets\nx = ipywidgets.IntSlider(3)", "widget of this page"),
    "structure": (STRUCTURE + "x = S(3)", "is a C structure"),
    "class of structures": (STRUCTURE + "x = S", "is a C structure"),
    "array of structures": (STRUCTURE + "x = [(S * 2)()]", "is a C structure"),
    "pointer": ("import ctypes\nx = ctypes.pointer(ctypes.c_int(3))", "is an address"),
    "library": ("import ctypes\nx = ctypes.CDLL(None)", "is an address"),
    "function of a library": ("import ctypes\nx = ctypes.CDLL(None).getpid", "is an address"),
    "answers 5 to everything": (
        "class A:\n    def __getattribute__(self, name): return 5\nx = A()",
        "cannot be pickled",
    ),
    "answers with a function": (
        "class A:\n    def __getattribute__(self, name): return lambda *a: None\nx = [A()]",
        "cannot be pickled",
    ),
    "claims to be a function": (
        CLAIMS.format("types.FunctionType"),
        "x[0].lock (thread.lock) is a lock",
    ),
    "claims to be a class": (CLAIMS.format("type"), "x[0].lock (thread.lock) is a lock"),
    "claims to be a list": (CLAIMS.format("list"), "x[0].lock (thread.lock) is a lock"),
    "refuses to say what it is": (CLAIMS.format("1 / 0"), "x[0].lock (thread.lock) is a lock"),
    "mock of a dict": (MOCK.format("dict"), "is a lock"),
    "mock of a list": (MOCK.format("list"), "is a lock"),
    "mock of a method": (MOCK.format("[].append"), "is a lock"),
    "proxy of a lock": (PROXY + "import threading\nx = P({'a': threading.Lock()})", "cannot"),
}
ARRIVES = {
    "array": ("import ctypes\nx = (ctypes.c_int * 3)(1, 2, 3)", "list(x) == [1, 2, 3]"),
    "matrix": ("import ctypes\nx = ((ctypes.c_int * 2) * 2)((1, 2))", "list(x[0]) == [1, 2]"),
    "type of arrays": ("import ctypes\nx = ctypes.c_char * 3", "x is ctypes.c_char * 3"),
    "bar of a terminal": ("from tqdm.std import tqdm\nx = tqdm(total=3)", "x.total == 3"),
    "answers itself": (
        "class A:\n    def __getattr__(self, name): return self\nx = [A()]",
        "x[0].y is x[0]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_value_is_refused_by_name(notebook: Notebook, case: str) -> None:
    here, reason = REFUSED[case]
    notebook.run(here)
    failure = notebook.fail("%%sky_broadcast\nx;")
    assert failure.ename == "CaptureError", failure.text
    assert "x (" in failure.text
    assert reason in failure.text


@pytest.mark.parametrize("case", ARRIVES)
def test_value_survives_a_round_trip(notebook: Notebook, case: str) -> None:
    here, expression = ARRIVES[case]
    notebook.run(here)
    notebook.run(f"%%sky_broadcast -g got,x\ngot = {expression}")
    assert notebook.value("got") == [True, True]
    notebook.run("x = x[0]")
    assert notebook.value(expression)
