"""What users read is plain English: hard words are not in the README, the pages, the notebooks' text, the helps, and the package's messages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from skymagic.magics.arguments.help import help_text
from skymagic.magics.arguments.options import MAGICS
from tests.lab.notebook import ROOT

HARD = re.compile(
    r"\b(anew|amid|amidst|mend|shall|likewise|whoever|whatever|goes on|go on|going on|to be had|of ours|of yours|of its own"
    r"|in the place of|for want of|for good|is told|are told|is said|unless said|as long as they are at it|stands there"
    r"|there is none|beside you|had there|that are none)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`|^    [^\n]*$|<!--.*?-->", re.DOTALL | re.MULTILINE)


def texts() -> Iterator[tuple[str, Callable[[], str]]]:
    """What users read: its place, and how its words without code are read."""
    pages = [
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks" / "README.md",
        *ROOT.glob("skills/*/*.md"),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    for page in pages:
        if not {"_build", "notebooks"} & set(page.relative_to(ROOT).parts):
            yield str(page.relative_to(ROOT)), partial(prose, page)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        yield f"notebooks/{path.name}", partial(prose, path)
    for name in MAGICS:
        yield f"%{name} --help", partial(help_text, name)
    for path in sorted((ROOT / "skymagic").rglob("*.py")):
        yield str(path.relative_to(ROOT)), partial(said_by, path)


def prose(path: Path) -> str:
    """A page, or the text cells of a notebook."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return CODE.sub(" ", text)


def said_by(module: Path) -> str:
    """The messages of a module."""
    return " / ".join(messages(ast.parse(module.read_text())))


def messages(tree: ast.Module) -> Iterator[str]:
    """Sentences in a module's strings: not its docstrings, and not its shell scripts and programs, which nobody is shown."""
    nodes = list(ast.walk(tree))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    others = documentation | parts
    for node in nodes:
        if id(node) in others or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        said = "".join(
            str(each.value) if isinstance(each, ast.Constant) else "…" for each in values
        )
        if " " in said.strip() and said.count("\n") < 4:
            yield said


TEXTS = dict(texts())


@pytest.mark.parametrize("place", TEXTS)
def test_it_has_none_of_the_hard_words(place: str) -> None:
    words = " ".join(TEXTS[place]().split())
    found = {
        f"…{words[max(0, hit.start() - 30) : hit.end() + 20]}…" for hit in HARD.finditer(words)
    }
    assert found == set()


def test_the_words_are_found_where_they_are() -> None:
    assert [hit[0] for hit in HARD.finditer("It goes on; whatever is told. Begone!")] == [
        "goes on",
        "whatever",
        "is told",
    ]


def test_code_hides_only_itself() -> None:
    page = "One.\n\n    make whatever\n\n`whatever` and\n```text\nwhatever\n```\nTwo.\n"
    assert CODE.sub(" ", page).split() == ["One.", "and", "Two."]
