"""Modules that load their parts late, or replace themselves, are the rank's own modules."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

INSTALLED = {
    "lazy_getattr": "import importlib\ndef __getattr__(name):\n    if name == 'part': return 42\n    raise AttributeError(name)\n",
    "lazy_class": """import sys, types
class LazyModule(types.ModuleType):
    def __init__(self, name, file):
        super().__init__(name)
        self.__file__ = file
    def __getattr__(self, name):
        if name == 'part': return 42
        raise AttributeError(name)
    def __reduce__(self):
        return type(self), (self.__name__, self.__file__)
lazy = LazyModule(__name__, __file__)
lazy.__spec__ = __spec__
sys.modules[__name__] = lazy
""",
    "lazy_object": """import sys
class Facade:
    part = 42
    __name__, __spec__ = __name__, __spec__
sys.modules[__name__] = Facade()
""",
}
"""Modules as packages write them: PEP 562, transformers' ``_LazyModule``, and `sh`, whose module is an object of another class."""


def test_transformers_is_the_ranks_own_module(notebook: Notebook) -> None:
    pytest.importorskip("transformers")
    notebook.run("import transformers\nfrom transformers import models")
    notebook.run("""%%sky_broadcast -g got
import sys
got = (sys.modules["transformers"] is transformers, transformers.__version__, models is transformers.models)
""")
    version = notebook.value("transformers.__version__")
    assert notebook.value("got") == [(True, version, True)] * 2


@pytest.mark.parametrize("kind", INSTALLED)
def test_lazy_module_is_the_ranks_own(notebook: Notebook, kind: str) -> None:
    notebook.run(
        f"from pathlib import Path\nPath('{kind}.py').write_text({INSTALLED[kind]!r})\nimport {kind}\n"
        f"def use(): return {kind}.part\nheld = [{kind}]"
    )
    notebook.run(f"""%%sky_broadcast -g got
import sys
got = (sys.modules["{kind}"] is {kind}, {kind}.part, use(), held[0] is {kind})
""")
    assert notebook.value("got") == [(True, 42, 42, True)] * 2


def test_lazy_loader_of_the_standard_library(notebook: Notebook) -> None:
    notebook.run("""import importlib.util, sys
spec = importlib.util.find_spec("colorsys")
loader = importlib.util.LazyLoader(spec.loader)
spec.loader = loader
colorsys = importlib.util.module_from_spec(spec)
sys.modules["colorsys"] = colorsys
loader.exec_module(colorsys)""")
    notebook.run("""%%sky_broadcast -g got
got = (sys.modules["colorsys"] is colorsys, colorsys.rgb_to_hsv(1, 0, 0))""")
    assert notebook.value("got") == [(True, (0.0, 1.0, 1))] * 2


def test_class_of_a_module_object_still_travels(notebook: Notebook) -> None:
    """Another object of the class of a module in ``sys.modules`` is a normal value."""
    notebook.run("import sys, types\nclass Facade: pass\nsys.modules['facade'] = Facade()")
    notebook.run("other = Facade(); other.x = 5")
    notebook.run("%%sky_broadcast -g got\ngot = other.x")
    assert notebook.value("got") == [5, 5]
    notebook.run("del sys.modules['facade']")
