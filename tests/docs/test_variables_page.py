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


TRAPS = {
    "a function keeps no old value": ("def step(): return rate", "rate = 0.5"),
    "an attribute of a module stays here": ("string.digits = ",),
    "an environment variable travels": ('os.environ["MY_BACKEND"] = ',),
    "a cell that resets and runs again": ("losses = []; n = 0\n", "losses = []; n = 0  "),
}
"""What surprised users, with what its cells contain: each is among those that run below."""


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_on_the_page(trap: str) -> None:
    assert any(all(any(text in cell for cell in cells) for text in TRAPS[trap]) for cells in RULE)


def test_the_rule_has_five_sentences() -> None:
    page = (ROOT / "docs" / "explanation" / "variables.md").read_text()
    rule = page[page.index("## When: the rule") :].partition("\n\n    ")[0]
    listed = re.findall(r"^(\d)\. (.+)$", rule, re.MULTILINE)
    assert [number for number, _ in listed] == list("12345")
    assert all(text.count(".") == 1 and text.endswith(".") for _, text in listed)
    said = " ".join(text for _, text in listed)
    assert all(
        words in said
        for words in (
            "The first cell",
            "its own variable",
            "assign the name again",
            "functions",
            "sent back",
        )
    )


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
    assert ("string.digits" in "".join(cells)) == any("string.digits: " in note for note in notes)
