"""Removed magics and settings, in a notebook."""

from __future__ import annotations

import pytest

from skymagic.magics.arguments.options import MAGICS
from skymagic.magics.arguments.removed import REMOVED_MAGICS, REMOVED_SETTINGS
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, borrowed

notebook = borrowed(KERNEL)


@pytest.mark.parametrize("magic", REMOVED_MAGICS)
def test_a_removed_magic_names_its_replacement(notebook: Notebook, magic: str) -> None:
    for cell in (f"%{magic}", f"%{magic} --all\n", f"%%{magic} -t 1\nx = 1", f"y = 1\n%{magic}"):
        refused = notebook.fail(cell)
        assert refused.text == f"UsageError: {REMOVED_MAGICS[magic]}\n", cell
    assert not notebook.value("'y' in globals()"), "nothing of the cell has run"


def test_the_shell_has_these_magics_and_no_others(notebook: Notebook) -> None:
    notebook.run("found = get_ipython().magics_manager.magics")
    notebook.run(
        "found = sorted({name for kind in found.values() for name in kind if 'sky_' in name})"
    )
    assert notebook.value("found") == sorted(MAGICS)


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_removed_setting_names_its_replacement(notebook: Notebook, name: str) -> None:
    shown = notebook.run(f"%config SkyMagic.{name} = 'x'")
    assert shown.text.splitlines() == [f"ERROR:root:{REMOVED_SETTINGS[name]}"]
