"""The blocks of docs/explanation/variables.md on the rule of state, run as cells: each ``print`` shows what its comment says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.data.capture import assignments
from tests.data.far import Notebook
from tests.jobs.both_ways import ROOT

MAGIC = "%%sky_broadcast"
SHOWN = re.compile(r"print\((?P<what>.*)\) +# (?P<shown>[^:\n]*)")


def blocks(section: str) -> list[list[str]]:
    """The cells of each indented block."""
    page = (ROOT / "docs" / "explanation" / "variables.md").read_text()
    text = page[page.index(f"## {section}") :]
    text = text[: text.index("\n## ", 3)]
    found: list[list[str]] = []
    for paragraph in re.findall(r"(?:^    .*\n)+|^\S.*\n", text, re.MULTILINE):
        if not paragraph.startswith("    "):
            found.append([])
        else:
            found[-1].append("".join(line[4:] for line in paragraph.splitlines(keepends=True)))
    return [cells for cells in found if any(cell.startswith(MAGIC) for cell in cells)]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setattr(assignments, "_environment_before", dict(os.environ))
    monkeypatch.setattr("string.digits", "0123456789")
    made = Notebook(tmp_path, 2)
    yield made
    made.close()
    os.environ.pop("MY_BACKEND", None)


RULE = [cells for cells in blocks("When: the rule") if any(SHOWN.search(cell) for cell in cells)]


def test_the_traps_are_on_the_page() -> None:
    assert len(RULE) >= 4


@pytest.mark.parametrize("cells", RULE, ids=[cells[0].split("\n")[0][:20] for cells in RULE])
def test_the_rule(notebook: Notebook, cells: list[str]) -> None:
    notes: list[str] = []
    for cell in cells:
        if not cell.startswith(MAGIC):
            notebook.here(cell)
            continue
        notebook.there(cell.removeprefix(MAGIC), note=notes.append)
        for found in SHOWN.finditer(cell):
            words = " ".join(map(str, notebook.values(f"({found['what']},)")[0]))
            assert words == found["shown"].strip(), cell
    assert ("string.digits" in "".join(cells)) == any(
        "string.digits: set in the notebook only" in note for note in notes
    )
