"""Magics and options that were removed: who types one reads one line that names the replacement."""

from __future__ import annotations

import pytest

from skymagic.magics.arguments.options import MAGICS
from skymagic.magics.arguments.removed import REMOVED_MAGICS, REMOVED_SETTINGS
from skymagic.magics.transformers import explain_removed
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, borrowed

notebook = borrowed(KERNEL)


@pytest.mark.parametrize("magic", REMOVED_MAGICS)
def test_a_removed_magic_names_its_replacement(notebook: Notebook, magic: str) -> None:
    for cell in (f"%{magic}", f"%{magic} --all\n", f"%%{magic} -t 1\nx = 1", f"y = 1\n%{magic}"):
        refused = notebook.fail(cell)
        assert refused.text == f"UsageError: {REMOVED_MAGICS[magic]}\n", cell
    assert not notebook.value("'y' in globals()"), "nothing of the cell has run"


def test_each_replacement_exists() -> None:
    for name, sentence in REMOVED_MAGICS.items():
        assert name not in MAGICS
        assert any(f"%{magic}" in sentence for magic in MAGICS), sentence


def test_twenty_magics_exist() -> None:
    names = (
        "pool broadcast sh status logs stacks vars push pull clone put get forward pip gpus check"
        " restart down attach auto"
    )
    assert list(MAGICS) == [f"sky_{name}" for name in names.split()]


def test_the_shell_has_these_magics_and_no_others(notebook: Notebook) -> None:
    notebook.run("found = get_ipython().magics_manager.magics")
    notebook.run(
        "found = sorted({name for kind in found.values() for name in kind if 'sky_' in name})"
    )
    assert notebook.value("found") == sorted(MAGICS)


@pytest.mark.parametrize(
    "cell",
    [
        "%sky_shell -t 1 nvidia-smi",
        "\n  %sky_shell ls",
        "if True:\n    %sky_shell ls",
        "text = %sky_shell ls",
        "a, b = %sky_shell ls",
        "%%sky_shell\nls",
    ],
)
def test_a_removed_magic_is_found_wherever_it_may_stand(cell: str) -> None:
    assert explain_removed(cell.splitlines(keepends=True)) == REMOVED_MAGICS["sky_shell"]


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "text = '''\n%sky_shell ls\n'''",
        "text = '= %sky_shell ls'",
        "# %sky_shell ls",
        "%%writefile cells.txt\n%sky_shell ls",
        "%sky_shells",
        "x = 5\n%sky_status",
        "a = (5\n%sky_shell)",
    ],
)
def test_other_cells_are_left_alone(cell: str) -> None:
    assert explain_removed(cell.splitlines(keepends=True)) == ""


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_removed_setting_names_its_replacement(notebook: Notebook, name: str) -> None:
    shown = notebook.run(f"%config SkyMagic.{name} = 'x'")
    assert shown.text.splitlines() == [f"ERROR:root:{REMOVED_SETTINGS[name]}"]
