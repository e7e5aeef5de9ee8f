"""A library's warning about its caller names the line of the cell, though our wrapper stands between the two."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skymagic.runtime.on_import import wraps
from tests.lab.notebook import ROOT, Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2 --plugin torch")

RECORD = """%%sky_broadcast -o warned
import warnings
with warnings.catch_warnings(record=True) as _caught:
    warnings.simplefilter("always")
    {code}
[(each.filename, each.lineno) for each in _caught]"""
CALLS = {
    "DDP": "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), broadcast_buffers=True)",
    "the import of a module that travels": "import warns_about_import",
    "a function with one printer": "shown()",
    "a function in a group": "grouped()",
}


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS)
def test_warning_names_the_cells_line(notebook: Notebook, code: str) -> None:
    (notebook.folder / "warns_about_import.py").write_text(
        "import warnings\nwarnings.warn('old module', FutureWarning, stacklevel=2)\n"
    )
    notebook.run("""import torch, warnings, skymagic as sky
def warn(*_): warnings.warn("old", FutureWarning, stacklevel=2)
shown = sky.stdout(only=0)(warn)
grouped = sky.integrations.torch(backend="gloo")(warn)
""")
    notebook.run(RECORD.format(code=code))
    for files in notebook.value("warned"):
        assert [(name.startswith(("<", "/tmp/ipykernel")), line) for name, line in files] == [
            (True, 5)
        ]


def test_warning_at_the_import_of_an_adapted_library(tmp_path: Path) -> None:
    """Where something waits for a module, its code runs below our loader."""
    (tmp_path / "adapted.py").write_text(
        "import warnings\nwarnings.warn('old', FutureWarning, stacklevel=2)\n"
    )
    program = "from skymagic.runtime.on_import import when_imported\nwhen_imported('adapted', print)\nimport adapted"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith("<string>:3: FutureWarning")
    assert "adapted" in done.stdout


def test_wrapper_reads_as_the_librarys_function() -> None:
    def plain(a: int) -> int:
        """Add one."""
        return a + 1

    @wraps(plain)
    def wrapper(*args: int) -> int:
        return plain(*args)

    assert (wrapper.__name__, wrapper.__doc__, wrapper(1)) == ("plain", "Add one.", 2)
    assert inspect.signature(wrapper) == inspect.signature(plain)
    assert inspect.getsource(wrapper) == inspect.getsource(plain)
