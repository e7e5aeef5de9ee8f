"""What a cell misses on the ranks while the notebook has it is named below its error, with what to do."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

CLASSES = """
import pickle, shelve
import joblib, numpy as np, pandas as pd, torch
class Net(torch.nn.Module): pass
class Item:
    class Part: pass
def helper(): pass
SAVED = [Net(), Item(), Item.Part(), helper]
with open("net.pkl", "wb") as file: pickle.dump(Net(), file)
with open("item.pkl", "wb") as file: pickle.dump([Item()], file)
with open("part.pkl", "wb") as file: pickle.dump(Item.Part(), file)
with open("helper.pkl", "wb") as file: pickle.dump({"f": helper}, file)
torch.save(Net(), "net.pt")
joblib.dump(Item(), "item.joblib")
np.save("items.npy", np.array([Item(), 1], dtype=object), allow_pickle=True)
pd.Series([Item(), 1]).to_pickle("frame.pkl")
with shelve.open("shelf") as shelf: shelf["a"] = Item()
"""
READS = {
    "pickle.load": ("import pickle\npickle.load(open('net.pkl', 'rb'))", "Net"),
    "pickle.loads": ("import pickle\npickle.loads(open('item.pkl', 'rb').read())", "Item"),
    "a nested class": ("import pickle\npickle.load(open('part.pkl', 'rb'))", "Item"),
    "a function": ("import pickle\npickle.load(open('helper.pkl', 'rb'))", "helper"),
    "torch.load": ("import torch\ntorch.load('net.pt', weights_only=False)", "Net"),
    "joblib.load": ("import joblib\njoblib.load('item.joblib')", "Item"),
    "np.load": ("import numpy as np\nnp.load('items.npy', allow_pickle=True)", "Item"),
    "pd.read_pickle": ("import pandas as pd\npd.read_pickle('frame.pkl')", "Item"),
    "shelve": ("import shelve\nshelve.open('shelf')['a']", "Item"),
    "another error from it": (
        "import pickle\ntry: pickle.load(open('net.pkl', 'rb'))\nexcept Exception as e: raise OSError('bad file') from e",
        "Net",
    ),
}


@pytest.mark.parametrize(("cell", "name"), READS.values(), ids=READS)
def test_class_in_a_file(notebook: Notebook, cell: str, name: str) -> None:
    notebook.run(CLASSES)
    failed = notebook.fail(f"%%sky_broadcast\n{cell}")
    assert f"\nthe notebook has {name}: --push {name}" in failed.text
    notebook.run(f"%%sky_broadcast --push {name}\n{cell}\ndel {name}")


def test_class_in_a_file_that_the_notebook_lacks(notebook: Notebook) -> None:
    notebook.run(CLASSES)
    notebook.run("del Net, SAVED")
    assert "--push" not in notebook.fail(f"%%sky_broadcast\n{READS['pickle.load'][0]}").text


def test_own_module_in_a_file(notebook: Notebook) -> None:
    (notebook.folder / "code").mkdir()
    (notebook.folder / "code" / "parts.py").write_text("class Part: pass\n")
    notebook.run(
        "import pickle, sys\nsys.path.append('code')\nimport parts\n"
        "pickle.dump(parts.Part(), open('of_parts.pkl', 'wb'))"
    )
    cell = "%%sky_broadcast\nimport pickle\npickle.load(open('of_parts.pkl', 'rb'))"
    failed = notebook.fail(cell)
    assert "%pip" not in failed.text
    assert (
        "\nparts: the notebook's own code, which is sent with a cell that imports it" in failed.text
    )
    assert "write `import parts` in the cell" in failed.text
    notebook.run(cell.replace("import pickle", "import pickle, parts"))
