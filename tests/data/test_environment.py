"""Changes of the notebook's environment reach the ranks, in a notebook."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import os", scope="function")


SEEN = (
    "[os.environ.get(n) for n in ('TOKENIZERS_PARALLELISM', 'MAX_TOKENS', 'KEYBOARD', 'MY_TOKEN')]"
)


def test_variables_follow_without_a_note(notebook: Notebook) -> None:
    notebook.run(
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'\nos.environ['MAX_TOKENS'] = '7'\nos.environ.update(KEYBOARD='de')"
    )
    cell = notebook.run(f"%%sky_broadcast -o got\nimport os\n{SEEN}")
    assert notebook.value("got") == [["false", "7", "de", None]] * 2
    assert "environ" not in cell.said
    assert "secret" not in cell.said
    notebook.run("os.environ['MY_TOKEN'] = 'x'")
    cell = notebook.run(f"%%sky_broadcast -o got\n{SEEN}")
    assert notebook.value("got")[0][3] is None
    assert "MY_TOKEN" in cell.said


@pytest.mark.parametrize(
    "delete", ["del os.environ['MY_FLAG']", "os.environ.pop('MY_FLAG')", "os.environ.clear()"]
)
def test_deleted_variable_is_deleted_on_the_ranks(notebook: Notebook, delete: str) -> None:
    if "clear" in delete:
        delete = "kept = dict(os.environ); kept.pop('MY_FLAG'); os.environ.clear(); os.environ.update(kept)"
    for value in ("1", "2"):
        notebook.run(f"os.environ['MY_FLAG'] = {value!r}")
        notebook.run("%%sky_broadcast -o got\nimport os\nos.environ.get('MY_FLAG')")
        assert notebook.value("got") == [value] * 2
        notebook.run(delete)
        notebook.run("%%sky_broadcast -o got\nos.environ.get('MY_FLAG')")
        assert notebook.value("got") == [None, None]
