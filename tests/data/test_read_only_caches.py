"""A plain cell that only reads a value may fill a cache in it. That is no change: what the ranks have made of the value stays."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

CLASSES = '''
import functools

class Cached:
    def __init__(self): self.n = 1
    @functools.cached_property
    def prop(self): return 42

class Slotted:
    __slots__ = ("n", "__dict__")
    def __init__(self): self.n = 1
    @functools.cached_property
    def prop(self): return 42

class Method:
    def __init__(self): self.n = 1
    @functools.lru_cache
    def prop_(self): return 42
    prop = property(lambda self: self.prop_())

class Empty:
    n = 1
    @functools.cached_property
    def prop(self): return 42

class SlotsAlone:
    __slots__ = ("__dict__",)
    n = 1
    @functools.cached_property
    def prop(self): return 42

class Inherits(Cached):
    pass

class Holds:
    """The object that is read is inside of the one that the cell names."""
    def __init__(self): self.inner, self.n = Cached(), 1
    @property
    def prop(self): return self.inner.prop

class Frozen:
    def __init__(self): object.__setattr__(self, "n", 1)
    @functools.cached_property
    def prop(self): return [1, 2]
'''
KINDS = ("Cached", "Slotted", "Method", "Empty", "SlotsAlone", "Inherits", "Holds", "Frozen")


@pytest.mark.parametrize("kind", KINDS)
def test_reading_is_no_change(notebook: Notebook, kind: str) -> None:
    """Covers caches by ``functools``. A cache that a class keeps by hand looks like an attribute set by the user."""
    notebook.run(CLASSES)
    notebook.run(f"o = {kind}()")
    notebook.run("%%sky_broadcast\no.n = 5")
    notebook.run("o.prop")
    notebook.run("%%sky_broadcast -o seen\no.n")
    assert notebook.value("seen") == [5, 5]
    # what is done to it in the notebook does count
    notebook.run("o.n = 7")
    notebook.run("%%sky_broadcast -o seen\no.n")
    assert notebook.value("seen") == [7, 7]


BY_HAND = """
class ByHand:
    def __init__(self): self.n, self._prop = 1, None
    @property
    def prop(self):
        if self._prop is None: self._prop = 42
        return self._prop
class LeftOut(ByHand):
    def __getstate__(self): return {**self.__dict__, "_prop": None}
"""


@pytest.mark.parametrize(("kind", "seen"), [("ByHand", 1), ("LeftOut", 5)])
def test_cache_kept_by_hand_is_an_attribute(notebook: Notebook, kind: str, seen: int) -> None:
    """It counts as a change, as the page on variables says, unless the class omits it from its state."""
    notebook.run(BY_HAND)
    notebook.run(f"o = {kind}()")
    notebook.run("%%sky_broadcast\no.n = 5")
    notebook.run("o.prop")
    notebook.run("%%sky_broadcast -o seen\no.n")
    assert notebook.value("seen") == [seen] * 2


LIBRARIES = {
    "pandas": ("import pandas as pd\no = pd.DataFrame({'a': [1, 2]})", "o.loc[0, 'a'] = 5", "o['a']; o.columns; o.index.is_unique; o.index.get_loc(1); o.describe(); repr(o)", "int(o.loc[0, 'a'])"),
    "series": ("import pandas as pd\no = pd.Series([1, 2], index=['x', 'y'])", "o['x'] = 5", "o['x']; o.index.is_unique; o.value_counts(); o.to_dict()", "int(o['x'])"),
    "torch": ("import torch\no = torch.nn.Linear(2, 2)", "with torch.no_grad(): o.bias[0] = 5", "list(o.parameters()); o.state_dict(); repr(o); o(torch.ones(2)).sum().item(); o.training", "o.bias[0].item()"),
    "tensor": ("import torch\no = torch.arange(4.)", "o[0] = 5", "o.sum().item(); o.data_ptr(); o.storage_offset(); o.numpy(); repr(o)", "o[0].item()"),
    "sklearn": ("from sklearn.linear_model import LinearRegression\no = LinearRegression().fit([[0.], [1.]], [0., 1.])", "o.coef_[0] = 5", "o.predict([[2.]]); repr(o); o._repr_html_(); o.get_params()", "float(o.coef_[0])"),
    "numpy": ("import numpy as np\no = np.arange(4.)", "o[0] = 5", "o.T; o.sum(); o.flags; repr(o)", "float(o[0])"),
    "re": ("import re\no = {'p': re.compile('a+'), 'n': 1}", "o['n'] = 5", "o['p'].match('aa'); o['p'].groupindex", "o['n']"),
    "path": ("from pathlib import Path\no = {'p': Path('a/b'), 'n': 1}", "o['n'] = 5", "o['p'].parts; hash(o['p']); str(o['p']); o['p'] == Path('c')", "o['n']"),
    "datetime": ("import datetime, fractions\no = {'d': datetime.datetime(2020, 1, 1), 's': 'text', 'n': 1}", "o['n'] = 5", "hash(o['d']); hash(o['s']); o['s'].encode(); repr(o)", "o['n']"),
    "exception": ("o = ValueError('x'); o.n = 1", "o.n = 5", "\ntry: raise o\nexcept ValueError: pass", "o.n"),
    "generator": ("import random\no = {'r': random.Random(1), 'n': 1}", "o['n'] = 5", "o['r'].getstate()", "o['n']"),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
def test_looking_at_a_librarys_object_is_no_change(notebook: Notebook, library: str) -> None:
    make, change, look, value = LIBRARIES[library]
    if library in ("pandas", "torch", "sklearn", "numpy"):
        pytest.importorskip(library)
    notebook.run(make)
    notebook.run(f"%%sky_broadcast\n{change}")
    notebook.run(look)
    notebook.run(f"%%sky_broadcast -o seen\n{value}")
    assert notebook.value("seen") == [5, 5]
