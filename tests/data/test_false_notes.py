"""Notes about the notebook's own settings appear only when they are true."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import os, decimal, json", scope="function")
USE = "%%sky_broadcast\nimport os, decimal, json\nos, decimal, json;"


@pytest.mark.parametrize(
    "cell",
    [
        "os.environ['MY_FLAG'] = '1'",
        "def never(): decimal.mine = 1",
        "async def never(): decimal.mine = 1",
        "class C:\n    def never(self): os.environ['MY_FLAG'] = '1'",
        "if 1:\n    def never(): json.mine = 1",
    ],
)
def test_no_note(notebook: Notebook, cell: str) -> None:
    notebook.run(cell)
    assert "set in the notebook only" not in notebook.run(USE).said


@pytest.mark.parametrize(
    "cell", ["decimal.mine = 1", "if 1:\n    json.mine = 1", "class C:\n    decimal.other = 2"]
)
def test_note(notebook: Notebook, cell: str) -> None:
    notebook.run(cell)
    assert "set in the notebook only" in notebook.run(USE).said
    notebook.run(
        "for m in (decimal, json):\n    vars(m).pop('mine', None); vars(m).pop('other', None)"
    )
