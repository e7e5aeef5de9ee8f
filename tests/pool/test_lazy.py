"""Pools that are declared, and made when a cell needs them: a real notebook, with ranks on this machine."""

from __future__ import annotations

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, borrowed

notebook = borrowed(KERNEL, scope="function")


def test_made_at_the_first_cell_and_again_after_it_has_ended(
    golden: Golden, notebook: Notebook
) -> None:
    golden.line(notebook.run("%sky_pool train --ranks 1 --lazy --idle 5s").said, "'train'")
    assert notebook.run("%sky_pool train --ranks 1 --lazy --idle 5s").error is None, "twice is safe"
    assert "declared" in notebook.run("%sky_status").said
    golden(notebook.fail("%sky_restart").text)
    notebook.run("%%sky_broadcast -o first\nkept = 7")
    ended = "import time\nfrom skymagic.pool import registry\nwhile registry.pools():\n    time.sleep(0.05)"
    notebook.run(ended)
    again = notebook.run("%%sky_broadcast -o second\n'kept' in globals()")
    golden.line(again.said, "--idle 5s")
    assert notebook.value("second") == [False]
    notebook.run("%sky_down train")
    assert "train" not in notebook.run("%sky_status").said


def test_a_cells_own_line_and_a_script_make_it_too(notebook: Notebook) -> None:
    notebook.run("%sky_pool one --ranks 1 --lazy")
    notebook.run("%%sky_broadcast --ranks 1 -o found\n1")
    assert notebook.value("found") == [1]
    assert "'one'" in notebook.run("%sky_status").said, "not another pool beside it"
    notebook.run("%sky_down")
    notebook.run("%sky_pool two --ranks 1 --lazy")
    assert "hello" in notebook.run("%%sky_sh\necho hello").said
    notebook.run("%sky_down")
    notebook.run("%sky_pool three --ranks 1 --lazy")
    assert "pool 'three' is down" in notebook.run("%sky_down").said
    notebook.fail("%%sky_broadcast\n1", "no-pool")
