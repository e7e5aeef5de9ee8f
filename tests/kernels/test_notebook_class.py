"""What libraries take a rank for: a notebook's kernel, whose bars and tables they write as text."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

IS_NOTEBOOK = """def is_notebook():
    shell = get_ipython().__class__
    return shell.__name__, shell.__module__
is_notebook()"""


def test_shell_has_the_name_that_libraries_ask_for(notebook: Notebook) -> None:
    expected = ("ZMQInteractiveShell", "ipykernel.zmqshell")
    assert seen(notebook, IS_NOTEBOOK) == [expected] * 2


@pytest.mark.skipif(find_spec("tqdm") is None, reason="tqdm is not installed: pip install tqdm")
def test_tqdm_auto_writes_a_bar_of_text(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='steps'):\n    pass"
    )
    assert "steps: 100%" in shown.said
    assert all("text/html" not in data for data in shown.rich)


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed: pip install rich")
def test_rich_keeps_earlier_output(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nprint('before')\nfrom rich.progress import track\nfrom rich import print as show\n"
        "for _ in track(range(3), 'steps'):\n    pass\nshow('[b]after[/b]')"
    )
    assert shown.said.startswith("before")
    assert "steps" in shown.said
    assert "after" in shown.said.splitlines()[-1]
    assert "clear_output" not in [kind for kind, _, _ in shown.messages]


@pytest.mark.skipif(
    find_spec("plotly") is None, reason="plotly is not installed: pip install plotly"
)
def test_plotly_shows_its_figure(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nimport plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 2])).show()"
    )
    assert any("application/vnd.plotly.v1+json" in data for data in shown.rich)
