"""Modules that were imported through a relative entry of `sys.path` travel wherever the notebook goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")


@pytest.mark.parametrize("entry", ["..", "../lib", "./sub", "sub/../sub"])
def test_edits_arrive_after_changing_folder(notebook: Notebook, tmp_path: Path, entry: str) -> None:
    start = tmp_path / "project" / "notebooks"
    (start / "sub").mkdir(parents=True)
    (start / entry).mkdir(exist_ok=True)
    name = "helper_" + "".join(each for each in entry if each.isalpha())
    module = (start / entry / f"{name}.py").resolve()
    module.write_text("def value(): return 1\n")
    notebook.run(f"%cd -q {start}\nimport sys, os\nsys.path.append({entry!r})")
    notebook.run(f"import {name} as h")
    notebook.run("%%sky_broadcast -o got\nh.value()")
    assert notebook.value("got") == [1, 1]
    notebook.run(f"%cd -q {tmp_path.parent}")
    module.write_text("def value(): return 22\n")
    notebook.run(f"%%sky_broadcast -o got\nimport {name} as h\nh.value()")
    assert notebook.value("got") == [22, 22]
    notebook.run(f"sys.path.remove({entry!r})")
