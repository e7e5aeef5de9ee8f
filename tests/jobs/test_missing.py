"""What a cell misses on the ranks while the notebook has it is named below its error, with what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.places import pooled
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


def test_own_module_in_a_file(golden: Golden, notebook: Notebook) -> None:
    (notebook.folder / "code").mkdir()
    (notebook.folder / "code" / "parts.py").write_text("class Part: pass\n")
    notebook.run(
        "import pickle, sys\nsys.path.append('code')\nimport parts\n"
        "pickle.dump(parts.Part(), open('of_parts.pkl', 'wb'))"
    )
    cell = "%%sky_broadcast\nimport pickle\npickle.load(open('of_parts.pkl', 'rb'))"
    failed = notebook.fail(cell)
    assert "%pip" not in failed.text
    golden.line(failed.text, "parts: ")
    golden.line(failed.text, "`import parts`")
    notebook.run(cell.replace("import pickle", "import pickle, parts"))


def test_module_that_an_own_package_lacks(notebook: Notebook) -> None:
    (notebook.folder / "project").mkdir()
    (notebook.folder / "project" / "__init__.py").write_text("")
    (notebook.folder / "project" / "layers.py").write_text("WIDTH = 3\n")
    notebook.run("import project")
    failed = notebook.fail("%%sky_broadcast\nimport project.layer")
    assert "No module named 'project.layer'" in failed.text
    assert "install" not in failed.text
    assert "which is sent with a cell" not in failed.text, "the cell imports it"


MOVED = """
import os, joblib, numpy as np, torch
os.makedirs("deep/out", exist_ok=True)
%cd -q deep
for name in ("a.txt", "a.csv", "a.npy", "a.png", "a.safetensors", "a b.txt", "train.py"):
    open(name, "w").close()
torch.save(1, "a.pt"); joblib.dump(1, "a.joblib")
here = os.getcwd()
"""
FILES = {
    "open": ("open('a.txt')", "a.txt"),
    "a Path": ("from pathlib import Path\nPath('a.txt').read_text()", "a.txt"),
    "with a blank": ("open('a b.txt')", "a b.txt"),
    "a folder": ("import os\nos.listdir('out')", "out"),
    "a file to be written": ("open('out/new.txt', 'w')", "out"),
    "made absolute": ("import os\nopen(os.path.abspath('a.txt'))", "a.txt"),
    "pd.read_csv": ("import pandas as pd\npd.read_csv('a.csv')", "a.csv"),
    "np.load": ("import numpy as np\nnp.load('a.npy')", "a.npy"),
    "np.loadtxt": ("import numpy as np\nnp.loadtxt('a.txt')", "a.txt"),
    "torch.load": ("import torch\ntorch.load('a.pt')", "a.pt"),
    "joblib.load": ("import joblib\njoblib.load('a.joblib')", "a.joblib"),
    "PIL": ("from PIL import Image\nImage.open('a.png')", "a.png"),
    "safetensors": (
        "import safetensors.torch\nsafetensors.torch.load_file('a.safetensors')",
        "a.safetensors",
    ),
    "datasets": (
        "import datasets\ndatasets.load_dataset('csv', data_files='a.csv')",
        "a.csv",
    ),
    "a program": ("import subprocess\nsubprocess.run(['./train.py'])", "./train.py"),
    "%run": ("%run train.py", "train.py"),
    "a library's ValueError": ("raise ValueError('File not found: filepath=a.txt.')", "a.txt"),
    "one rank": (
        "import os, skymagic as sky\nif sky.instance_info().rank == 1: os.stat('a.txt')",
        "a.txt",
    ),
}


@pytest.fixture
def moved(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook that has moved to another folder than its ranks."""
    notebook.run(MOVED)
    yield notebook
    notebook.run("%cd -q ..")


@pytest.mark.parametrize(("cell", "name"), FILES.values(), ids=FILES)
def test_file_in_the_notebooks_folder(moved: Notebook, cell: str, name: str) -> None:
    if "datasets" in cell and find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    failed = moved.fail(f"%%sky_broadcast\n{cell}")
    folder = moved.value("here")
    hint = (
        f"\nthe ranks work in {moved.folder}, and the notebook in {folder}, which has {name}: "
        f"write `%cd {folder}` in a broadcast cell, or use an absolute path"
    )
    assert hint in failed.text


def test_ranks_follow_to_the_notebooks_folder(moved: Notebook) -> None:
    moved.run(f"%%sky_broadcast\n%cd -q {moved.value('here')}")
    moved.run("%%sky_broadcast\nopen('a.txt').close()")
    assert "work in" not in moved.fail("%%sky_broadcast\nopen('nowhere.txt')").text
    moved.run(f"%%sky_broadcast\n%cd -q {moved.folder}")


NO_FILE = {
    "nobody has it": "open('nowhere.txt')",
    "nor its folder": "open('nowhere/a.txt', 'w')",
    "an absolute path": "open('/nowhere/a.txt')",
    "not a missing file": "raise ValueError('column a.txt not found')",
    "not a missing path": "raise RuntimeError('a.txt is not what I expected')",
    "a descriptor": "import os\nos.close(10 ** 6)",
}


@pytest.mark.parametrize("cell", NO_FILE.values(), ids=NO_FILE)
def test_no_hint_on_folders(moved: Notebook, cell: str) -> None:
    assert "%sky_put" not in (said := moved.fail(f"%%sky_broadcast\n{cell}").text)
    assert "notebook's folder" not in said


@pytest.mark.needs("sshd")
def test_file_on_other_machines(tmp_path: Path) -> None:
    with pooled("ssh", tmp_path) as notebook:
        notebook.run("open('a.txt', 'w').close(); open('b c.txt', 'w').close()")
        failed = notebook.fail("%%sky_broadcast\nopen('a.txt')")
        assert re.search(r"\na.txt .*rank 0 .*~ on h1: .*`%sky_put a.txt ~/a.txt`", failed.text)
        notebook.run("%sky_put a.txt ~/a.txt")
        notebook.run(
            "%%sky_broadcast\nopen('a.txt').close()\nimport os\nos.makedirs('sub/deep', exist_ok=True)\n%cd -q sub"
        )
        failed = notebook.fail("%%sky_broadcast\nopen('b c.txt')")
        assert "`%sky_put 'b c.txt' '~/sub/b c.txt'`" in failed.text
        assert "nowhere.txt is in" not in notebook.fail("%%sky_broadcast\nopen('nowhere.txt')").text
