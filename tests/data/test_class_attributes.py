"""What the notebook sets on a class of a package is missing on the ranks: a line names it once."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

CASES = {  # a pool is told of each attribute once, and is shared: each case has a name of its own
    # name: (cells of the notebook, the cell of the ranks, what is named)
    "method of a tensor": (
        "import torch\ntorch.Tensor.hello = lambda self: 'hi'\nx = torch.ones(2)",
        "x.hello()",
        "torch.Tensor.hello",
    ),
    "class by its own name": (
        "import torch\nfrom torch import Tensor\nTensor.greet = lambda self: 'hi'\nx = [torch.ones(2)]",
        "x[0].greet()",
        "torch.Tensor.greet",
    ),
    "used by a function": (
        "import torch\ntorch.Tensor.wave = lambda self: 'hi'\nx = torch.ones(2)\ndef f(v): return v.wave()",
        "f(x)",
        "torch.Tensor.wave",
    ),
    "setattr": (
        "import fractions\nsetattr(fractions.Fraction, 'half', property(lambda self: self / 2))\nx = fractions.Fraction(1)",
        "x.half",
        "fractions.Fraction.half",
    ),
    "accessor of pandas": (
        "import pandas as pd\n@pd.api.extensions.register_dataframe_accessor('geo')\n"
        "class Geo:\n    def __init__(self, frame): self.frame = frame\nx = pd.DataFrame({'a': [1]})",
        "x.geo",
        "pandas.DataFrame.geo",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_attribute_of_a_package_class_is_named(notebook: Notebook, case: str) -> None:
    here, there, named = CASES[case]
    notebook.run(here)
    shown = notebook.finish(notebook.start(f"%%sky_broadcast\n{there};"))
    assert shown.error is not None
    assert f"[{named}: " in shown.text
    again = notebook.finish(notebook.start(f"%%sky_broadcast\n{there};"))
    assert f"{named}: " not in again.text


def test_no_note_if_the_ranks_have_the_attribute(notebook: Notebook) -> None:
    notebook.run("import torch\ntorch.Tensor.bow = lambda self: 'hi'\nx = torch.ones(2)")
    first = notebook.run("%%sky_broadcast\ntorch.Tensor.bow = lambda self: 'rank'")
    second = notebook.run("%%sky_broadcast -g got\ngot = x.bow()")
    assert "notebook only" not in first.text + second.text
    assert notebook.value("got") == ["rank"] * 2


def test_no_note_about_attributes_that_no_cell_uses(notebook: Notebook) -> None:
    notebook.run(
        "import torch\ntorch.Tensor.bow = 5\nclass Own: pass\nOwn.bow = 6\nx = torch.ones(2)"
    )
    assert "notebook only" not in notebook.run("%%sky_broadcast\nOwn, x.sum();").text


def test_attribute_of_a_local_modules_class_is_named(notebook: Notebook) -> None:
    """Ranks get the module's source, without attributes that were set later."""
    (notebook.folder / "shapes_beside.py").write_text("class Box: size = 1\n")
    notebook.run("import shapes_beside\nshapes_beside.Box.size = 3")
    shown = notebook.run("%%sky_broadcast -o found\nshapes_beside.Box.size")
    assert "shapes_beside.Box: set in the notebook only" in shown.text
    assert notebook.value("found") == [1, 1]
