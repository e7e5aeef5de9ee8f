"""``%sky_auto on``: plain cells run on the ranks and say so; magics and cells marked %%local do not."""

from __future__ import annotations

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "%sky_auto on")


def test_auto_mode_runs_plain_cells_on_ranks_with_a_note(notebook: Notebook) -> None:
    shown = notebook.run("import os\nwhere = os.environ['RANK']\nprint('rank', where)")
    assert shown.lines == ["[ranks 0, 1 of pool 'main']", "rank 0"]
    assert notebook.value("'where' in globals()") is False
    assert "where" in notebook.run("%sky_vars").stdout
    assert "----> 2 1 / 0" in notebook.fail("x = 1\n1 / 0").text, "its lines have their own numbers"


def test_magics_and_cells_marked_local_run_in_the_notebook(notebook: Notebook) -> None:
    assert notebook.run("%%sky_broadcast -t 1\nprint('typed')").lines == ["typed"], (
        "what is typed needs no line"
    )
    assert notebook.run("%time here = 1").stdout.startswith("CPU times")
    assert notebook.value("here") == 1
    shown = notebook.run("%%local\nthere = 2\nprint('local')\nthere")
    assert shown.lines == ["local"]
    assert shown.rich[-1]["text/plain"] == "2"
    assert "----> 2 1 / 0" in notebook.fail("%%local\n1 / 0").text
    assert notebook.value("there") == 2


def test_auto_mode_survives_reloading_the_extension(
    notebook: Notebook,
) -> None:
    notebook.run("%sky_auto on\n%sky_auto off")
    assert notebook.run("print('here')").lines == ["here"]
    assert notebook.run("%%local\nprint('still')").lines == ["still"]
    notebook.run("%reload_ext skymagic")
    assert notebook.run("print('plain')").lines == ["plain"]
    notebook.run("%sky_auto on\n%reload_ext skymagic")
    assert notebook.run("print('on')").lines[0] == "[ranks 0, 1 of pool 'main']"
    notebook.run("%sky_auto off")
