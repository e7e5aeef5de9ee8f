"""Magics and options that were removed: who types one reads one line that names the replacement."""

from __future__ import annotations

import pytest

from skymagic.magics.arguments.options import MAGICS
from skymagic.magics.arguments.removed import REMOVED_MAGICS
from skymagic.magics.transformers import explain_removed


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
