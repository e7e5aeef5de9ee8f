"""Removed commands and options of ``skymagic``: each is refused with one line that names its replacement."""

from __future__ import annotations

import pytest

from skymagic.api.command import REMOVED, main


@pytest.mark.parametrize("removed", REMOVED)
def test_it_names_its_replacement(removed: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *option = removed.split()
    assert main([command, "train.ipynb", *option, "x"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"skymagic {removed} was removed: {REMOVED[removed]}\n")
