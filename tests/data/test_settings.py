"""Settings that the notebook makes for its own process are named once, where a cell would miss them on the ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, opened
from tests.lab.pools import borrowed

IMPORTS = (
    "import decimal, logging, warnings, json\nimport matplotlib as mpl, matplotlib.pyplot as plt, numpy as np, pandas as pd, torch\n"
    "log = logging.getLogger('mine')"
)
pool = borrowed("--ranks 1", IMPORTS)
NOTE = ": set in the notebook only, because each rank has its own settings"
FORGET = """from skymagic.data.capture import assignments as _assignments
import skymagic as _sky
_assignments.assignments_of(globals()).settings.clear()
_assignments.assignments_of(globals()).on_modules.clear()
_sky.find('main').pool.shipper.notes._shown.clear()"""


@pytest.fixture
def notebook(pool: Notebook) -> Notebook:
    """A notebook that has set nothing and was told nothing."""
    pool.run(FORGET)
    return pool


SETTINGS = {
    # what is said: (the plain cell, what a broadcast cell uses)
    "logging.basicConfig": ("logging.basicConfig(level='INFO')", "logging.info('x')"),
    "logging.getLogger().setLevel": ("logging.getLogger().setLevel('INFO')", "logging.info('x')"),
    "log.setLevel": ("log.setLevel('INFO')", "log.info('x')"),
    "log.addHandler": ("log.addHandler(logging.NullHandler())", "log.info('x')"),
    "logging.config.dictConfig": (
        "import logging.config\nlogging.config.dictConfig({'version': 1})",
        "import logging\nlogging.info('x')",
    ),
    "basicConfig": ("from logging import basicConfig\nbasicConfig()", "logging.info('x')"),
    "plt.rcParams": ("plt.rcParams['figure.dpi'] = 50", "plt.close()"),
    "mpl.rcParams": ("mpl.rcParams['figure.dpi'] = 50", "plt.close()"),
    "plt.rcParams.update": ("plt.rcParams.update({'figure.dpi': 50})", "plt.close()"),
    "plt.style.use": ("plt.style.use('ggplot')", "plt.close()"),
    "plt.rc": ("plt.rc('lines', linewidth=2)", "import matplotlib.pyplot as p\np.close()"),
    "pd.options.display.max_rows": ("pd.options.display.max_rows = 7", "pd.NA"),
    "pd.set_option": ("pd.set_option('display.max_rows', 7)", "pd.NA"),
    "np.set_printoptions": ("np.set_printoptions(precision=3)", "np.ones(2)"),
    "torch.set_default_dtype": ("torch.set_default_dtype(torch.float64)", "torch.ones(2)"),
    "torch.set_num_threads": ("torch.set_num_threads(2)", "torch.ones(2)"),
    "warnings.filterwarnings": ("warnings.filterwarnings('ignore')", "np.ones(2)"),
    "jax.config.update": (
        "import jax\njax.config.update('jax_enable_x64', False)",
        "import jax\njax.__version__",
    ),
    "np.set_printoptions, torch.set_num_threads": (
        "def setup():\n    np.set_printoptions(precision=3)\n    torch.set_num_threads(2)\nsetup()",
        "np.ones(2), torch.ones(2)",
    ),
}


@pytest.mark.parametrize("said", SETTINGS)
def test_setting_is_named_once(notebook: Notebook, said: str) -> None:
    plain, cell = SETTINGS[said]
    if "jax" in said and find_spec("jax") is None:
        pytest.skip("jax is not installed")
    notebook.run(plain)
    assert NOTE not in notebook.run("%%sky_broadcast\nimport json\njson;").text
    text = notebook.run(f"%%sky_broadcast\n{cell};").text
    assert text.count(NOTE) == 1
    assert f"[{said}{NOTE}" in text
    assert NOTE not in notebook.run(f"%%sky_broadcast\n{cell};").text


def test_setting_in_a_module_that_travels(notebook: Notebook) -> None:
    (notebook.folder / "talks.py").write_text("import logging\ndef talk(): logging.info('x')\n")
    notebook.run("import talks\nlogging.basicConfig(level='INFO')")
    assert "[logging.basicConfig: set" in notebook.run("%%sky_broadcast\ntalks.talk()").text


def test_setting_before_the_pool(tmp_path: Path) -> None:
    before = "import logging\nlogging.basicConfig(level=logging.INFO)"
    with opened(tmp_path, before, "1 / 1", "%sky_pool main --ranks 1") as notebook:
        text = notebook.run("%%sky_broadcast\nlogging.info('x')").text
        assert f"[logging.basicConfig{NOTE}" in text


USE = "np.ones(1), torch.ones(1), pd.NA, plt.close(), logging.root, decimal.Decimal(1), log;"
NO_NOTE = {
    "not called": "def setup(): logging.basicConfig()",
    "a branch": "if False: logging.basicConfig()",
    "a branch of a name": "debug = False\nif debug: logging.basicConfig()\nelse: pass",
    "an unknown branch": "if np.ones(1).sum() > 3: logging.basicConfig()",
    "a handler": "try: pass\nexcept ValueError: logging.basicConfig()",
    "a short circuit": "debug = False\ndebug and logging.basicConfig()",
    "rc_context": "with plt.rc_context(): plt.rcParams['figure.dpi'] = 9",
    "style.context": "with plt.style.context('ggplot'): plt.rc('lines', linewidth=2)",
    "catch_warnings": "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')",
    "option_context": "with pd.option_context('display.max_rows', 5): pd.set_option('display.max_rows', 7)",
    "printoptions": "with np.printoptions(precision=2): np.set_printoptions(precision=3)",
    "set_grad_enabled": "with torch.set_grad_enabled(False): torch.ones(1)",
    "a seed": "torch.manual_seed(0); np.random.seed(0)",
    "a read": "plt.rcParams['figure.dpi'], pd.options.display.max_rows, log.level",
    "a figure": "plt.figure(); plt.title('x'); plt.close()",
    "another object's method": "{}.update(a=1)\nbox = type('Box', (), {'set_option': print})()\nbox.set_option(1)",
    "a name of the user": "def basicConfig(): pass\nbasicConfig()",
    "a name that is bound": "rcParams = plt.rcParams\nrcParams = {}",
}


@pytest.mark.parametrize("plain", NO_NOTE.values(), ids=NO_NOTE)
def test_no_note(notebook: Notebook, plain: str) -> None:
    notebook.run(plain)
    assert "notebook only" not in notebook.run(f"%%sky_broadcast\n{USE}").text


REPEATED = {
    "logging": ("logging.basicConfig()", "logging.getLogger().setLevel('INFO')"),
    "rcParams": ("plt.rcParams['figure.dpi'] = 50", "plt.rcParams['figure.dpi'] = 50"),
    "update": ("mpl.rcParams.update({'figure.dpi': 50})", "plt.rcParams['figure.dpi'] = 60"),
    "by a function": ("np.set_printoptions(precision=3)", "setup()"),
    "an attribute": (
        "torch.backends.cudnn.benchmark = True",
        "torch.backends.cudnn.benchmark = False",
    ),
    "an option": ("pd.options.display.max_rows = 7", "pd.options.display.max_rows = 9"),
}


@pytest.mark.parametrize(("plain", "cell"), REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("first", ["notebook", "ranks"])
def test_no_note_where_a_broadcast_cell_sets_it(
    notebook: Notebook, plain: str, cell: str, first: str
) -> None:
    notebook.run("def setup(): np.set_printoptions(precision=3)")
    if first == "notebook":
        notebook.run(plain)
    assert "notebook only" not in notebook.run(f"%%sky_broadcast\n{cell}\n{USE}").text
    notebook.run(plain)
    assert "notebook only" not in notebook.run(f"%%sky_broadcast\n{USE}").text


def test_attribute_of_a_package_is_named_where_a_part_is_used(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.run("mpl.mine = 1\nfrom matplotlib import pyplot")
    golden.line(notebook.run("%%sky_broadcast\npyplot.close();").text, "[matplotlib.mine: ")
    notebook.run("del mpl.mine")
