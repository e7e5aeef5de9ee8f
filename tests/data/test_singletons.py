"""What each process has one of: a name of it in a cell means the rank's own, which the library itself reads."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from skymagic.data.values import rebuild
from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

MODULES = {
    "torch.backends.cudnn": ("import torch.backends.cudnn as m", "torch.backends.cudnn"),
    "mkldnn, from its parent": ("from torch.backends import mkldnn as m", "torch.backends.mkldnn"),
    "torch.backends": ("import torch; m = torch.backends", "torch.backends"),
    "torch.ops": ("import torch; m = torch.ops", "torch.ops"),
    "torch.classes": ("import torch; m = torch.classes", "torch.classes"),
    "a namespace of operators": ("import torch; m = torch.ops.aten", "torch.ops.aten"),
    "an operator": ("import torch; m = torch.ops.aten.add", "torch.ops.aten.add"),
    "an overload": ("import torch; m = torch.ops.aten.add.Tensor", "torch.ops.aten.add.Tensor"),
    "a higher-order operator": (
        "import torch; m = torch.ops.higher_order.cond",
        "torch.ops.higher_order.cond",
    ),
    "torch._dynamo.config": (
        "import torch._dynamo.config as m",
        "__import__('torch._dynamo.config')._dynamo.config",
    ),
    "transformers": ("import transformers as m", "__import__('sys').modules['transformers']"),
    "six.moves": ("import six.moves as m", "__import__('sys').modules['six.moves']"),
    "jax.config": ("from jax import config as m", "__import__('jax').config"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_module_is_the_ranks_own(notebook: Notebook, kind: str) -> None:
    cell, own = MODULES[kind]
    if "jax" in kind and find_spec("jax") is None:
        pytest.skip("jax is not installed")
    notebook.run(f"import torch\n{cell}\nnested = {{'m': [m]}}")
    assert (
        seen(notebook, f"import torch\nown = {own}\nm is own, nested['m'][0] is own")
        == [(True, True)] * 2
    )
    notebook.run("%%sky_broadcast -o back\n[m]")
    assert notebook.value("[each[0] is m for each in back]") == [True, True]


def test_assignment_acts_on_the_ranks_module(notebook: Notebook) -> None:
    notebook.run(
        "import torch\nimport torch.backends.cudnn as cudnn\nfrom torch.backends import mkldnn\n"
        "import torch._dynamo.config as dynamo\nbefore = cudnn.benchmark, cudnn.deterministic\n"
        "def deterministic(): cudnn.deterministic = True"
    )
    cell = (
        "import torch\nbefore_here = mkldnn.enabled, dynamo.suppress_errors\n"
        "cudnn.benchmark = True\ndeterministic()\ndynamo.suppress_errors = True\n"
        "with mkldnn.flags(False): off = torch.backends.mkldnn.enabled\n"
        "found = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, off, "
        "torch._dynamo.config.suppress_errors\n"
        "cudnn.benchmark = cudnn.deterministic = dynamo.suppress_errors = False\n"
        "found, before_here"
    )
    assert seen(notebook, cell) == [((True, True, False, True), (True, False))] * 2
    assert notebook.value("(cudnn.benchmark, cudnn.deterministic) == before")


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_settings_act_on_the_ranks_library(notebook: Notebook) -> None:
    notebook.run(
        "import jax, pandas as pd\nfrom jax import config\nfrom matplotlib import rcParams\n"
        "options, shown, copied = pd.options, pd.options.display, rcParams.copy()\n"
        "copied['figure.dpi'] = 33"
    )
    cell = (
        "import matplotlib\nimport jax, pandas\nconfig.update('jax_debug_nans', True)\n"
        "options.display.max_columns = 7\nshown.max_rows = 5\nrcParams['figure.dpi'] = 50\n"
        "found = (jax.config.jax_debug_nans, pandas.get_option('display.max_columns'),"
        " pandas.get_option('display.max_rows'), matplotlib.rcParams['figure.dpi'])\n"
        "config.update('jax_debug_nans', False)\npandas.reset_option('display')\n"
        "matplotlib.rcdefaults()\nfound, copied['figure.dpi']"
    )
    assert seen(notebook, cell) == [((True, 7, 5, 50.0), 33.0)] * 2
    assert notebook.value("jax.config.jax_debug_nans, shown.max_rows != 5") == (False, True)


def test_module_with_a_class_of_its_own(notebook: Notebook) -> None:
    text = (
        "import sys, types\nlevel = 1\n"
        "class Lazy(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        if name.startswith('lazy_'): return name\n"
        "        raise AttributeError(name)\n"
    )
    swapped = text + "sys.modules[__name__].__class__ = Lazy\n"
    replaced = text + "new = Lazy(__name__)\nvars(new).update(vars(sys.modules[__name__]))\n"
    replaced += "sys.modules[__name__] = new\n"
    files = {"own_swapped": swapped, "own_replaced": replaced}
    for name, source in files.items():
        (notebook.folder / f"{name}.py").write_text(source)
    notebook.run("import own_swapped, own_replaced as wrapped")
    cell = (
        "import sys\nwrapped.level = own_swapped.level = 2\n"
        "[each is sys.modules[each.__name__] and (each.lazy_x, each.level) for each in (own_swapped, wrapped)]"
    )
    assert seen(notebook, cell) == [[("lazy_x", 2)] * 2] * 2
    assert notebook.value("own_swapped.level, wrapped.level") == (1, 1)


def test_module_that_no_import_finds_is_a_value(notebook: Notebook) -> None:
    notebook.run(
        "import types\n"
        "class Settings(types.ModuleType):\n"
        "    def __init__(self, name, lr): super().__init__(name); self.lr = lr; self.me = self\n"
        "    def doubled(self): return 2 * self.lr\n"
        "settings, plain = Settings('settings', 0.5), types.ModuleType('plain')\n"
        "plain.lr = 3"
    )
    cell = "settings.doubled(), settings.me is settings, settings.__name__, plain.lr"
    assert seen(notebook, cell) == [(1.0, True, "settings", 3)] * 2
    notebook.run("%%sky_broadcast -o back\nsettings.lr = 2\nsettings")
    assert notebook.value("[each.doubled() for each in back]") == [4, 4]
    assert notebook.value("type(back[0]) is Settings")


@pytest.fixture
def registered() -> Iterator[types.ModuleType]:
    class Wrapper(types.ModuleType):
        pass

    module = Wrapper("another_name")
    sys.modules["registered_name"] = module
    yield module
    del sys.modules["registered_name"]


def test_module_is_found_under_the_name_that_is_imported(registered: types.ModuleType) -> None:
    assert rebuild.module_path(registered) == ("registered_name", "")
    assert rebuild.module_path(sys) == ("sys", "")
    assert rebuild.module_path(types.ModuleType("nowhere")) is None


def test_looking_for_a_module_asks_it_for_nothing(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import torch\nops = torch.ops\nbefore = sorted(vars(ops))")
    notebook.run("%%sky_broadcast -o back\nops.aten.add is torch.ops.aten.add")
    assert notebook.value("back") == [True, True]
    assert notebook.value("sorted(vars(ops)) == before")
