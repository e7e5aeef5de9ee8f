"""Notes about the notebook's own settings appear only when they are true."""

from __future__ import annotations

import re
import sys

import IPython
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import os, decimal, json, json.decoder", scope="function")
NOTED = re.compile(r"\b(os|json|decimal)[\w.\[\]']*: ")
"""A note about an attribute begins with its name."""
USE = "%%sky_broadcast\nimport os, decimal, json\nos, decimal, json;"


@pytest.mark.parametrize(
    "cell",
    [
        "os.environ['MY_FLAG'] = '1'",
        "def never(): decimal.mine = 1",
        "async def never(): decimal.mine = 1",
        "class C:\n    def never(self): os.environ['MY_FLAG'] = '1'",
        "if 1:\n    def never(): json.mine = 1",
        "def branch(x):\n    if x: json.mine = 1\nbranch(0)",
        "def local():\n    json = os.path\n    json.mine = 1\nlocal()",
        "def parts():\n    json.mine = 1\n    yield\nparts();",
        "def outer():\n    def inner(): json.mine = 1\nouter()",
        "if 0: json.mine = 1",
    ],
)
def test_no_note(notebook: Notebook, cell: str) -> None:
    notebook.run(cell)
    assert not NOTED.search(notebook.run(USE).said)


@pytest.mark.parametrize(
    "cell",
    [
        "decimal.mine = 1",
        "if 1:\n    json.mine = 1",
        "class C:\n    decimal.other = 2",
        "def setup(): decimal.mine3 = 3\nsetup()",
        "def set_up(value):\n    json.mine4 = value\nfor each in (1, 2): set_up(each)",
        "def inner(): json.mine5 = 1\ndef outer(): return inner()\nouter()",
        "def imports():\n    import decimal as d\n    d.mine6 = 4\nimports()",
        "async def later(): json.mine7 = 5\nawait later()",
        "import functools\ndef logged(f):\n    @functools.wraps(f)\n    def call(): return f()\n    return call\n"
        "@logged\ndef wrapped(): json.mine8 = 6\nwrapped()",
    ],
)
def test_note(notebook: Notebook, cell: str) -> None:
    notebook.run(cell)
    shown = notebook.run(USE)
    assert NOTED.search(shown.said)
    notebook.run(
        "for m in (decimal, json):\n    for name in [n for n in vars(m) if n[:4] == 'mine' or n == 'other']:\n        delattr(m, name)"
    )


MADE = {
    "plain": "made = types.ModuleType('made_here')",
    "subclass": "class Lazy(types.ModuleType):\n    def __getattr__(self, name): raise AttributeError(name)\nmade = Lazy('made_here')",
    "dotted": "made = types.ModuleType('json.made_here')",
}


@pytest.mark.parametrize("kind", MADE)
def test_module_made_in_the_notebook_travels_without_a_note(notebook: Notebook, kind: str) -> None:
    notebook.run(f"import types\n{MADE[kind]}\nmade.value = 1")
    for value in (1, 2):
        shown = notebook.run("%%sky_broadcast -o r\nmade.value;")
        assert not NOTED.search(shown.said)
        assert notebook.value("r") == [value, value]
        notebook.run("made.value = 2")


def test_note_for_a_function_of_an_earlier_cell(golden: Golden, notebook: Notebook) -> None:
    notebook.run("def much_later(): json.decoder.later = 1")
    assert not NOTED.search(notebook.run(USE).said)
    notebook.run("much_later()")
    golden.line(notebook.run(USE).said, "json.decoder.later: ")
    notebook.run("del json.decoder.later")


EDITS = {
    "function": ("def f(): return 1\n", "def f(): return 22\n"),
    "nested": (
        "def f():\n    def g(): return 1\n    return g()\n",
        "def f():\n    def g(): return 22\n    return g()\n",
    ),
    "constant": ("X: int = 1\ndef f(): return X\n", "X: int = 22\ndef f(): return X\n"),
    "computed": ("X = len('a')\ndef f(): return X\n", "X = len('abc')\ndef f(): return X\n"),
    "method": (
        "class C:\n    def f(self): return 1\ndef f(): return C().f()\n",
        "class C:\n    def f(self): return 22\ndef f(): return C().f()\n",
    ),
    "shifted": (
        "import logging\nlogger = logging.getLogger(__name__)\ndef g(): return 3\ndef f(): return 1\n",
        "import logging\nlogger = logging.getLogger(__name__)\n\n# more\ndef g(): return 3\ndef f(): return 22\n",
    ),
    "decorated": (
        "import functools\n@functools.cache\ndef f(): return 1\n",
        "import functools\n@functools.cache\ndef f(): return 22\n",
    ),
}


@pytest.mark.parametrize("mode", ["2", "2 --full", "3", "1"])
@pytest.mark.parametrize("edit", EDITS)
def test_autoreload_has_the_new_text(notebook: Notebook, edit: str, mode: str) -> None:
    if IPython.version_info < (8,) and mode in ("2 --full", "3"):
        pytest.skip(f"%autoreload {mode} is new in IPython 8")
    if IPython.version_info < (8,) and sys.version_info >= (3, 12):
        pytest.skip("autoreload of IPython 7 needs the module imp, which Python 3.12 has not")
    name = f"reloaded_{edit}_{mode.replace(' --', '_')}"
    path = notebook.folder / f"{name}.py"
    before, after = EDITS[edit]
    path.write_text(before)
    imported = f"%aimport {name}" if mode == "1" else f"import {name}"
    notebook.run(f"%load_ext autoreload\n%autoreload {mode}\n{imported}")
    notebook.run(f"%%sky_broadcast\n{name}.f()")
    path.write_text(after)
    shown = notebook.run(f"%%sky_broadcast -o seen\n{name}.f()")
    notebook.run(f"here = {name}.f()\n%autoreload 0")
    assert notebook.value("seen") == [notebook.value("here")] * 2
    assert "was edited" not in shown.text
    path.write_text(after + "\ndef added(): return len('added')\n")  # and nothing reloads it now
    assert "was edited" in notebook.run(f"%%sky_broadcast\n{name}.f()").text


SHARED = {
    "pandas.NA": ("import pandas as pd", "pd.NA"),
    "pandas.NaT": ("import pandas as pd", "pd.NaT"),
    "timestamp": ("import pandas as pd", "pd.Timestamp('2020')"),
    "offset": ("import pandas as pd", "pd.offsets.Day()"),
    "None": ("", "None"),
    "Ellipsis": ("", "..."),
    "enum": ("import enum\nclass E(enum.Enum):\n    A = 1", "E.A"),
    "installed enum": ("import signal", "signal.Signals.SIGINT"),
    "dtype": ("import numpy as np", "np.dtype([('a', 'i4')])"),
    "numpy scalar": ("import numpy as np", "np.float32(1)"),
    "torch dtype": ("import torch", "torch.float32"),
    "module": ("import json", "json"),
    "class": ("class C:\n    x = [1]", "C"),
    "installed class": ("import collections", "collections.OrderedDict"),
    "function": ("def f(): return [1]", "f"),
    "missing": ("import dataclasses", "dataclasses.MISSING"),
    "time zone": ("import zoneinfo", "zoneinfo.ZoneInfo('Europe/Berlin')"),
    "address": ("import ipaddress", "ipaddress.ip_address('1.1.1.1')"),
    "frozen": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass F:\n    a: int = 1",
        "F()",
    ),
}
HOLDERS = {
    "list": "[shared]",
    "frame": "pd.DataFrame({'a': pd.Series([shared, 1], dtype=object)})",
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", SHARED)
def test_singletons_are_not_shared_references(notebook: Notebook, kind: str, holder: str) -> None:
    train, test = (
        f"{name}_{kind.replace(' ', '_').replace('.', '_')}_{holder}" for name in ("train", "test")
    )
    setup, value = SHARED[kind]
    notebook.run(f"import pandas as pd\n{setup}\nshared = {value}")
    notebook.run(f"{train} = {HOLDERS[holder]}\n{test} = {HOLDERS[holder]}")
    notebook.run(f"%%sky_broadcast\n{train} = {train}.copy()")
    assert "refers to" not in notebook.run(f"%%sky_broadcast\n{test}, {train};").text


def test_a_shared_list_is_a_reference(golden: Golden, notebook: Notebook) -> None:
    notebook.run("shared = [1]\nmine_train, mine_test = [shared], [shared]")
    notebook.run("%%sky_broadcast\nmine_train = mine_train.copy()")
    shown = notebook.run("%%sky_broadcast\nmine_test, mine_train;")
    golden.line(shown.text, "mine_test ")
